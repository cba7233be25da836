"""Model folders, made once a session. Every test here runs a real model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vllm_numa_backend.checkpoints import SOURCE_HEADS, Heads, make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "models" / "smollm2-135m"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Small products on several threads of a busy machine spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base_model() -> Path:
    """SmolLM2-135M-Instruct in float32; kept between sessions, since the conversion takes most of a minute."""
    if not BASE.exists():
        make_checkpoint(BASE)
    return BASE


@pytest.fixture(scope="session")
def twin_model(base_model: Path, tmp_path_factory) -> Iterator[Callable[[Heads], Path]]:
    """Makes the folder of a twin with the given heads."""
    folder = tmp_path_factory.mktemp("twins")
    made: dict[Heads, Path] = {SOURCE_HEADS: base_model}

    def make(heads: Heads) -> Path:
        if heads not in made:
            made[heads] = folder / f"{heads.q_heads}-{heads.kv_heads}-{heads.head_dim}"
            make_checkpoint(made[heads], heads, source=base_model)
        return made[heads]

    yield make
    shutil.rmtree(folder)  # a gigabyte each
