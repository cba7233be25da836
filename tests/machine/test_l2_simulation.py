"""The L2 simulation: exact where the answer is known, calibrated where it was measured, and fast."""

import dataclasses
import time

import pytest

from numa_attention.machine import ModelError
from numa_attention.machine.closed_form import estimate
from numa_attention.machine.grid import MAPPINGS, Grid
from numa_attention.machine.h200_points import CALIBRATION, DRIFTING
from numa_attention.machine.machines import H200, MACHINES, MI300X
from numa_attention.mapping import MAPPINGS as MAPPINGS_OF_THE_KERNELS

pytest.importorskip("numba", reason="the simulation needs the extra `model`")
from numa_attention.machine.cache import simulate


def test_mappings_are_those_of_the_kernels():
    assert MAPPINGS == MAPPINGS_OF_THE_KERNELS


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_what_fits_is_read_once(mapping):
    grid = Grid(mapping, 1, 4, 2, 4096, 128, domains=2)
    result = simulate(grid, H200)
    keys_and_values = grid.batch * grid.kv_heads * grid.tiles * grid.tile_bytes
    assert result.hbm_bytes == keys_and_values + grid.workgroups * grid.block_bytes
    # each partition misses each tile at most once, and O is written into the cache
    misses = (1 - result.hit_rate) * result.requested_bytes
    assert misses <= 2 * keys_and_values + grid.workgroups * grid.block_bytes + 1


def test_a_stream_without_readers_in_common_never_hits():
    # 64 heads of one query block each: nobody reads what another reads
    grid = Grid("head-first", 1, 64, 64, 128, 128)
    result = simulate(grid, MI300X)
    assert result.hbm_bytes == grid.visits * grid.tile_bytes + grid.workgroups * grid.block_bytes
    own = grid.workgroups * grid.block_bytes
    assert result.hit_rate == pytest.approx(own / grid.requested_bytes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [100, 1000, 4096])
def test_every_tile_is_asked_for(length, causal):
    grid = Grid("swizzled-head-first", 2, 6, 3, length, 64, causal=causal, domains=8, longest_first=causal)
    visits = 0
    for block in range(-(-length // 128)):
        seen = min(length, (block + 1) * 128) if causal else length
        visits += -(-seen // 64)
    result = simulate(grid, MI300X)
    assert result.tile_visits == visits * 12
    assert len(result.per_domain) == MI300X.domains
    assert 0 <= result.hit_rate <= 1
    assert result.hbm_bytes <= result.requested_bytes


@pytest.mark.parametrize("machine", [H200, MI300X], ids=lambda machine: machine.name)
@pytest.mark.parametrize("mapping", ["block-first", "swizzled-head-first"])
def test_four_tiles_an_event_are_as_good_as_one(machine, mapping):
    grid = Grid(mapping, 1, 64, 64, 8192, 128, domains=8)
    fine, coarse = (simulate(grid, machine, coarse=tiles) for tiles in (1, 4))
    assert coarse.hit_rate == pytest.approx(fine.hit_rate, abs=0.06)
    assert coarse.seconds == pytest.approx(fine.seconds, rel=0.06)


def test_same_seed_same_run():
    grid = Grid("block-first", 1, 32, 32, 8192, 128)
    first, again, other = simulate(grid, H200), simulate(grid, H200), simulate(grid, H200, seed=2)
    assert first == again
    assert first.hit_rate != other.hit_rate
    assert first.hit_rate == pytest.approx(other.hit_rate, abs=0.04)


@pytest.mark.parametrize(
    ("point", "points"),
    list(zip(CALIBRATION[:3], (0.01, 0.003, 0.04), strict=True)),
    ids=lambda p: getattr(p, "name", ""),
)
def test_calibration_points_on_the_h200(point, points):
    result = simulate(point.grid, H200)
    assert result.hit_rate == pytest.approx(point.hit_rate, abs=points)
    assert result.hbm_bytes / result.requested_bytes == pytest.approx(
        point.hbm_bytes / result.requested_bytes, abs=0.1
    )


def test_two_partitions_read_less_from_memory_than_they_miss():
    grid = CALIBRATION[2].grid
    split = simulate(grid, H200)
    misses = (1 - split.hit_rate) * split.requested_bytes
    assert 1.2 < misses / split.hbm_bytes < 2.0


def test_swizzling_pays_where_domains_have_caches_of_their_own():
    found = {
        mapping: simulate(Grid(mapping, 1, 128, 128, 32768, 128, domains=8), MI300X)
        for mapping in ("block-first", "swizzled-head-first")
    }
    assert found["block-first"].hit_rate < 0.05
    assert 0.90 < found["swizzled-head-first"].hit_rate < 0.98
    ratio = found["swizzled-head-first"].seconds / found["block-first"].seconds
    assert 0.60 < ratio < 0.70
    assert found["block-first"].streams_per_domain == pytest.approx(16)
    assert found["swizzled-head-first"].streams_per_domain < 2


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_runs_and_says_where_its_figures_come_from(name):
    machine = MACHINES[name]
    assert 0 < simulate(Grid("head-first", 1, 8, 8, 2048, 128), machine).hit_rate < 1
    for field in dataclasses.fields(machine):
        value = getattr(machine, field.name)
        if hasattr(value, "source"):
            assert value.source, field.name
    assert machine.layout_source


@pytest.mark.parametrize("in_waves", [False, True])
def test_every_tile_is_asked_for_in_waves_and_from_both_ends(in_waves):
    for machine, mapping in ((H200, "head-first"), (MI300X, "swizzled-head-first")):
        for length in (100, 1000, 4096):
            grid = Grid(
                mapping,
                2,
                6,
                3,
                length,
                64,
                domains=machine.dispatch_domains,
                in_waves=in_waves,
                alternate=True,
            )
            result = simulate(grid, machine)
            fits = grid.batch * grid.kv_heads * grid.tiles * grid.tile_bytes
            assert result.hbm_bytes >= fits + grid.workgroups * grid.block_bytes
            asked = result.requested_bytes - 2 * grid.workgroups * grid.block_bytes
            assert asked == grid.visits * grid.tile_bytes and 0 < result.hit_rate < 1


def test_waves_keep_a_head_together():
    """One head longer than the L2: units that drift apart read it again and again, those in waves once a wave."""
    grid = dataclasses.replace(DRIFTING.grid, q_heads=12, kv_heads=12)
    drifting = dataclasses.replace(H200, cache=dataclasses.replace(H200.cache, unit_spread=5e-3))
    free, together, turned = (
        simulate(dataclasses.replace(grid, in_waves=in_waves, alternate=alternate), drifting)
        for in_waves, alternate in ((False, False), (True, False), (True, True))
    )
    streams = -(-grid.workgroups // H200.units) * grid.tiles * grid.tile_bytes
    own = grid.workgroups * grid.block_bytes
    assert free.hbm_bytes > 5 * streams
    assert together.hbm_bytes < 1.35 * streams + own
    # a wave that turns round finds the end of the one before in the cache
    assert turned.hbm_bytes < 0.9 * together.hbm_bytes
    assert together.seconds < 1.03 * free.seconds


def test_speed():
    grid = Grid("head-first", 1, 128, 128, 32768, 128)
    simulate(Grid("head-first", 1, 8, 8, 2048, 128), H200)
    started = time.process_time()
    result = simulate(grid, H200)
    assert result.tile_visits / (time.process_time() - started) > 15e6  # on one of two cores


def test_the_closed_form_knows_no_waves():
    with pytest.raises(ModelError, match="neither waves"):
        estimate(dataclasses.replace(DRIFTING.grid, in_waves=True), H200)


def test_too_many_streams_are_refused():
    with pytest.raises(ModelError, match="closed form"):
        simulate(Grid("head-first", 4096, 128, 128, 131072, 128), H200)
