"""Ranks as processes of their own, with a gloo group between them."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from numa_attention.ranks import Ranks

LIMIT_S = 60.0  # of a whole test's ranks
STALL_S = 8.0


def run_ranks(
    function: Callable, size: int, folder: Path, *arguments, group_limit_s: float = 30.0, fork: bool = False
) -> list:
    """What `function(ranks, *arguments)` returns in each of `size` processes, or the exception it raised there.

    A process that ends without a result gives its exit code. folder: an empty one. group_limit_s: the time limit of
    the process group. fork: fork this process, which has imported what they need and runs one thread.
    """
    context = multiprocessing.get_context("fork" if fork else "forkserver")
    if not fork:
        context.set_forkserver_preload(["torch", "tests.rank_processes"])
    processes = [
        context.Process(target=_run_rank, args=(function, rank, size, folder, group_limit_s, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
        processes[rank].join()
    assert not hanging, f"ranks {hanging} still ran after {LIMIT_S:.0f} s"
    return [
        torch.load(path, weights_only=False)
        if (path := folder / f"result-{rank}").exists()
        else process.exitcode
        for rank, process in enumerate(processes)
    ]


def _run_rank(function, rank, size, folder, group_limit_s, arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size,
        timeout=timedelta(seconds=group_limit_s),
    )  # fmt: skip
    try:
        result = function(Ranks(dist.group.WORLD), *arguments)
    except Exception as error:
        result = error
    torch.save(result, folder / f"partial-{rank}")
    (folder / f"partial-{rank}").rename(folder / f"result-{rank}")
    # other ranks may have died: a group that is taken down in good order would wait for them
    os._exit(0)


def attend_and_merge(ranks: Ranks, interleaves: list[int]) -> list[tuple[float, float]]:
    """Errors of output and LSE of this rank's heads against attention over whole sequences, for every way to merge.

    One row more than the step has is NaN in every rank's part, as a row of a padded step is.
    """
    from numa_attention import reference
    from numa_attention.merge import EXCHANGES, merge_across_ranks
    from numa_attention.sharding import Shard
    from tests.shards import run_rank
    from tests.support import make_paged_case, relative_error

    heads = 2
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    errors = []
    for interleave in interleaves:
        case = make_paged_case(
            [1, 3, 2, 30], [300, 5, 2, 70], q_heads=heads * ranks.size, kv_heads=1, head_dim=16,
            page_size=max(16, interleave),
        )  # fmt: skip
        expected, expected_lse = reference.attention(*case.arguments(), scale=0.25, window=40)
        out, lse, _ = run_rank(
            case, Shard(ranks.size, ranks.rank, interleave), kernels="torch", num_decodes=3, window=40,
            scale=0.25, planner_options={"max_decode_query": 3},
        )  # fmt: skip
        out = torch.cat([out, out.new_full((1, *out.shape[1:]), math.nan)])
        lse = torch.cat([lse, lse.new_full((1, lse.shape[1]), -math.inf)])
        for exchange in EXCHANGES:
            merged, merged_lse = merge_across_ranks(out, lse, ranks, exchange)
            assert torch.equal(merged[-1], torch.zeros_like(merged[-1]))
            assert torch.equal(merged_lse[-1], torch.full_like(merged_lse[-1], -math.inf))
            errors.append(
                (
                    relative_error(merged[:-1], expected[:, own]),
                    float((merged_lse[:-1] - expected_lse[:, own]).abs().max()),
                )
            )
    return errors


def lose_rank(ranks: Ranks, exchange: str, how: str) -> float:
    """Rank 1 dies or stalls after a first merge; the others merge again. Returns the seconds until they gave up."""
    from numa_attention.merge import merge_across_ranks
    from numa_attention.ranks import LostRank

    out, lse = torch.ones(4, ranks.size, 8), torch.zeros(4, ranks.size)
    merge_across_ranks(out, lse, ranks, exchange)
    if ranks.rank == 1:
        if how == "stalls":
            time.sleep(STALL_S)
        os._exit(9)
    begin = time.monotonic()
    try:
        merge_across_ranks(out, lse, ranks, exchange)
    except LostRank as error:
        assert "one of them has died, stalls, or has failed" in str(error)
    else:
        raise AssertionError("a merge without rank 1 gave a result")
    seconds = time.monotonic() - begin
    # what arrives late is nothing to go on with
    begin = time.monotonic()
    try:
        merge_across_ranks(out, lse, ranks, exchange)
    except LostRank:
        assert time.monotonic() - begin < 0.5
        return seconds
    raise AssertionError("a lost rank was forgotten")
