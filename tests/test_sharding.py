"""Sharding a sequence over ranks: whatever the ranks and the interleave, the ranks together give the whole result."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from numa_attention.jit import kernel
from numa_attention.shapes import UnsupportedShape
from numa_attention.sharding import WHOLE, Shard
from numa_attention.sharding_device import global_position, local_count
from tests.kernel_step import kernels, make_planner, shape_of
from tests.shards import check_sharded, run_rank, shards_of
from tests.support import make_paged_case

RANKS = (2, 3, 4, 8)


@given(ranks=st.integers(1, 9), interleave=st.sampled_from([1, 2, 3, 16, 256]), length=st.integers(0, 3000))
@settings(max_examples=60)
def test_every_token_has_one_rank_and_one_place(ranks, interleave, length):
    """The definition, token by token: runs are dealt in turn, and each rank's tokens lie in a row without gaps."""
    held = {rank: [] for rank in range(ranks)}
    for position in range(length):
        held[position // interleave % ranks].append(position)
    for shard in shards_of(ranks, interleave):
        mine = held[shard.rank]
        assert shard.count(length) == len(mine) <= shard.most(length)
        assert [shard.position(token) for token in range(len(mine))] == mine
        lengths = np.arange(length + 1)
        counts = np.searchsorted(mine, lengths)
        assert np.array_equal(shard.count(lengths), counts)
        assert np.array_equal(shard.count(torch.from_numpy(lengths)).numpy(), counts)
        assert np.array_equal(shard.position(torch.arange(len(mine))).numpy(), np.array(mine, np.int64))


@kernel
def count_kernel(
    counts, positions, N: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr
):
    o_n = tl.arange(0, N)
    tl.store(counts + o_n, local_count(o_n - 8, RANKS, RANK, INTERLEAVE))
    tl.store(positions + o_n, global_position(o_n, RANKS, RANK, INTERLEAVE))


def test_the_kernels_count_as_the_host_does(device):
    lengths = torch.arange(512) - 8
    for ranks, interleave in ((1, 1), (2, 1), (3, 16), (8, 5)):
        for shard in shards_of(ranks, interleave):
            counts, positions = (torch.full((512,), -7, dtype=torch.int32, device=device) for _ in range(2))
            count_kernel[(1,)](counts, positions, 512, ranks, shard.rank, interleave)
            expected = lengths if shard.is_whole else shard.count(lengths.clamp(min=0))
            assert torch.equal(counts.cpu(), expected.int())
            assert torch.equal(positions.cpu(), shard.position(torch.arange(512)).int())


@pytest.mark.parametrize(("ranks", "rank", "interleave"), [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0)])
def test_shards_that_make_no_sense(ranks, rank, interleave):
    with pytest.raises(ValueError, match="cannot be sharded|is none of"):
        Shard(ranks, rank, interleave)


def test_runs_that_no_page_holds_are_refused():
    shape = shape_of(make_paged_case([1], [20]))
    with pytest.raises(UnsupportedShape, match="pages of 16 tokens cannot be sharded in runs of 48 tokens"):
        dataclasses.replace(shape, shard=Shard(2, 0, 48)).check()
    dataclasses.replace(shape, shard=Shard(2, 1, 8)).check()


# one decode, several tokens of a speculative one, a chunk over a prefix, a whole prompt, fewer tokens than ranks
QUERY_LENS, SEQ_LENS, DECODES = [1, 4, 3, 33, 17, 2], [300, 65, 3, 100, 17, 2], 3


@kernels
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 16), (4, 1), (8, 16)])
def test_ranks_together_give_the_whole_result(device, kernels, ranks, interleave):
    case = make_paged_case(QUERY_LENS, SEQ_LENS, q_heads=3, kv_heads=1, head_dim=16, device=device)
    options = {"max_decode_query": 4}
    check_sharded(
        case, ranks, interleave, kernels=kernels, num_decodes=DECODES, planner_options=options
    )  # fmt: skip


@kernels
def test_runs_as_long_as_a_large_page(device, kernels):
    """Rank 0 alone holds the first 256 tokens: the others see nothing of the short sequences."""
    case = make_paged_case([1, 20, 5], [700, 200, 300], head_dim=16, page_size=256, device=device)
    check_sharded(case, 3, 256, kernels=kernels, num_decodes=1)


@kernels
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 8)])
def test_windows_are_of_positions(device, kernels, window, ranks, interleave):
    case = make_paged_case(QUERY_LENS, SEQ_LENS, q_heads=2, kv_heads=1, head_dim=16, device=device)
    options = {"max_decode_query": 4}
    check_sharded(
        case, ranks, interleave, window=window, kernels=kernels, num_decodes=DECODES, planner_options=options
    )  # fmt: skip


@kernels
@pytest.mark.parametrize("window", [-1, 9])
def test_every_option_of_the_score(device, kernels, window):
    case = make_paged_case([2, 9, 14], [30, 41, 60], q_heads=2, kv_heads=1, head_dim=16, device=device)
    slopes = torch.tensor([0.5, 0.25], device=device)
    spans = torch.tensor([[[0, 0], [0, 0]], [[33, 38], [0, 0]], [[20, 48], [51, 58]]], dtype=torch.int32)
    both = dict(kernels=kernels, num_decodes=1, window=window, general=True)
    planner_options = {"max_decode_query": 2}
    causal = torch.tensor([1, 0, 1], dtype=torch.bool, device=device)
    for options in (
        dict(alibi_slopes=slopes, soft_cap=5.0),
        dict(alibi_slopes=slopes, alibi_sqrt=True),
        dict(spans=spans.to(device)),
        dict(spans=spans.to(device), clamp_spans=True),
        dict(causal=False),
        dict(causal=causal),
    ):
        check_sharded(case, 2, 4, planner_options=dict(planner_options), **both, **options)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(device, kernels, dtype):
    case = make_paged_case([1, 20], [130, 61], head_dim=64, dtype=dtype, device=device)
    check_sharded(case, 2, 16, kernels=kernels, num_decodes=1)


@kernels
def test_float8_cache(device, kernels):
    case = make_paged_case([1, 20], [130, 61], head_dim=64, kv_dtype=torch.float8_e5m2, device=device)
    scales = dict(k_scale=torch.tensor([0.5], device=device), v_scale=torch.tensor([2.0], device=device))
    check_sharded(case, 2, 16, kernels=kernels, num_decodes=1, **scales)


@kernels
def test_prefixes_split_as_in_decode(device, kernels):
    """The third way to run, a few query tiles over a long prefix, with the thresholds in local tokens."""
    case = make_paged_case([9], [8300], q_heads=2, kv_heads=1, head_dim=16, device=device)
    options = {"extend": True}
    schedules = check_sharded(case, 4, 16, kernels=kernels, num_decodes=0, planner_options=options)
    assert all(schedule.extend is not None for schedule in schedules)
    assert run_rank(
        make_paged_case([9], [2100], q_heads=2, kv_heads=1, head_dim=16, device=device),
        Shard(4, 0, 16), kernels=kernels, num_decodes=0, planner_options=dict(options), scale=0.25,
    )[2].extend is None  # fmt: skip


@kernels
def test_a_rank_without_tokens_says_so(device, kernels):
    """Its output is 0 and its LSE -inf, in decode and in prefill, with nothing of the cache read."""
    case = make_paged_case([1, 2], [3, 2], head_dim=16, device=device)
    out, lse, schedule = run_rank(case, Shard(8, 5, 1), kernels=kernels, num_decodes=1, scale=1.0)
    assert schedule.decode is not None and schedule.prefill is not None
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@given(
    ranks=st.sampled_from(RANKS),
    interleave=st.sampled_from([1, 2, 16]),
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 90)), min_size=1, max_size=4),
    decodes=st.integers(0, 4),
    window=st.sampled_from([-1, 0, 5, 30]),
)
@settings(max_examples=25)
def test_any_sharding_gives_the_unsharded_result(ranks, interleave, lengths, decodes, window):
    query_lens = [query for query, _ in lengths]
    case = make_paged_case(query_lens, [query + prefix for query, prefix in lengths], head_dim=8)
    options = {"max_decode_query": 5}
    check_sharded(
        case, ranks, interleave, kernels="torch", num_decodes=min(decodes, len(lengths)), window=window,
        planner_options=options,
    )  # fmt: skip


def test_a_sharded_cache_has_general_kernels_alone():
    """Kernels that know of whole sequences only are not chosen, on any generation, and say why."""
    from numa_attention.topology import pretend
    from numa_attention.variants import choose_decode, choose_prefill

    case = make_paged_case([1], [20], head_dim=128, dtype=torch.bfloat16)
    shape = dataclasses.replace(shape_of(case), shard=Shard(2))
    for generation in ("gfx942", "gfx950", "gfx1250", "sm_90", "sm_100"):
        topology = pretend(generation)
        assert choose_decode(shape, topology, "triton", 1, aiter="always").name == "portable-decode"
        assert choose_prefill(shape, topology, "triton", aiter="always").name == "portable-prefill"
    assert "sharded over ranks" in choose_decode(shape, pretend("gfx1250"), "triton", 1).instead_of
    with pytest.raises(UnsupportedShape, match="hopper-decode takes whole sequences"):
        variant = dataclasses.replace(
            choose_decode(shape, pretend("sm_90"), "triton", 1), name="hopper-decode"
        )
        make_planner(case, kernels="torch", shape=shape, decode_variant=variant)
    assert WHOLE.is_whole and make_planner(case, kernels="torch").shape.shard is WHOLE
