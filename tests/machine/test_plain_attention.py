"""The kernel that benchmarks/measure_l2.py puts under ncu computes attention under every mapping."""

import csv
import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measure_l2  # noqa: E402
import plain_attention  # noqa: E402
from plain_attention import attention  # noqa: E402

from numa_attention.jit import interpreting  # noqa: E402
from numa_attention.machine import counters  # noqa: E402
from numa_attention.machine.grid import MAPPINGS, Grid  # noqa: E402
from numa_attention.machine.h200_points import TOGETHER  # noqa: E402

DEVICE = "cpu" if interpreting() else "cuda"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_against_torch(mapping, causal):
    check(Grid(mapping, 2, 4, 2, 64, 16, 32, 16, causal, domains=2, longest_first=causal))


@pytest.mark.parametrize(
    ("in_waves", "alternate", "causal"),
    [(True, False, False), (True, False, True), (False, True, False), (True, True, False)],
)
def test_waves_and_directions_do_not_change_the_result(in_waves, alternate, causal):
    grid = Grid("head-first", 2, 4, 2, 64, 16, 32, 16, causal, longest_first=causal)
    check(dataclasses.replace(grid, in_waves=in_waves, alternate=alternate))


def test_a_wave_that_is_never_done_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(plain_attention, "MOST_LOOKS", 8)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(*size, **options) - 1000)
    check(Grid("head-first", 2, 4, 2, 64, 16, 32, 16, in_waves=True))


def check(grid: Grid) -> None:
    """Compare with torch; three workgroups are a wave."""
    causal = grid.causal
    torch.manual_seed(0)
    q = torch.randn(2, 4, 64, 16, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 64, 16, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    attention(q, k, v, out, grid, units=3)
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(16)
    if causal:
        scores.masked_fill_(torch.ones(64, 64, device=DEVICE, dtype=torch.bool).triu(1), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    tolerance = 1e-4 if DEVICE == "cpu" else 1e-2  # a GPU multiplies float32 as TF32
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_shapes_it_does_not_take():
    empty = torch.empty(0)
    with pytest.raises(ValueError, match="must divide"):
        attention(empty, empty, empty, empty, Grid("head-first", 1, 1, 1, 1000, 128))
    with pytest.raises(ValueError, match="power of two"):
        attention(empty, empty, empty, empty, Grid("head-first", 1, 1, 1, 1024, 56))
    with pytest.raises(ValueError, match="without a causal mask"):
        attention(
            empty, empty, empty, empty, Grid("head-first", 1, 1, 1, 1024, 64, causal=True, alternate=True)
        )


def test_counters_are_read_with_their_units():
    page = io.StringIO()
    table = csv.writer(page, quoting=csv.QUOTE_ALL)
    table.writerow(["Kernel Name", *counters.METRICS])
    units = ["", *("sector" for _ in range(6)), "Mbyte", "byte", "ns"]
    table.writerow(units)
    table.writerow([measure_l2.KERNEL, "1,000", "900", "100", "800", "600", "200", "3.5", "7", "1500000"])
    (found,) = map(counters.rates, counters.parse(page.getvalue().splitlines()))
    assert found["hbm_bytes"] == 3.5e6 and found["seconds"] == pytest.approx(1.5e-3)
    assert found["hit_rate"] == 0.75 and found["hit_rate_all"] == 0.9


def test_the_script_knows_the_predicted_launches():
    listed = subprocess.run(
        [sys.executable, str(BENCHMARKS / "measure_l2.py"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    predicted = json.loads((BENCHMARKS.parent / "docs" / "machine-model-predictions.json").read_text())
    names = {row["name"] for row in (*predicted["predictions"], *predicted["calibration"])}
    names |= {point.name for point in TOGETHER}
    assert set(listed.stdout.split()) == names


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ncu that reports counters, fails for launches named in a file, and counts what it was asked for."""
    page = io.StringIO()
    table = csv.writer(page, quoting=csv.QUOTE_ALL)
    table.writerow(["Kernel Name", *counters.METRICS])
    table.writerow(["", *("sector" for _ in range(6)), "byte", "byte", "ns"])
    table.writerow([measure_l2.KERNEL, "1000", "900", "100", "800", "600", "200", "3500", "7", "1500000"])
    (tmp_path / "page.csv").write_text(page.getvalue())
    script = f"""#!/bin/sh
for name; do :; done
echo "$name" >> {tmp_path}/asked
if grep -qx "$name" {tmp_path}/broken 2>/dev/null; then exit 9; fi
cat {tmp_path}/page.csv
"""
    (tmp_path / "ncu").write_text(script)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_a_run_that_stopped_goes_on_where_it_was(fake_ncu, monkeypatch, capsys):
    names = ["block-first-h16-32k", "block-first-h32-16k", "head-first-h64-64k"]
    only = [word for name in names for word in ("--only", name)]
    out = fake_ncu / "measured.json"
    monkeypatch.setattr(sys, "argv", ["measure_l2.py", "--out", str(out), *only])
    (fake_ncu / "broken").write_text(names[1])
    with pytest.raises(SystemExit, match="exit code 9"):
        measure_l2.main()
    assert [point["name"] for point in json.loads(out.read_text())["points"]] == names[:1]
    (fake_ncu / "broken").unlink()
    measure_l2.main()
    points = json.loads(out.read_text())["points"]
    assert [point["name"] for point in points] == names
    assert all(point["hit_rate"] == 0.75 and point["hbm_bytes"] == 3500 for point in points)
    assert (fake_ncu / "asked").read_text().split() == [names[0], names[1], names[1], names[2]]
    shown = capsys.readouterr()
    assert not shown.out and "[1/3] block-first-h16-32k: in " in shown.err and "[3/3]" in shown.err
    out.write_text("not JSON")
    with pytest.raises(SystemExit, match="remove it"):
        measure_l2.main()


def test_points_are_added_to_what_the_file_holds(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"provenance": {"device": "one"}, "points": [{"name": "first"}]}))
    points = measure_l2.read_points(path)
    measure_l2.write_points(path, points | {"second": {"name": "second"}})
    assert json.loads(path.read_text()) == {
        "provenance": {"device": "one"},
        "points": [{"name": "first"}, {"name": "second"}],
    }
