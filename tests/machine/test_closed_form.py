"""The closed form: against the simulation, at its limits, and fast enough for the dispatcher."""

import subprocess
import sys
import time
from math import sqrt

import pytest

from numa_attention.machine import ModelError
from numa_attention.machine.closed_form import estimate, kept_rate, tile_at
from numa_attention.machine.grid import MAPPINGS, Grid
from numa_attention.machine.h200_points import PREDICTED, judge
from numa_attention.machine.machines import H200, MI300X
from numa_attention.mapping import tiles

SHAPES = ((1, 128, 128, 16384), (1, 64, 64, 8192), (1, 16, 16, 16384), (1, 8, 8, 8192), (1, 128, 8, 16384))
MARK = 0.07


@pytest.mark.parametrize("machine", [H200, MI300X], ids=lambda machine: machine.name)
def test_against_the_simulation(machine):
    pytest.importorskip("numba", reason="the simulation needs the extra `model`")
    from numa_attention.machine.cache import simulate

    errors = []
    for batch, q_heads, kv_heads, length in SHAPES:
        for mapping in MAPPINGS:
            grid = Grid(mapping, batch, q_heads, kv_heads, length, 128, domains=8)
            errors.append(estimate(grid, machine).hit_rate - simulate(grid, machine).hit_rate)
    assert sqrt(sum(error**2 for error in errors) / len(errors)) < MARK


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_tiles_are_those_of_the_mapping(mapping):
    grid = Grid(mapping, 2, 12, 4, 1000, 64, domains=8, longest_first=True)
    rows = tiles(mapping, 2, 12, 4, grid.blocks, 8, longest_first=True)
    assert [tile_at(grid, workgroup) for workgroup in range(grid.workgroups)] == [tuple(row) for row in rows]


def test_what_stays_cached():
    assert kept_rate(1.0) == kept_rate(3.0) == 1.0
    assert kept_rate(0.1) < 0.01
    assert kept_rate(0.5) < kept_rate(0.8) < 1.0


def test_what_fits_is_read_once():
    grid = Grid("head-first", 1, 8, 8, 2048, 128)
    found = estimate(grid, H200)
    least = 8 * grid.tiles * grid.tile_bytes + grid.workgroups * grid.block_bytes
    assert least <= found.hbm_bytes < 1.5 * least


def test_a_stream_that_fits_is_kept_for_the_next_workgroups():
    found = estimate(Grid("head-first", 1, 128, 128, 32768, 128), H200)
    assert found.hit_rate == pytest.approx(0.9905, abs=0.005)


def test_longest_first_holds_workgroups_together():
    full = Grid("block-first", 1, 48, 48, 32768, 128)
    causal = Grid("block-first", 1, 48, 48, 32768, 128, causal=True, longest_first=True)
    assert estimate(causal, H200).hit_rate > estimate(full, H200).hit_rate + 0.15
    pytest.importorskip("numba", reason="the simulation needs the extra `model`")
    from numa_attention.machine.cache import simulate

    assert simulate(causal, H200).hit_rate > simulate(full, H200).hit_rate + 0.15


def test_order_of_the_mappings_on_mi300x():
    found = {
        mapping: estimate(Grid(mapping, 1, 128, 128, 32768, 128, domains=8), MI300X) for mapping in MAPPINGS
    }
    assert found["block-first"].hit_rate < 0.1 < 0.9 < found["swizzled-head-first"].hit_rate
    assert found["block-first"].seconds > 1.4 * found["swizzled-head-first"].seconds


def test_fast_enough_for_a_dispatcher():
    started = time.process_time()
    estimate(Grid("swizzled-head-first", 8, 128, 128, 131072, 128, domains=8), MI300X)
    assert time.process_time() - started < 0.2


def test_needs_no_numba():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from numa_attention.machine import closed_form, dispatch, machines, plan, seed_two\n"
        "assert dispatch.prefill_mapping(machines.MI300X, 64, 8, 128) == 'swizzled-head-first'\n"
        "assert not {'numpy', 'torch', 'triton', 'vllm', 'matplotlib'} & set(sys.modules), 'imported too much'\n"
        "try:\n"
        "    from numa_attention.machine import cache\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'vllm-numa-backend[model]'" in done.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mapping": "sideways"}, "unknown mapping"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"length": 0}, "length is 0"),
        ({"domains": 0}, "domains is 0"),
    ],
)
def test_impossible_shapes(changes, words):
    shape = dict(mapping="head-first", batch=1, q_heads=8, kv_heads=8, length=1024, head_dim=128) | changes
    with pytest.raises(ModelError, match=words) as error:
        estimate(Grid(**shape), H200)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_judging_a_measurement():
    rows = [
        {
            "name": point.name,
            "hit_rate": 0.5,
            "closed_form_hit_rate": 0.5,
            "hbm_bytes": 50.0,
            "closed_form_hbm_bytes": 40.0,
            "requested_bytes": 100.0,
        }
        for point in PREDICTED
    ]
    exact = {row["name"]: {"hit_rate": 0.5, "hbm_bytes": 50.0} for row in rows}
    assert judge(rows, exact).passed
    assert judge(rows, exact).closed_form.bytes_worst == pytest.approx(0.1)
    name = rows[0]["name"]
    far = judge(rows, exact | {name: {"hit_rate": 0.63, "hbm_bytes": 50.0}})
    assert not far.passed and far.simulation.hit_worst == pytest.approx(0.13)
    assert len(far.missed) == 1 and far.missed[0].startswith("worst hit rate 13.0 points")
    assert not judge(rows, exact | {name: {"hit_rate": 0.5, "hbm_bytes": 63.0}}).passed
    ends = {row["name"]: {"hit_rate": 0.96, "hbm_bytes": 50.0} for row in rows}
    near = [row | {"hit_rate": 0.96, "closed_form_hit_rate": 0.88} for row in rows]
    assert judge(near, ends).missed == ("closed form's hit rate RMS 8.0 points, the mark is 7",)
    assert not judge(rows, {}).passed
