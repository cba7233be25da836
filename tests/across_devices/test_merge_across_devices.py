"""Merging across devices: every size and type, what does not fit, and ranks that are processes of their own."""

import math
import multiprocessing
import time

import pytest
import torch
from merging_ranks import interpreted, random_step

from numa_attention.across_devices import BUFFERS, Workspace, bytes_needed, gather, merge, try_out
from numa_attention.ranks import LostRank
from numa_attention.testing.interleaving import Interleaving, recording
from numa_attention.testing.ranks import pretend_memories, pretend_workspaces

pytestmark = interpreted


def merge_beside_one_another(step, workspaces) -> None:
    launches = []
    for rank, workspace in enumerate(workspaces):
        with recording() as own:
            step.run(rank, workspace)
        launches.append(own)
    Interleaving([workspace.memory for workspace in workspaces], seed=0).run(launches)


@pytest.mark.parametrize(
    ("world", "tokens", "q_heads", "columns", "dtype", "merged_dtype", "tolerance"),
    [
        (2, 1, 8, 128, torch.float32, torch.bfloat16, 1e-2),
        (2, 3, 8, 128, torch.bfloat16, torch.bfloat16, 2e-2),
        (2, 7, 2, 24, torch.float32, torch.float32, 1e-5),
        (3, 5, 3, 80, torch.float16, torch.float32, 2e-3),
        (8, 2, 8, 64, torch.float32, torch.float16, 2e-3),
        (5, 2, 15, 56, torch.float32, torch.float32, 1e-5),
    ],
)
def test_sizes_and_types(world, tokens, q_heads, columns, dtype, merged_dtype, tolerance):
    workspaces = pretend_workspaces(
        world, max_tokens=8, q_heads=q_heads, head_dim_v=columns, dtype=dtype, workgroups=2
    )
    step = random_step(world, tokens, q_heads, columns, seed=tokens, dtype=dtype, merged_dtype=merged_dtype)
    merge_beside_one_another(step, workspaces)
    step.check(tolerance=tolerance)


def test_strides_of_a_larger_tensor_and_the_own_heads_as_result():
    step = random_step(2, 3, 4, 16, seed=5)
    expected = random_step(2, 3, 4, 16, seed=5)
    workspaces = pretend_workspaces(2, max_tokens=3, q_heads=4, head_dim_v=16, workgroups=2)
    for rank in range(2):
        wide = torch.full((3, 6, 24), torch.nan)
        wide[:, 1:5, 4:20] = step.outs[rank]
        step.outs[rank] = wide[:, 1:5, 4:20]
        # LSEs as vLLM keeps them, [heads, tokens]
        step.lses[rank] = step.lses[rank].t().contiguous().t()
        step.merged[rank] = step.outs[rank][:, 2 * rank : 2 * rank + 2]
    merge_beside_one_another(step, workspaces)
    expected.merged, expected.merged_lses = step.merged, step.merged_lses
    expected.check()


def test_a_nan_among_the_partials_shows():
    step = random_step(2, 1, 4, 16, seed=3)
    step.lses[1][0, 0] = math.nan
    step.lses[0][0, 0] = 1.0
    step.outs[0][0, 3, 5] = math.nan
    step.lses[0][0, 3] = 1.0
    workspaces = pretend_workspaces(2, max_tokens=1, q_heads=4, head_dim_v=16, workgroups=2)
    merge_beside_one_another(step, workspaces)
    assert step.merged[0][0, 0].isnan().all() and step.merged_lses[0][0, 0].isnan()
    assert step.merged[1][0, 1, 5].isnan() and step.merged[1][0, 1, :5].isfinite().all()


def test_what_does_not_fit_is_refused():
    workspace, _ = pretend_workspaces(2, max_tokens=2, q_heads=4, head_dim_v=16)
    out, lse = torch.zeros(2, 4, 16), torch.zeros(2, 4)
    merged = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match="3 tokens exceeds the workspace's max_tokens=2"):
        merge(torch.zeros(3, 4, 16), torch.zeros(3, 4), workspace, torch.zeros(3, 2, 16))
    with pytest.raises(ValueError, match=r"out must be float32 \[2, 4, 16\]; got torch.bfloat16"):
        merge(out.bfloat16(), lse, workspace, merged)
    with pytest.raises(ValueError, match=r"merged must be .* \[2, 2, 16\]; got torch.float32 \[2, 4, 16\]"):
        merge(out, lse, workspace, out)
    with pytest.raises(ValueError, match=r"lse must be float32 \[2, 4\]"):
        merge(out, lse.t(), workspace, merged)
    with pytest.raises(ValueError, match="last dimension of merged must be contiguous"):
        merge(out, lse, workspace, torch.zeros(2, 2, 32)[..., ::2])
    with pytest.raises(
        ValueError, match=r"rows must be float32 \[2, 2, 16\]; got torch.float32 \[2, 4, 16\]"
    ):
        gather(out, workspace, out)
    with pytest.raises(ValueError, match=r"gathered must be float32 \[2, 4, 16\]; got torch.bfloat16"):
        gather(merged, workspace, out.bfloat16())
    with pytest.raises(ValueError, match="5 query heads do not divide over 2 ranks"):
        bytes_needed(2, 1, 5, 16, torch.float32)
    with pytest.raises(ValueError, match="partials cannot be torch.float64"):
        bytes_needed(2, 1, 4, 16, torch.float64)
    small = pretend_memories(2, 64)[0]
    with pytest.raises(ValueError, match="the workspace needs .* bytes a rank; there are 64"):
        Workspace(small, max_tokens=2, q_heads=4, head_dim_v=16)


def test_bytes_are_those_of_partials_lses_and_flags():
    workspace = pretend_workspaces(4, max_tokens=64, q_heads=8, head_dim_v=128)[0]
    # 3 peers, 2 of their heads, for each 128 numbers and an LSE; one workgroup has both rows of one token
    assert workspace.bytes_sent(1) == 3 * (2 * (128 * 4 + 4) + 8)
    assert workspace.bytes_sent(64) == 3 * (128 * (128 * 4 + 4) + 32 * 8)
    held = BUFFERS * 4 * 128 * (128 * 4 + 4)
    assert held <= bytes_needed(4, 64, 8, 128, torch.float32) <= held + 4096


def merge_in_a_process(rank, workspace, steps, pause, results) -> None:
    torch.set_num_threads(1)
    if not steps:
        results.put((rank, try_out(workspace)))
        return
    try:
        for number, step in enumerate(steps):
            if rank == 1:
                time.sleep(pause if number == 1 else 0.0)
            step.run(rank, workspace)
            workspace.check()
        results.put((rank, [(step.merged[rank].numpy(), step.merged_lses[rank].numpy()) for step in steps]))
    except LostRank as error:
        results.put((rank, str(error)))


def two_workspaces(patience: float) -> list[Workspace]:
    return pretend_workspaces(2, max_tokens=4, q_heads=4, head_dim_v=16, workgroups=2, patience=patience)


def in_processes(workspaces, steps, pause: float = 0.0, ranks=(0, 1)):
    """What two ranks that are processes merge, by rank, or the error of one that lost the other; what goes wrong when
    they are tried out, if there are no steps."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=merge_in_a_process, args=(rank, workspaces[rank], steps, pause, results))
        for rank in ranks
    ]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in processes:
        process.join()
    return found


def test_ranks_that_are_processes_merge_launch_after_launch():
    steps = [random_step(2, tokens, 4, 16, seed=tokens) for tokens in (1, 4, 2, 3, 4)]
    found = in_processes(two_workspaces(60.0), steps, pause=0.3)
    for number, step in enumerate(steps):
        for rank in range(2):
            assert not isinstance(found[rank], str), found[rank]
            step.merged[rank], step.merged_lses[rank] = map(torch.from_numpy, found[rank][number])
        step.check()


def test_a_rank_that_is_not_there_ends_in_an_error_in_time():
    begin = time.monotonic()
    found = in_processes(two_workspaces(0.05), [random_step(2, 1, 4, 16, seed=1)], ranks=(0,))
    assert "rank 1 did not deliver launch 1 within 0.05 s" in found[0]
    assert time.monotonic() - begin < 20


def test_memory_that_is_not_the_others_is_found_before_it_is_used():
    assert in_processes(two_workspaces(60.0), []) == {0: "", 1: ""}
    workspaces = two_workspaces(0.2)
    # rank 0 raises its flags in its own memory
    workspaces[0].addresses[1] = workspaces[0].addresses[0]
    found = in_processes(workspaces, [])
    assert "the first merges failed: " in found[0] + found[1], found
