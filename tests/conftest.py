"""Shared set-up: without a GPU the kernels are interpreted, and tests marked `gpu` are skipped."""

import os

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # before anything imports Triton, which reads this once
    os.environ.setdefault("TRITON_INTERPRET", "1")

# a first call imports and compiles, so that times say nothing; the same examples in every run
hypothesis.settings.register_profile("here", deadline=None, derandomize=True)
hypothesis.settings.load_profile("here")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where there is none")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(items):
    # the file that takes longest starts first, and the other worker takes the rest meanwhile
    items.sort(key=lambda item: item.path.name != "test_perplexity.py")
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")
