"""The merging kernel under the interpreter, with ranks beside one another in orders that seeds decide."""

import pytest
import torch
from merging_ranks import interpreted, random_step

from numa_attention import across_devices
from numa_attention.ranks import LostRank
from numa_attention.testing.interleaving import NO_FAULTS, Faults, Interleaving, recording
from numa_attention.testing.ranks import pretend_workspaces

pytestmark = interpreted
Q_HEADS, COLUMNS = 6, 16


def run(world: int, steps, seed: int, faults: Faults = NO_FAULTS, patience: float = 1e6, **options):
    """Run steps on pretended ranks; returns their workspaces."""
    workspaces = pretend_workspaces(
        world, max_tokens=5, q_heads=Q_HEADS, head_dim_v=COLUMNS, workgroups=2, patience=patience, **options
    )
    launches = []
    for rank, workspace in enumerate(workspaces):
        with recording() as own:
            for step in steps:
                step.run(rank, workspace)
        launches.append(own)
    Interleaving([workspace.memory for workspace in workspaces], seed, faults).run(launches)
    return workspaces


def some_steps(world: int, number: int, seed: int):
    # rows of one workgroup only, of both, and of more than one round
    tokens = [1, 5, 2, 3]
    return [
        random_step(world, tokens[(seed + each) % 4], Q_HEADS, COLUMNS, seed=seed * 10 + each)
        for each in range(number)
    ]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_gives_the_merge(world, seed):
    steps = some_steps(world, 4, seed)
    for workspace in run(world, steps, seed):
        workspace.check()
    for step in steps:
        step.check()


def gathers_and_merges(world: int, seed: int, faults: Faults = NO_FAULTS, patience: float = 1e6):
    """Gathers and merges in turn on one workspace: the steps, and (rows by rank, what each rank gathered)."""
    steps, gathers = some_steps(world, 2, seed), []
    workspaces = pretend_workspaces(
        world, max_tokens=5, q_heads=Q_HEADS, head_dim_v=COLUMNS, workgroups=2, patience=patience
    )
    for tokens in (5, 1):
        own = [torch.randn(tokens, Q_HEADS // world, COLUMNS) for _ in range(world)]
        gathers.append((own, [torch.full((tokens, Q_HEADS, COLUMNS), torch.nan) for _ in range(world)]))
    launches = []
    for rank, workspace in enumerate(workspaces):
        with recording() as recorded:
            for step, (own, gathered) in zip(steps, gathers, strict=True):
                across_devices.gather(own[rank], workspace, gathered[rank])
                step.run(rank, workspace)
        launches.append(recorded)
    Interleaving([workspace.memory for workspace in workspaces], seed, faults).run(launches)
    return steps, gathers


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (2, 1), (3, 2), (3, 3)])
def test_rows_are_gathered_between_merges(world, seed):
    steps, gathers = gathers_and_merges(world, seed)
    for own, gathered in gathers:
        for each in gathered:
            assert torch.equal(each, torch.cat(own, 1))
    for step in steps:
        step.check()


@pytest.mark.parametrize("accesses", [1, 20])
def test_rows_of_a_dead_rank_are_nan(accesses):
    steps, gathers = gathers_and_merges(2, accesses, Faults(dies={1: accesses}), patience=20 / 10_000)
    right_or_nan(steps, 2)
    for own, (survivor, _) in gathers:
        missed = survivor.isnan()
        assert torch.equal(survivor[~missed], torch.cat(own, 1)[~missed])
    assert gathers[-1][1][0].isnan().all() and steps[-1].merged[0].isnan().all()


def right_or_nan(steps, world: int) -> None:
    """Every row that was merged is right; the others are NaN."""
    for step in steps:
        out, lse = step.expected()
        heads = Q_HEADS // world
        for rank in range(world):
            own = slice(rank * heads, (rank + 1) * heads)
            merged, merged_lse = step.merged[rank].double(), step.merged_lses[rank].double()
            missed = merged_lse.isnan()
            assert merged[missed].isnan().all()
            torch.testing.assert_close(merged[~missed], out[:, own][~missed], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(merged_lse[~missed], lse[:, own][~missed], rtol=1e-5, atol=1e-5)


def goes_wrong(seeds: int, faults: Faults = NO_FAULTS) -> bool:
    """Whether a result is wrong in one of some runs."""
    for seed in range(seeds):
        steps = [random_step(2, 2, Q_HEADS, COLUMNS, seed=seed * 10 + each) for each in range(3)]
        run(2, steps, seed, faults)
        try:
            for step in steps:
                step.check()
        except AssertionError:
            return True
    return False


def test_flags_that_do_not_wait_for_the_partials_are_found():
    assert goes_wrong(12, Faults(ignore_release=True))


def test_a_single_buffer_is_found(monkeypatch):
    monkeypatch.setattr(across_devices, "BUFFERS", 1)
    assert goes_wrong(30)


@pytest.mark.parametrize("accesses", [0, 7, 30, 75])
def test_a_rank_that_dies_ends_in_an_error_that_names_it(accesses):
    steps = some_steps(2, 3, seed=accesses)
    survivor, _ = run(2, steps, accesses, Faults(dies={1: accesses}), patience=20 / 10_000)
    with pytest.raises(LostRank, match=r"on rank 0: rank 1 did not deliver launch [123] within 0.002 s"):
        survivor.check()
    right_or_nan(steps, 2)
    assert steps[-1].merged[0].isnan().any(), "the last launch must not look like a result"


def test_whoever_gave_up_says_so():
    steps = some_steps(3, 3, seed=1)
    workspaces = run(3, steps, 5, Faults(dies={1: 10}), patience=20 / 10_000)
    for rank in (0, 2):
        with pytest.raises(LostRank, match="rank 1 did not deliver launch 1|gave up waiting in or before"):
            workspaces[rank].check()
        assert all(step.merged[rank].isnan().all() for step in steps[1:])


@pytest.mark.parametrize("seed", range(4))
def test_a_stall_longer_than_the_patience_gives_nan_or_the_right_result(seed):
    steps = some_steps(2, 3, seed)
    workspaces = run(2, steps, seed, patience=2 / 10_000)
    right_or_nan(steps, 2)
    for rank, workspace in enumerate(workspaces):
        complete = not any(step.merged[rank].isnan().any() for step in steps)
        if complete:
            workspace.check()
        else:
            with pytest.raises(LostRank):
                workspace.check()
