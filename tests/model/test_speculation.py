"""Speculative decoding on SmolLM2-135M: drafts change how many tokens a step has, not which tokens come out."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from .engine import Job, Outcome, run_engines
from .texts import speech_tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares on vLLM's CPU platform")

ANSWER = 64
DRAFT = 6  # with the token before it 21 query rows a KV head: more than a decode kernel's 16
OPTIONS = {"max_model_len": 512, "max_num_batched_tokens": 64, "block_size": 32}
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFT,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.fixture(scope="module")
def prompts(base_model) -> list[list[int]]:
    """Texts below and above a step's 64 tokens; most repeat themselves, so that long n-grams are found again."""
    speeches = speech_tokens(base_model, count=8, length=60).tolist()
    return [speech[: 20 + 4 * i] * (1 + i % 3) for i, speech in enumerate(speeches)]


@pytest.fixture(scope="module")
def outcomes(base_model, prompts) -> tuple[Outcome, Outcome]:
    """Without speculation, with speculation."""
    # few requests a step: more steps, and prompts that arrive while others decode
    changes = [{"max_num_seqs": 8}, {"max_num_seqs": 2, "speculative_config": SPECULATION}]
    plain, speculative = run_engines(
        [
            Job(
                str(base_model),
                "NUMA_SWIZZLE",
                prompts,
                generate=ANSWER,
                watch_decodes=True,
                options=OPTIONS | change,
            )
            for change in changes
        ]
    )
    return plain, speculative


@pytest.fixture(scope="module")
def layers(base_model) -> int:
    return json.loads((base_model / "config.json").read_text())["num_hidden_layers"]


def decode_steps(outcome: Outcome, layers: int) -> Counter[tuple[int, ...]]:
    """How many steps the decode kernels ran, by the query tokens of each request."""
    assert all(launches % layers == 0 for launches in outcome.decodes.values())
    return Counter(
        {tuple(map(int, key.split())): launches // layers for key, launches in outcome.decodes.items()}
    )


def test_greedy_tokens_are_those_without_speculation(outcomes):
    plain, speculative = outcomes
    assert all(len(tokens) == ANSWER for tokens in plain.tokens)
    assert speculative.tokens == plain.tokens


def test_drafts_went_through_the_decode_kernels(outcomes, layers, prompts):
    plain, speculative = (decode_steps(outcome, layers) for outcome in outcomes)
    assert all(max(query_lens) == 1 for query_lens in plain)
    several = {query_lens: steps for query_lens, steps in speculative.items() if max(query_lens) > 1}
    assert sum(several.values()) >= 50
    assert max(map(max, several)) == DRAFT + 1
    assert any(len(set(query_lens)) > 1 for query_lens in several), "requests of unlike lengths in one step"
    # a prompt's last step gives the first token of its answer
    needed = len(prompts) * (ANSWER - 1)
    assert sum(len(query_lens) * steps for query_lens, steps in speculative.items()) < needed, (
        "some are accepted"
    )
    assert sum(sum(query_lens) * steps for query_lens, steps in speculative.items()) > needed, (
        "and some are not"
    )
