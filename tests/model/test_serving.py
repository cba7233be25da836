"""SmolLM2-135M served through NUMA_SWIZZLE: the tokens of CPU_ATTN, the perplexity of Hugging Face."""

from __future__ import annotations

import pytest
import torch

from vllm_numa_backend.checkpoints import SOURCE_HEADS, Heads

from .engine import Job, Outcome, run_engine
from .harness import HuggingFaceModel, perplexity, teacher_forced
from .texts import speech_tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares with vLLM's CPU backend"),
]

OURS, THEIRS = "NUMA_SWIZZLE", "CPU_ATTN"
# a prefill of one prompt takes several steps, and shares steps with the decodes of others
CHUNKED = {
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "block_size": 32,
}
TEXT_COUNT, TEXT_LENGTH = 8, 2048
# SmolLM2's own shape, and twins that have larger heads, more of them, and another group
SERVED_SHAPES = [SOURCE_HEADS, Heads(12, 4, 128), Heads(16, 4, 256)]


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


@pytest.fixture(scope="module")
def texts(base_model) -> torch.Tensor:
    return speech_tokens(base_model, TEXT_COUNT, TEXT_LENGTH)


@pytest.fixture(scope="module")
def expected_perplexity(base_model, texts) -> float:
    """Hugging Face eager attention; computed once, since twins compute the same function."""
    model = HuggingFaceModel(base_model, "eager")
    return perplexity(torch.cat([teacher_forced(model, text[None], [TEXT_LENGTH]) for text in texts]))


@pytest.mark.parametrize(
    "heads", SERVED_SHAPES, ids=lambda heads: f"{heads.q_heads}-{heads.kv_heads}-{heads.head_dim}"
)
def test_perplexity_equals_hugging_face(heads, twin_model, texts, expected_perplexity):
    options = {"max_model_len": TEXT_LENGTH + 16, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    job = Job(str(twin_model(heads)), OURS, texts.tolist(), score=True, options=options)
    ours = run_engine(job)
    scores = torch.tensor(ours.scores)
    assert scores.shape == (TEXT_COUNT, TEXT_LENGTH - 1)
    assert ours.ran["torch-prefill"] > 0
    assert perplexity(scores) == pytest.approx(expected_perplexity, rel=1e-3)
