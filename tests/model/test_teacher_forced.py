"""The decode kernels on a real model: a given text fed a few tokens at a time, compared with Hugging Face eager."""

from __future__ import annotations

import pytest
import torch

from numa_attention import runner
from vllm_numa_backend.checkpoints import Heads

from .harness import HuggingFaceModel, PagedModel, perplexity, steps_of, teacher_forced
from .texts import speech_tokens

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LAYERS = 30
# without a GPU, Triton kernels are interpreted: a few tokens only
LENGTH = {"torch": 160, "triton": 160 if HAS_GPU else 18}
PREFILL = {"torch": 40, "triton": 40 if HAS_GPU else 14}


@pytest.fixture(scope="module")
def text(base_model):
    return speech_tokens(base_model, count=2, length=max(LENGTH.values()))


@pytest.fixture(scope="module")
def expected(base_model, text):
    """Log-probabilities by Hugging Face eager attention, the whole text at once."""
    model = HuggingFaceModel(base_model, "eager", device=DEVICE)
    return teacher_forced(model, text, [text.shape[1]])


@pytest.mark.parametrize("decode_query", [1, 4])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_decode_kernels_reproduce_the_text_scores(kernels, decode_query, base_model, text, expected):
    if kernels == "torch" and HAS_GPU:
        pytest.skip("the torch kernels are those of machines without a GPU")
    length, prefill = LENGTH[kernels], PREFILL[kernels]
    steps = steps_of(length, prefill, decode_query)
    model = PagedModel(
        base_model,
        sequences=len(text),
        max_tokens=length,
        kernels=kernels,
        device=DEVICE,
        max_decode_query=decode_query,
    )
    runner.ran.clear()
    scores = teacher_forced(model, text[:, :length], steps)

    names = {plan.name for plan in (model.planner.decode_variant, model.planner.prefill_variant)}
    assert len(names) == 2
    assert runner.ran[model.planner.prefill_variant.name] == LAYERS
    assert runner.ran[model.planner.decode_variant.name] == LAYERS * (len(steps) - 1)
    assert set(runner.ran) == names
    wanted = expected[:, : length - 1]
    assert (scores - wanted).abs().max() < 2e-3
    assert perplexity(scores) == pytest.approx(perplexity(wanted), rel=1e-4)


def test_decode_kernels_on_a_twin_with_groups_of_four(twin_model, text, expected):
    length = LENGTH["torch"]
    kernels = "auto" if HAS_GPU else "torch"
    folder = twin_model(Heads(16, 4, 64))
    model = PagedModel(folder, sequences=len(text), max_tokens=length, kernels=kernels, device=DEVICE)
    scores = teacher_forced(model, text[:, :length], steps_of(length, 40, 4))
    assert (scores - expected[:, : length - 1]).abs().max() < 2e-3


def put(entries: torch.Tensor, *index: int, change: int) -> None:
    entries[index] += change


# (tokens, those of the last step, what to do to one entry of its schedule); blocks and tiles run in a known order: in
# one request the first decode item begins at tile 0, and the first prefill tile is the longest, the last query block
CORRUPTIONS = {
    "decode item, another KV head": (100, 1, lambda plan: put(plan.decode.items, 0, 1, change=1)),
    "decode item, the KV begins a tile later": (100, 1, lambda plan: put(plan.decode.items, 0, 3, change=1)),
    "decode range, a workgroup leaves out an item": (
        100,
        1,
        lambda plan: put(plan.decode.ranges, 0, 1, change=-1),
    ),
    "prefill tile, another KV head": (200, 190, lambda plan: put(plan.prefill.tiles, 0, 1, change=1)),
    "prefill tile, another query block": (200, 190, lambda plan: put(plan.prefill.tiles, 0, 2, change=-1)),
}


@pytest.fixture
def paged_model(base_model):
    return PagedModel(base_model, max_tokens=208, kernels="auto" if HAS_GPU else "torch", device=DEVICE)


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def test_the_schedule_decides_what_is_computed(corruption, paged_model, base_model):
    """A kernel that ignored its schedule, or an entry of it, would give the same logits."""
    length, query_len, corrupt = CORRUPTIONS[corruption]
    tokens = speech_tokens(base_model, count=1, length=length)
    context = tokens[:, :-query_len]

    def last_logits(alter) -> torch.Tensor:
        paged_model.reset()
        paged_model.alter = lambda schedule: None
        paged_model.step(context)
        paged_model.alter = alter
        return paged_model.step(tokens[:, -query_len:])

    sound = last_logits(lambda schedule: None)
    assert torch.equal(sound, last_logits(lambda schedule: None)), "the same step twice gives the same logits"
    assert sound.isfinite().all()
    assert not torch.equal(sound, last_logits(corrupt))
