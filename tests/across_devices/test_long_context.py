"""The benchmark of the six placements: its steps are right, count their bytes, and are not timed where they are not."""

import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import long_context  # noqa: E402
from merging_ranks import interpreted  # noqa: E402
from placements import Layer, make_data  # noqa: E402

from numa_attention import across_devices  # noqa: E402
from numa_attention.peer_memory import Unreachable  # noqa: E402
from numa_attention.testing.ranks import pretend_workspaces  # noqa: E402

LAYER = Layer(512, 8, 1, 32, torch.float32, dtype=torch.float32)
CPU = torch.device("cpu")


def on_rank(rank, store, function, workspace, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        results.put((rank, function(dist.group.WORLD, workspace)))
    except Exception as error:
        results.put((rank, error))


def on_two_ranks(function, store, workspaces=(None, None)) -> list:
    """What `function(group, workspace)` returns or raises on each rank."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=on_rank, args=(rank, store, function, workspaces[rank], results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(2)]


def measure(group, workspace) -> list[long_context.Row]:
    return long_context.measure(make_data(LAYER, CPU), group, workspace, kernels="torch")


def measure_float8(group, workspace) -> list[long_context.Row]:
    layer = replace(LAYER, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16)
    return long_context.measure(make_data(layer, CPU), group, workspace, kernels="torch", exchange="a2a")


def measure_with_other_keys_on_one_rank(group, workspace) -> list[long_context.Row]:
    data = make_data(LAYER, CPU)
    if group.rank():
        data.pages[-1] = 0.5
    return long_context.measure(data, group, workspace, kernels="torch")


def allocate(group, workspace) -> None:
    across_devices.allocate(group, CPU, max_tokens=1, q_heads=8, head_dim_v=32)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[long_context.Row]:
    workspaces = pretend_workspaces(2, max_tokens=1, q_heads=8, head_dim_v=32, workgroups=2)
    both = on_two_ranks(measure, tmp_path_factory.mktemp("store") / "store", workspaces)
    for found in both:
        assert isinstance(found, list), found
    return both[0]


@interpreted
def test_every_placement_runs_and_is_right(rows):
    assert [row.case for row in rows] == [1, 2, 3, 4, 5, 6]
    fused = [row.case for row in rows if row.fused_us is not None]
    assert fused == [2, 4, 6], "those that merge across ranks"
    assert all(row.collectives_us > 0 for row in rows)


@interpreted
def test_bytes_of_each_placement(rows):
    whole = 512 * 2 * 32 * 4
    assert [row.kv_bytes for row in rows] == [whole, whole // 2, whole, whole // 2, whole // 2, whole // 2]
    # four heads of 32 numbers and an LSE to the other rank; the flag of one workgroup is 8 bytes
    merged = 4 * 33 * 4
    gathered = merged + 4 * 4  # LSEs of its own heads too
    # a ring moves half of the scores there and half of the sums back; then four heads of 16 numbers
    scores = 8 * 512 * 4 + 4 * 16 * 4
    assert [row.collective_bytes for row in rows] == [0, gathered, 0, gathered, scores, gathered]
    assert [row.fused_bytes for row in rows] == [None, merged + 8, None, merged + 8, None, merged + 8]


@interpreted
def test_the_table_shows_ratios(rows, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    timed = [replace(row, fused_us=row.fused_us and 10.0, collectives_us=20.0) for row in rows]
    long_context.show(timed, LAYER, 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "outer" in line]
    assert len(lines) == 6
    assert lines[5].split()[-2:] == ["2.00", "1.00"] and lines[4].split()[-2:] == ["-", "2.00"]


def test_a_float8_cache_runs_where_a_kernel_reads_it(tmp_path):
    for found in on_two_ranks(measure_float8, tmp_path / "store"):
        assert isinstance(found, list), found
        assert [row.case for row in found if row.collectives_us] == [1, 2, 3, 6]
        assert found[5].kv_bytes == 512 * 2 * 32 // 2
        assert found[5].collective_bytes == 4 * 33 * 4


def test_what_is_wrong_is_not_timed(tmp_path):
    for error in on_two_ranks(measure_with_other_keys_on_one_rank, tmp_path / "store"):
        assert isinstance(error, RuntimeError), error
        assert "is wrong by collectives" in str(error) and "Nothing is timed" in str(error)


def test_cpus_do_not_write_into_each_others_memory(tmp_path):
    for error in on_two_ranks(allocate, tmp_path / "store"):
        assert isinstance(error, Unreachable), error
        assert str(error) == "rank 0: the device is cpu: only GPUs write into each other's memory"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_it_refuses_where_there_are_not_two_gpus():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "long_context.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 2 and "it takes two GPUs or more on one host" in done.stderr


def test_what_does_not_divide():
    with pytest.raises(ValueError, match="context is 500: give a multiple of 128"):
        replace(LAYER, context=500).check(2)
    with pytest.raises(ValueError, match="6 query heads over 4 KV heads"):
        replace(LAYER, q_heads=6, kv_heads=4).check(2)
