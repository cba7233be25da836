"""Tiny models of several families through NUMA_SWIZZLE: the answers of vLLM's CPU backend and of Hugging Face.

qwen2: biases on Q, K and V, seven query heads a KV head. gemma2: soft cap, head_dim 256, a window on every other
layer. gpt-oss: sinks, a window on every other layer. bloom: ALiBi, one query head a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .engine import Job, Outcome, run_engines
from .families import FAMILIES, Reference, flawed, write_family

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares with vLLM's CPU backend")

# lengths of less and more than a page, a window and a step's 64 tokens; the last two differ in their first token only
PROMPTS = [[3 + (7 * i + i * i) % 150 for i in range(n)] for n in (1, 17, 63, 150, 90)]
PROMPTS.append([99, *PROMPTS[-1][1:]])
ANSWER = 24
OPTIONS = {"max_model_len": 256, "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True}
TOLERANCE = 2e-4  # of a log-probability; flaws change some by more than a hundred times as much


@dataclass
class Answers:
    """A family's folder, and what each side says of the prompts."""

    folder: Path
    ours: Outcome
    theirs: Outcome


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Answers]:
    """By family. All engines share a process: most of a tiny engine's time is its start."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        write_family(FAMILIES[name], folder)
    outcomes = iter(
        run_engines(
            [
                Job(str(folder), backend, PROMPTS, generate=ANSWER, score=True, options=OPTIONS)
                for folder in folders.values()
                for backend in ("NUMA_SWIZZLE", "CPU_ATTN")
            ]
        )
    )
    return {name: Answers(folder, next(outcomes), next(outcomes)) for name, folder in folders.items()}


def all_scores(outcome: Outcome) -> torch.Tensor:
    return torch.tensor([score for prompt in outcome.scores for score in prompt])


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_those_of_cpu_attn(answers, name):
    family, ours, theirs = FAMILIES[name], answers[name].ours, answers[name].theirs
    assert ours.ran.keys() == {"torch-decode", "torch-prefill"}
    assert not theirs.ran
    for window in family.windows:
        for phase in ("decode", "prefill"):
            assert f"NUMA_SWIZZLE {phase} of {family.heads}{window}: " in ours.log
    assert ours.tokens == theirs.tokens
    assert all(len(tokens) == ANSWER for tokens in ours.tokens)
    torch.testing.assert_close(all_scores(ours), all_scores(theirs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_those_of_hugging_face(answers, name):
    ours, reference = answers[name].ours, Reference(answers[name].folder)
    torch.testing.assert_close(all_scores(ours), reference.scores(PROMPTS), rtol=0, atol=TOLERANCE)
    assert ours.tokens == reference.choices(PROMPTS, ours.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_distant_token_changes_the_answer(answers, name):
    one, other = answers[name].ours.tokens[-2:]
    assert one != other


@pytest.mark.parametrize(
    ("name", "flaw"), [(name, flaw) for name in FAMILIES for flaw in FAMILIES[name].flaws]
)
def test_a_flaw_would_change_the_answers(answers, name, flaw):
    """In decode as in prefill: without this, equal answers would say little about the option."""
    ours = answers[name].ours
    with flawed(answers[name].folder, flaw) as reference:
        difference = (reference.scores(PROMPTS) - all_scores(ours)).abs().max()
        assert difference > 100 * TOLERANCE
        assert reference.choices(PROMPTS, ours.tokens) != ours.tokens
