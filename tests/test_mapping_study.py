"""numa-swizzle bench mapping: the points, what is checked before it is timed, and what is marked as not measured."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from numa_attention import runner
from numa_attention.machine import counters
from numa_attention.topology import detect, pretend
from vllm_numa_backend import cli
from vllm_numa_backend.bench import mapping_study
from vllm_numa_backend.bench.mapping_points import LAYERS, call_of, chosen, is_counted, points, predict
from vllm_numa_backend.commands.bench_mapping import verdicts

CPU = torch.device("cpu")


def tiny_points(layers: int):
    chosen_layers = [layer.name for layer in LAYERS[:layers]]
    return [point for point in points(detect(CPU), tiny=True) if point.layer.name in chosen_layers]


def run_study(wanted, **options):
    return mapping_study.study(CPU, wanted, kernels="torch", **{"count": False} | options)


def test_the_study_is_sixty_points_of_which_sixteen_are_counted():
    found = points(pretend("H200"))
    assert len(found) == len({point.name for point in found}) == 60
    assert sum(map(is_counted, found)) == 16
    layers = {point.layer for point in found}
    assert {layer.length for layer in layers} >= {2048, 8192, 131072}
    assert {layer.q_heads for layer in layers} >= {8, 128} and {layer.batch for layer in layers} >= {1, 8}
    assert {(layer.head_dim, layer.head_dim_v) for layer in layers} == {(128, 128), (56, 56), (192, 128)}
    assert len(points(pretend("MI450"))) == 40  # which cannot place by hardware


def test_what_an_h200_would_launch():
    h200 = pretend("H200")
    for point in points(h200):
        for kernel in (None, "hopper-prefill"):
            call = call_of(point, torch.device("meta"), "triton", kernel)
            shape, variant = chosen(call, h200, "triton")
            swizzled = point.way.mapping.startswith("swizzled")
            assert variant.mapping == point.way.mapping and variant.domains_used == (2 if swizzled else 1)
            assert variant.queues == (2 if point.way.placement == "hardware" else 0)
            assert shape.page_size == (128 if variant.name == "hopper-prefill" else 0)
            if kernel is not None:
                # a layer that it does not take gets the dispatcher's choice
                assert (variant.name == kernel) == (point.layer.head_dim != 56)
        assert call.shape.q_heads == point.layer.batch * point.layer.q_heads
        found = predict(point, variant, h200)
        assert 0 <= found.hit_rate <= 1 and found.streams > 0 and found.hbm_bytes > 0


def test_streams_of_a_domain_are_fewer_where_hardware_places():
    h200 = pretend("H200")
    streams = {}
    for point in points(h200):
        if point.layer.name == "mha128-32k":
            call = call_of(point, torch.device("meta"), "triton", None)
            streams[point.way.name] = predict(point, chosen(call, h200, "triton")[1], h200).streams
    assert streams["block-first"] > 30
    assert streams["swizzled-head-first placed by hardware"] < streams["head-first"]
    assert streams["swizzled-head-first"] > streams["swizzled-head-first placed by hardware"]


def test_every_point_is_measured():
    told = []
    found = run_study(tiny_points(10), progress=lambda row: told.append(row.name))
    assert [row.name for row in found] == told and len(found) == 40
    assert all(row.note == "" and row.seconds > 0 and row.kernel == "torch-prefill" for row in found)
    assert all(row.hit_rate is row.hbm_bytes is row.partition_bytes is None for row in found)


def test_flops_are_those_of_the_attention():
    layer = replace(LAYERS[0], batch=2, q_heads=4, kv_heads=2, length=100, head_dim=192, head_dim_v=128)
    assert layer.flops == 2 * (192 + 128) * 100 * 100 * 4 * 2
    assert replace(layer, causal=True).flops == 2 * (192 + 128) * 5050 * 4 * 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("first", "rows from 0"),
        ("last", "rows from 32"),
        ("other", "differs"),
        ("raises", "RuntimeError: no"),
    ],
)
def test_a_wrong_result_is_not_timed(monkeypatch, fault, says):
    right = runner.kernel_of
    calls = []

    def wrong(name):
        def kernel(q, k_pages, v_pages, out, schedule, **options):
            calls.append(name)
            right(name)(q, k_pages, v_pages, out, schedule, **options)
            if fault == "raises":
                raise RuntimeError("no\nreally")
            if fault == "first":
                out[0, 0] += 1
            if fault == "last":
                out[-1, -1] += 1
            if fault == "other" and len(calls) > 3:
                out[50, 0] += 1

        return kernel

    monkeypatch.setattr(runner, "kernel_of", wrong)
    found = run_study(tiny_points(1))
    assert any(says in row.note and row.seconds is None for row in found)


def test_what_time_does_not_reach_is_marked():
    found = run_study(tiny_points(2), seconds=0.0)
    assert all(row.note == "not measured" and row.seconds is None for row in found)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ncu that counts as many launches as it is asked for; with a file `lacking`, not between partitions."""
    rows = io.StringIO()
    table = csv.writer(rows, quoting=csv.QUOTE_ALL)
    metrics = [*counters.METRICS, *counters.BETWEEN_PARTITIONS]
    table.writerow(["Kernel Name", *metrics])
    table.writerow(["", *("sector" for _ in range(6)), "byte", "byte", "ns", "sector"])
    for _ in range(mapping_study.COUNTED_AT_A_TIME):
        table.writerow(
            ["prefill_kernel", "1000", "900", "100", "800", "600", "200", "3500", "7", "1500000", "10"]
        )
    (tmp_path / "rows.csv").write_text(rows.getvalue())
    (tmp_path / "ncu").write_text(
        f"""#!/bin/sh
for word; do :; done
echo "$word" >> {tmp_path}/asked
case "$*" in *ltcfabric*) if [ -e {tmp_path}/lacking ]; then echo no such metric; exit 1; fi;; esac
if [ -e {tmp_path}/broken ]; then echo no permission; exit 9; fi
cat {tmp_path}/rows.csv
"""
    )
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize("lacking", [False, True])
def test_counted_points(fake_ncu, lacking):
    if lacking:
        (fake_ncu / "lacking").touch()
    found = run_study(tiny_points(1), count=True)
    assert all(row.hit_rate == 0.75 and row.hbm_bytes == 3500 and row.note == "" for row in found)
    assert {row.partition_bytes for row in found} == {None if lacking else 320.0}
    asked = [json.loads(text) for text in (fake_ncu / "asked").read_text().splitlines()]
    names = [name for kernel, some in asked[lacking:] for name in some]
    assert names == [row.name for row in found]


def test_without_permission_nothing_is_counted(fake_ncu):
    (fake_ncu / "broken").touch()
    found = run_study(tiny_points(1), count=True)
    assert all(row.seconds > 0 and row.hit_rate is None for row in found)
    assert "exit code 9" in found[0].note and "no permission" in found[0].note
    assert [row.note for row in found[2:]] == ["timed, not counted"] * 2
    assert len((fake_ncu / "asked").read_text().splitlines()) == 2


def test_counters_that_are_missing_are_told():
    with pytest.raises(counters.NoCounters, match="did not report lts__t_sectors.sum"):
        counters.parse(['"Kernel Name"', '""', '"prefill_kernel"'])


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*line):
        monkeypatch.setattr(sys, "argv", ["numa-swizzle", "bench", "mapping", *line])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        shown = capsys.readouterr()
        return ending.value.code, shown.out, shown.err

    return call


def test_verdicts():
    def row(layer, way, seconds):
        return mapping_study.Measured("", layer, way, "dispatch", seconds=seconds)

    ties = [row("a", "block-first", 1.0), row("a", "head-first", 1.009)]
    assert verdicts(ties) == ["a: the mapping does not matter, all are within 1%."]
    found = verdicts(
        [*ties, row("b", "block-first", 1.5), row("b", "head-first", 1.0), row("b", "other", 1.005)]
    )
    assert found[1] == (
        "b: fastest, within 1%: head-first by dispatch, other by dispatch; block-first by dispatch takes 1.50 times "
        "as long."
    )
    assert verdicts([row("c", "block-first", None), row("c", "head-first", 1.0)]) == []


def test_the_command(run, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = run("--list")
    assert code == 0 and len(out.splitlines()) == 60 and out.count("(counted)") == 16
    code, _, said = run()
    assert code == 2 and "needs a GPU" in said

    rows = run_study(tiny_points(1))
    rows[-1].seconds, rows[-1].tflops, rows[-1].note = None, None, "not measured"
    rows[0].hit_rate, rows[0].hbm_bytes = 0.5, 3e9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    h200 = pretend("H200")
    monkeypatch.setattr("numa_attention.topology.detect", lambda device=None: h200)
    asked = []

    def study(device, wanted, *, progress, **options):
        asked.append(options)
        for row in rows:
            progress(row)
        return rows

    monkeypatch.setattr(mapping_study, "study", study)
    file = tmp_path / "study.json"
    code, out, _ = run(
        "--out", str(file), "--only", "mha128-32k", "--kernel", "hopper-prefill", "--no-counters"
    )
    assert code == 0 and asked == [{"kernel": "hopper-prefill", "seconds": 420.0, "count": False}]
    assert "50.00% hits, 3.0 GB from HBM" in out and "not measured" in out
    saved = json.loads(file.read_text())["points"]
    assert len(saved) == 4 and saved[-1]["seconds"] is None and saved[0]["hit_rate"] == 0.5
    assert "fastest" not in out and "does not matter" not in out  # of a layer that was not timed whole
    code, _, said = run("--only", "nothing")
    assert code == 2 and "no point's name" in said
