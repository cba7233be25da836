"""L2 hit rates and memory traffic of a plain Triton forward kernel under the four mappings, measured with ncu.

    python benchmarks/measure_l2.py --out measured.json      the twelve launches that the machine model predicts
    python benchmarks/measure_l2.py --out calibration.json --calibration      the four it was calibrated on
    python benchmarks/measure_l2.py --out measured.json --only block-first-h16-32k
    numa-swizzle simulate compare measured.json              predictions beside the measurement

Every point is written as soon as it is measured, and a point that the file holds already is not measured again: a run
that was stopped goes on where it was.

Two rates are written: hit_rate, of what the SMs ask for, and hit_rate_all, which also counts the requests between the
L2's partitions. The calibration figures are hit_rate.

Needs one GPU, Triton and Nsight Compute (ncu) with access to performance counters. Each launch is checked first: rows
of its output against a float32 computation of the same rows.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from numa_attention.machine.grid import Grid
from numa_attention.machine.h200_points import CALIBRATION, POINTS, PREDICTED
from numa_attention.terminal import output_errors_in_one_sentence

KERNEL = "plain_attention_fwd_kernel"
METRICS = {
    "lts__t_sectors.sum": "sectors",
    "lts__t_sectors_lookup_hit.sum": "sector_hits",
    "lts__t_sectors_lookup_miss.sum": "sector_misses",
    "lts__t_sectors_srcunit_tex.sum": "sm_sectors",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum": "sm_sector_hits",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum": "sm_sector_misses",
    "dram__bytes_read.sum": "hbm_bytes",
    "dram__bytes_write.sum": "hbm_write_bytes",
    "gpu__time_duration.sum": "seconds",
}
UNITS = {
    "": 1.0,
    "sector": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "Tbyte": 1e12,
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "nsecond": 1e-9,
    "usecond": 1e-6,
    "msecond": 1e-3,
    "second": 1.0,
}
CHECKED_ROWS = 64
TOLERANCE = 1e-2


def launch(grid: Grid) -> None:
    """Run the kernel once on random inputs and check some rows; this is the process that ncu watches."""
    import torch
    from plain_attention import attention

    torch.manual_seed(0)
    shape = (grid.batch, grid.q_heads, grid.length, grid.head_dim)
    kv_shape = (grid.batch, grid.kv_heads, grid.length, grid.head_dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    attention(q, k, v, out, grid)
    torch.cuda.synchronize()
    for request, head, first in ((0, 0, 0), (grid.batch - 1, grid.q_heads - 1, grid.length - CHECKED_ROWS)):
        rows = slice(first, first + CHECKED_ROWS)
        kv_head = head // grid.group
        scores = q[request, head, rows].float() @ k[request, kv_head].float().T / math.sqrt(grid.head_dim)
        if grid.causal:
            positions = torch.arange(grid.length, device="cuda")
            scores.masked_fill_(positions[None, :] > positions[rows, None], float("-inf"))
        expected = scores.softmax(-1) @ v[request, kv_head].float()
        error = (out[request, head, rows].float() - expected).norm() / expected.norm()
        if not error < TOLERANCE:
            sys.exit(f"request {request}, head {head}, rows from {first}: relative error {error:.2e}.")
    if out.isnan().any():
        sys.exit("some output was never written.")


def measure(name: str, ncu: str) -> dict:
    """One launch under ncu: what the counters say, and the two rates that follow from them."""
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--kernel-name", f"regex:{KERNEL}"]
    command += ["--launch-count", "1", "--metrics", ",".join(METRICS)]
    command += [sys.executable, str(Path(__file__).resolve()), "--launch", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        sys.exit(f"{name}: ncu gave no counters (exit code {done.returncode}).\n{done.stdout}\n{done.stderr}")
    return {"name": name} | rates(parse(lines))


def parse(lines: list[str]) -> dict[str, float]:
    """Counters from ncu's raw page: a line of names, a line of units, a line of values."""
    names, units, values = csv.reader(io.StringIO("\n".join(lines[:3])))
    found = {}
    for name, unit, value in zip(names, units, values, strict=True):
        if name in METRICS and value:
            found[METRICS[name]] = float(value.replace(",", "")) * UNITS[unit]
    missing = [name for name, short in METRICS.items() if short not in found]
    if missing:
        sys.exit(f"ncu did not report {', '.join(missing)}.")
    return found


def rates(found: dict[str, float]) -> dict[str, float]:
    """hit_rate: of what the SMs ask for. hit_rate_all: with the requests between the two partitions."""
    return found | {
        "hit_rate": found["sm_sector_hits"] / (found["sm_sector_hits"] + found["sm_sector_misses"]),
        "hit_rate_all": found["sector_hits"] / (found["sector_hits"] + found["sector_misses"]),
    }


def read_points(path: Path) -> dict[str, dict]:
    """name -> point of an earlier run, in its order; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        return {point["name"]: point for point in json.loads(path.read_text())["points"]}
    except (ValueError, KeyError, TypeError):
        sys.exit(f"{path} holds no points of an earlier run: remove it, or name another --out.")


def write_points(path: Path, points: dict[str, dict]) -> None:
    """All points so far. The file is replaced as a whole, so that it is complete whenever the run is stopped."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps({"points": list(points.values())}, indent=2) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", action="store_true", help="the four calibration launches instead")
    parser.add_argument("--only", metavar="NAME", action="append", help="one launch; may be repeated")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("measured.json"), help="default: measured.json"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--launch", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only or [point.name for point in (CALIBRATION if arguments.calibration else PREDICTED)]
    unknown = [name for name in [*names, *filter(None, [arguments.launch])] if name not in POINTS]
    if unknown:
        sys.exit(f"unknown launch {', '.join(unknown)}: --list prints the names.")
    if arguments.list:
        print("\n".join(POINTS))
        return
    if arguments.launch:
        launch(POINTS[arguments.launch].grid)
        return
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        sys.exit("ncu is not installed: it comes with NVIDIA Nsight Compute.")
    points = read_points(arguments.out)
    for number, name in enumerate(names, start=1):
        place = f"[{number}/{len(names)}] {name}"
        if name in points:
            print(f"{place}: in {arguments.out} already", file=sys.stderr, flush=True)
            continue
        print(f"{place}: measuring", file=sys.stderr, flush=True)
        points[name] = measure(name, ncu)
        write_points(arguments.out, points)
        row = points[name]
        print(f"    {row['hit_rate']:.2%} hits, {row['hbm_bytes'] / 1e9:.1f} GB", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        main()
