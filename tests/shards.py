"""Splitting a paged case over ranks: what each rank's cache holds, and what the ranks' results come to together."""

from __future__ import annotations

import dataclasses
import math

import torch

from numa_attention import reference, runner
from numa_attention.merge import merge_states
from numa_attention.schedule import Planner, Schedule
from numa_attention.sharding import Shard
from tests.kernel_step import make_planner, shape_of, step_of
from tests.support import PagedCase, assert_close


def shards_of(ranks: int, interleave: int) -> list[Shard]:
    return [Shard(ranks, rank, interleave) for rank in range(ranks)]


def shard_case(case: PagedCase, shard: Shard) -> PagedCase:
    """The case as one rank sees it: all queries and lengths, and a cache of its own tokens alone.

    Pages are in another order, and whatever holds no token of the rank is NaN; the block table past a request's pages
    names page 0, which is NaN too.
    """
    page_size = case.k_pages.shape[1]
    held = [shard.count(length) for length in case.seq_lens.tolist()]
    owned = [math.ceil(count / page_size) for count in held]
    pages = 1 + sum(owned)
    # as wide as the rank that holds most needs it, which is how all ranks get it
    width = max(math.ceil(shard.most(length) / page_size) for length in case.seq_lens.tolist())
    table = torch.zeros(len(held), max(width, 1), dtype=torch.int32)
    order = iter((1 + torch.randperm(pages - 1)).tolist())
    caches = [
        torch.full((pages, *cache.shape[1:]), math.nan, dtype=torch.float32).to(cache.device, cache.dtype)
        for cache in (case.k_pages, case.v_pages)
    ]
    for request, count in enumerate(held):
        for column in range(owned[request]):
            table[request, column] = next(order)
        token = torch.arange(count)
        position = shard.position(token)
        source = case.block_table[request].cpu().long()[position // page_size], position % page_size
        target = table[request].long()[token // page_size], token % page_size
        for mine, whole in zip(caches, (case.k_pages, case.v_pages), strict=True):
            if whole.dtype.itemsize == 1:  # torch moves float8 numbers by index on no device
                mine, whole = mine.view(torch.uint8), whole.view(torch.uint8)
            mine[target] = whole[source]
    return dataclasses.replace(
        case, k_pages=caches[0], v_pages=caches[1], block_table=table.to(case.block_table.device)
    )


def run_rank(
    case: PagedCase, shard: Shard, *, kernels: str, num_decodes: int, window: int = -1, causal=True, **options
) -> tuple[torch.Tensor, torch.Tensor, Schedule]:
    """What one rank computes of the whole case: float32 output and LSE from buffers of NaN, and the schedule."""
    planner_options = options.pop("planner_options", {})
    mine = shard_case(case, shard)
    shape = dataclasses.replace(shape_of(case, window, options.pop("general", False)), shard=shard)
    planner: Planner = make_planner(mine, window=window, kernels=kernels, shape=shape, **planner_options)
    schedule = planner.plan(step_of(mine, num_decodes, causal, options.get("spans") is not None))
    out = torch.full(mine.poisoned_output().shape, math.nan, device=case.q.device)
    lse = torch.full(out.shape[:2], math.nan, device=case.q.device)
    runner.attend(mine.q, mine.k_pages, mine.v_pages, out, schedule, lse=lse, **options)
    return out, lse, schedule


def check_sharded(
    case: PagedCase, ranks: int, interleave: int, *, window: int = -1, causal=True, **options
) -> list[Schedule]:
    """The ranks' results merge into attention over the whole sequences, in float64; returns their schedules."""
    scale = options.setdefault("scale", case.q.shape[2] ** -0.5)
    known = {name: options[name] for name in ("soft_cap", "alibi_slopes", "alibi_sqrt", "spans", "clamp_spans",
                                              "k_scale", "v_scale") if options.get(name) is not None}  # fmt: skip
    expected, expected_lse = reference.attention(
        *case.arguments(), scale=scale, window=window, causal=causal, **known
    )
    parts = [
        run_rank(case, shard, window=window, causal=causal, **options)
        for shard in shards_of(ranks, interleave)
    ]
    out, lse = merge_states(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    )
    assert_close(out, expected, case.q.dtype)
    seen = expected_lse.isfinite()
    assert torch.equal(lse.cpu() == -math.inf, ~seen)
    assert not seen.any() or (lse.cpu() - expected_lse)[seen].abs().max() < (
        1e-4 if case.q.dtype == torch.float32 else 2e-2
    )
    return [part[2] for part in parts]
