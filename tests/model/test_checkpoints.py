"""Twins of the test model: other attention shapes, the same function."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from vllm_numa_backend.checkpoints import SOURCE_HEADS, CheckpointError, Heads, make_checkpoint

from .harness import HuggingFaceModel
from .texts import speech_tokens

TWINS = [Heads(9, 3, 128), Heads(12, 4, 64), Heads(16, 4, 256)]


@pytest.fixture(scope="module")
def text(base_model):
    return speech_tokens(base_model, count=2, length=96)


@pytest.fixture(scope="module")
def expected_logits(base_model, text):
    return HuggingFaceModel(base_model).step(text)


@pytest.mark.parametrize(
    "heads", TWINS, ids=lambda heads: f"{heads.q_heads}-{heads.kv_heads}-{heads.head_dim}"
)
def test_twin_gives_the_same_logits(heads, twin_model, text, expected_logits):
    folder = twin_model(heads)
    config = json.loads((folder / "config.json").read_text())
    written = Heads(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert written == heads
    logits = HuggingFaceModel(folder).step(text)
    difference = (logits - expected_logits).norm() / expected_logits.norm()
    assert difference < 1e-5
    assert torch.equal(logits.argmax(-1), expected_logits.argmax(-1))


def test_added_heads_are_alive_and_silent(twin_model):
    """Their keys and queries are not zero, so a kernel that mixes them in would be noticed; their o_proj is."""
    weights = load_file(twin_model(Heads(16, 4, 256)) / "model.safetensors")
    layer = "model.layers.0.self_attn."
    added = [3, 7, 11, 12, 13, 14, 15]  # a fourth member of each group, and a fourth group
    queries = weights[f"{layer}q_proj.weight"].view(16, 256, -1)
    outputs = weights[f"{layer}o_proj.weight"].view(-1, 16, 256)
    assert all(queries[head].any() for head in added)
    assert not outputs[:, added].any()
    assert all(outputs[:, head].any() for head in set(range(16)) - set(added))


@pytest.mark.parametrize(
    ("heads", "word"),
    [
        (Heads(9, 3, 96), "head_dim 96"),
        (Heads(10, 4, 64), "10 query heads"),
        (Heads(8, 4, 64), "8 query heads"),
        (Heads(6, 2, 64), "6 query heads"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(heads, word, tmp_path):
    with pytest.raises(CheckpointError, match=word):
        make_checkpoint(tmp_path / "model", heads)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "reason"), [("model.safetensors", "holds a model already"), ("notes", "other files")]
)
def test_a_folder_in_use_is_kept(file, reason, tmp_path):
    (tmp_path / file).write_text("mine")
    with pytest.raises(CheckpointError, match=reason):
        make_checkpoint(tmp_path, SOURCE_HEADS)
    assert (tmp_path / file).read_text() == "mine"


def test_dtype_is_written(base_model, tmp_path):
    make_checkpoint(tmp_path / "bf16", dtype="bf16", source=base_model)
    weights = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
