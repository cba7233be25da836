"""SmolLM2-135M served through NUMA_SWIZZLE gives the tokens of vLLM's own CPU backend."""

from __future__ import annotations

import pytest
import torch

from .engine import Job, Outcome, run_engine
from .texts import speech_tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares with vLLM's CPU backend")

OURS, THEIRS = "NUMA_SWIZZLE", "CPU_ATTN"
# a prefill of one prompt takes several steps, and shares steps with the decodes of others
CHUNKED = {
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def prompts(base_model) -> list[list[int]]:
    """Eight prompts of uneven length; every other one repeats the one before it and goes on: a prefix to cache."""
    speeches = speech_tokens(base_model, count=4, length=160).tolist()
    lengths = [(33, 60), (64, 97), (50, 120), (127, 150)]
    return [speech[:length] for speech, pair in zip(speeches, lengths, strict=True) for length in pair]


@pytest.fixture(scope="module")
def expected(base_model, prompts) -> Outcome:
    """The same prompts through vLLM's own CPU backend."""
    return run_engine(Job(str(base_model), THEIRS, prompts, generate=64, options=CHUNKED))


def test_greedy_tokens_equal_those_of_cpu_attn(base_model, prompts, expected):
    ours = run_engine(Job(str(base_model), OURS, prompts, generate=64, options=CHUNKED))
    assert ours.tokens == expected.tokens
    assert all(len(tokens) == 64 for tokens in ours.tokens)
    assert ours.ran["torch-decode"] > 0
    assert ours.ran["torch-prefill"] > 0
    assert ours.cached_tokens > 0, "the prefix cache was to take part"
    assert not expected.ran


def test_greedy_tokens_in_several_processes(base_model, prompts, expected):
    ours = run_engine(Job(str(base_model), OURS, prompts, generate=64, options=CHUNKED, multiprocess=True))
    assert ours.tokens == expected.tokens
    assert f"{OURS} decode of 9/3 heads of 64: variant torch-decode" in ours.log
    assert f"{OURS} prefill of 9/3 heads of 64: variant torch-prefill" in ours.log


def test_greedy_tokens_of_the_interpreted_triton_kernels(base_model, prompts, expected):
    # generation is greedy: the first tokens of a longer answer are those of a shorter one
    ours = run_engine(
        Job(
            str(base_model),
            OURS,
            prompts[:2],
            generate=8,
            options=CHUNKED,
            environment={"NUMA_SWIZZLE_KERNELS": "interpret"},
        )
    )
    assert ours.tokens == [tokens[:8] for tokens in expected.tokens[:2]]
    assert ours.ran.keys() == {"portable-decode", "portable-prefill"}
