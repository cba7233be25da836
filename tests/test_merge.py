"""Merging partial results: any way to cut the keys gives the result over all of them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numa_attention.jit import SETTING
from numa_attention.merge import fold_sinks, merge_states, weigh

HEAD_DIM = 3


def _attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's output [D] and LSE over keys with these scores [K] and values [K, D]."""
    if not len(scores):
        # an empty part's output must not matter
        return torch.full((HEAD_DIM,), math.nan).double(), torch.tensor(-math.inf).double()
    return torch.softmax(scores, 0) @ values, torch.logsumexp(scores, 0)


def _merge(parts):
    outs, lses = zip(*parts, strict=True)
    return merge_states(torch.stack(outs), torch.stack(lses))


def _assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@st.composite
def cut_keys(draw):
    """Scores, values, and the same keys dealt to one to six parts, some of them empty."""
    magnitude = draw(st.sampled_from([1.0, 30.0, 1e3, 1e5]))
    score = st.floats(-1, 1).map(lambda x: x * magnitude)
    scores = draw(st.lists(score, min_size=1, max_size=20))
    parts = draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(0, parts - 1), min_size=len(scores), max_size=len(scores)))
    values = torch.randn(len(scores), HEAD_DIM, generator=torch.Generator().manual_seed(len(scores))).double()
    scores, owner = torch.tensor(scores).double(), torch.tensor(owner)
    return scores, values, [_attend(scores[owner == part], values[owner == part]) for part in range(parts)]


@given(cut_keys())
def test_any_cut_gives_the_uncut_result(case):
    scores, values, parts = case
    _assert_same(_merge(parts), _attend(scores, values))


@given(cut_keys(), st.randoms(use_true_random=False))
def test_order_does_not_matter(case, random):
    _, _, parts = case
    shuffled = random.sample(parts, len(parts))
    _assert_same(_merge(shuffled), _merge(parts))


@given(cut_keys(), st.data())
def test_merging_is_associative(case, data):
    _, _, parts = case
    cut = data.draw(st.integers(1, len(parts)))
    inner = _merge(parts[:cut])
    _assert_same(_merge([inner, *parts[cut:]]), _merge(parts))


EXTREME_LSE = st.sampled_from([-math.inf, -3e38, -1e30, -1e4, -88.0, 0.0, 1e-30, 88.8, 1e4, 1e30, 3e38])


@given(st.lists(EXTREME_LSE, min_size=1, max_size=5), st.sampled_from([1.0, 3e38, -3e38]))
def test_extremes_stay_finite(lses, value):
    out, lse = merge_states(
        torch.full((len(lses), 2, HEAD_DIM), value), torch.tensor(lses)[:, None].expand(-1, 2)
    )
    assert out.isfinite().all()
    assert not lse.isnan().any() and (lse < math.inf).all()
    assert ((lse == -math.inf) == (max(lses) == -math.inf)).all()
    if max(lses) > -math.inf:
        # a weighted mean of equal outputs, and a sum no smaller than its largest part
        torch.testing.assert_close(out, torch.full_like(out, value))
        assert (lse >= torch.tensor(max(lses))).all()


def test_all_parts_empty():
    out, lse = merge_states(torch.full((4, 2, HEAD_DIM), math.nan), torch.full((4, 2), -math.inf))
    assert torch.equal(out, torch.zeros(2, HEAD_DIM))
    assert torch.equal(lse, torch.full((2,), -math.inf))


def test_rows_are_independent():
    # row 0 has keys in part 0 alone, row 1 in both: weights 1 and 1 : 3
    lses = torch.tensor([[5.0, 0.0], [-math.inf, math.log(3)]])
    outs = torch.tensor([[[1.0], [4.0]], [[math.nan], [8.0]]])
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, torch.tensor([[1.0], [7.0]]))
    torch.testing.assert_close(lse, torch.tensor([5.0, math.log(4)]))


@pytest.mark.parametrize(
    ("given_dtype", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_no_precision_is_lost_to_the_type_of_the_parts(given_dtype, returned):
    out, lse = merge_states(torch.ones(2, 1, HEAD_DIM, dtype=given_dtype), torch.zeros(2, 1))
    assert out.dtype == lse.dtype == returned
    torch.testing.assert_close(lse, torch.full((1,), math.log(2), dtype=returned))


def test_a_sink_folds_in_after_a_merge():
    """As a key without a value, once for all parts; where nothing else is seen it takes all the weight."""
    random = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(3, 5, 2, HEAD_DIM, generator=random), torch.randn(3, 5, 2, generator=random)
    lses[:, 4] = -math.inf
    sinks = torch.tensor([0.5, -math.inf])
    out, lse = fold_sinks(*merge_states(outs, lses), sinks)
    sink = torch.zeros(1, 5, 2, HEAD_DIM), sinks.expand(1, 5, 2)
    expected = merge_states(torch.cat([outs, sink[0]]), torch.cat([lses, sink[1]]))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    assert torch.equal(out[4], torch.zeros(2, HEAD_DIM)) and lse[4].tolist() == [0.5, -math.inf]


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads", "head_dim"), [(2, 5, 1, 8), (3, 1, 2, 40), (8, 4, 3, 128)]
)
def test_the_launches_around_a_collective(device, ranks, tokens, heads, head_dim):
    """As torch does it: weighing a part, merging parts; empty parts may hold NaN, rows that nobody has are 0."""
    from numa_attention import merge_device

    random = torch.Generator().manual_seed(ranks)
    outs = torch.randn(ranks, tokens, ranks * heads, head_dim, generator=random)
    lses = 20 * torch.randn(ranks, tokens, ranks * heads, generator=random)
    lses[torch.rand(lses.shape, generator=random) < 0.4] = -math.inf
    lses[:, 0, 0] = -math.inf
    outs[lses == -math.inf] = math.nan
    expected, expected_lse = merge_states(outs, lses)
    total = torch.zeros(ranks, tokens, heads, head_dim)
    for rank in range(ranks):
        weighted, lse = merge_device.weigh(outs[rank].to(device), lses.to(device), rank)
        own = slice(rank * heads, (rank + 1) * heads)
        torch.testing.assert_close(lse.cpu(), expected_lse[:, own])
        torch.testing.assert_close(weighted.cpu(), weigh(outs[rank], lses, rank)[0])
        total += weighted.cpu()
        parts = torch.cat([outs[:, :, own], lses[:, :, own, None]], -1)
        out, lse = merge_device.merge_packed(parts.to(device))
        torch.testing.assert_close(out.cpu(), expected[:, own])
        torch.testing.assert_close(lse.cpu(), expected_lse[:, own])
    torch.testing.assert_close(total.movedim(0, 1).flatten(1, 2), expected)


@pytest.mark.slow
def test_the_launches_around_a_collective_compile(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", SETTING)
    }
    script = Path(__file__).with_name("compile_rank_merge.py")
    done = subprocess.run(
        [sys.executable, script],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({(report["generation"], report["kernel"]) for report in reports}) == 6
    assert not any(report["spills"] or report["scratch"] for report in reports), reports
