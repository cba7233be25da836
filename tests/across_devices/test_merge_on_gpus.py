"""Merging across devices on GPUs: two streams of one GPU that stand for two, and two GPUs with a process each."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from merging_ranks import random_step

from numa_attention.across_devices import allocate, gather
from numa_attention.ranks import LostRank
from numa_attention.testing.ranks import pretend_workspaces

pytestmark = pytest.mark.gpu
TOKENS, Q_HEADS, COLUMNS = 33, 8, 128
REPLAYS = 7


def refill(step, number: int) -> None:
    """Other partials, in the same memory; the results are NaN again."""
    rows = step.outs[0].shape[0]
    fresh = random_step(len(step.outs), rows, Q_HEADS, COLUMNS, seed=number)
    for old, new in zip(step.outs + step.lses, fresh.outs + fresh.lses, strict=True):
        old.copy_(new)
    for result in step.merged + step.merged_lses:
        result.fill_(torch.nan)


def run_layer(step, rank: int, workspace, gathered) -> None:
    """Gather this rank's heads of `outs`, as if they were queries, and merge."""
    own = step.merged[rank].shape[1]
    gather(step.outs[rank][:, rank * own : (rank + 1) * own], workspace, gathered)
    step.run(rank, workspace)


def capture(step, rank: int, workspace, stream, gathered) -> torch.cuda.CUDAGraph:
    """Three layers in a row."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            run_layer(step, rank, workspace, gathered)
    return graph


def check_gathered(step, gathered) -> None:
    own = step.merged[0].shape[1]
    heads = [out[:, rank * own : (rank + 1) * own] for rank, out in enumerate(step.outs)]
    assert torch.equal(gathered.nan_to_num(), torch.cat(heads, 1).nan_to_num())


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_two_streams_of_one_gpu(tokens):
    workspaces = pretend_workspaces(
        2, max_tokens=TOKENS, q_heads=Q_HEADS, head_dim_v=COLUMNS, device="cuda", patience=5.0
    )
    streams = [torch.cuda.Stream() for _ in range(2)]
    step = random_step(2, tokens, Q_HEADS, COLUMNS, seed=0, device="cuda")
    torch.cuda.synchronize()
    gathered = [torch.full_like(step.outs[0], torch.nan) for _ in range(2)]
    # compiles, which must not wait for a launch that waits for the other rank's
    for rank in range(2):
        with torch.cuda.stream(streams[rank]):
            step.run(rank, workspaces[rank])
    torch.cuda.synchronize()
    for rank in range(2):
        with torch.cuda.stream(streams[rank]):
            run_layer(step, rank, workspaces[rank], gathered[rank])
    torch.cuda.synchronize()
    step.check()
    graphs = [capture(step, rank, workspaces[rank], streams[rank], gathered[rank]) for rank in range(2)]
    for number in range(REPLAYS):
        refill(step, number)
        torch.cuda.synchronize()
        # one rank is ahead by as much as the protocol lets it
        for rank in (0, 1) if number % 2 else (1, 0):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
                torch.cuda._sleep(1_000_000 * (rank == number % 2))
                graphs[rank].replay()
        torch.cuda.synchronize()
        step.check()
        for rank in range(2):
            check_gathered(step, gathered[rank])
            workspaces[rank].check()


def test_a_rank_that_does_not_come_ends_in_an_error_in_time():
    workspace, _ = pretend_workspaces(
        2, max_tokens=TOKENS, q_heads=Q_HEADS, head_dim_v=COLUMNS, device="cuda", patience=0.2
    )
    step = random_step(2, TOKENS, Q_HEADS, COLUMNS, seed=0, device="cuda")
    step.run(0, workspace)  # compiles
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step.merged[0].zero_()
    begin.record()
    step.run(0, workspace)
    end.record()
    torch.cuda.synchronize()
    # it has given up for good: nobody waits a second time
    assert begin.elapsed_time(end) < 100
    assert step.merged[0].isnan().all() and step.merged_lses[0].isnan().all()
    with pytest.raises(LostRank, match="rank 1 did not deliver launch 1 within 0.2 s"):
        workspace.check()


def on_a_gpu(rank: int, port: int, dtype: torch.dtype) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2, device_id=device
    )
    workspace = allocate(
        dist.group.WORLD, device, max_tokens=TOKENS, q_heads=Q_HEADS, head_dim_v=COLUMNS, dtype=dtype,
        patience=20.0,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for tokens in (1, TOKENS):
        step = random_step(2, tokens, Q_HEADS, COLUMNS, seed=0, device=device, dtype=dtype)
        gathered = torch.full_like(step.outs[0], torch.nan)
        run_layer(step, rank, workspace, gathered)  # compiles
        graph = capture(step, rank, workspace, torch.cuda.Stream(), gathered)
        for number in range(50):
            refill(step, number)
            torch.cuda.synchronize()
            if rank == number % 2:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            workspace.check()
            step.check(ranks=[rank], tolerance=tolerance)
            check_gathered(step, gathered)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_gpus(dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes.spawn(on_a_gpu, (port, dtype), nprocs=2)
