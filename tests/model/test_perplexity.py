"""Perplexity of State of the Union addresses: SmolLM2-135M and its twins under vLLM, and Hugging Face eager."""

from __future__ import annotations

import pytest
import torch

from vllm_numa_backend.checkpoints import SOURCE_HEADS, Heads

from .engine import Job, run_engine
from .harness import HuggingFaceModel, perplexity, teacher_forced
from .texts import speech_tokens

# sixteen thousand tokens a test, on one core
pytestmark = pytest.mark.timeout(1500)

TEXT_COUNT, TEXT_LENGTH = 8, 2048
# SmolLM2's own shape, and twins with larger heads and more of them
SERVED_SHAPES = [SOURCE_HEADS, Heads(12, 4, 128), Heads(9, 3, 256)]


@pytest.fixture(scope="module")
def texts(base_model) -> torch.Tensor:
    return speech_tokens(base_model, TEXT_COUNT, TEXT_LENGTH)


@pytest.fixture(scope="module")
def expected_perplexity(base_model, texts) -> float:
    """Hugging Face eager attention; computed once, since twins compute the same function."""
    model = HuggingFaceModel(base_model, "eager")
    steps = [256] * (TEXT_LENGTH // 256)  # takes half as long as the whole text at once
    return perplexity(torch.cat([teacher_forced(model, text[None], steps) for text in texts]))


@pytest.mark.parametrize(
    "heads", SERVED_SHAPES, ids=lambda heads: f"{heads.q_heads}-{heads.kv_heads}-{heads.head_dim}"
)
def test_perplexity_equals_hugging_face(heads, twin_model, texts, expected_perplexity):
    options = {"max_model_len": TEXT_LENGTH + 16, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    job = Job(str(twin_model(heads)), "NUMA_SWIZZLE", texts.tolist(), score=True, options=options)
    ours = run_engine(job)
    scores = torch.tensor(ours.scores)
    assert scores.shape == (TEXT_COUNT, TEXT_LENGTH - 1)
    assert any(variant.endswith("-prefill") for variant in ours.ran)
    assert perplexity(scores) == pytest.approx(expected_perplexity, rel=1e-3)
