"""L2 hit rates and memory traffic of a plain Triton forward kernel under the four mappings, measured with ncu.

    python benchmarks/measure_l2.py --out measured.json      the twelve launches that the machine model predicts
    python benchmarks/measure_l2.py --out calibration.json --calibration      the four it was calibrated on
    python benchmarks/measure_l2.py --out drift.json --drift      one that drifts apart, and what keeps it together
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
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from numa_attention.machine import counters
from numa_attention.machine.grid import Grid
from numa_attention.machine.h200_points import CALIBRATION, POINTS, PREDICTED, TOGETHER
from numa_attention.terminal import output_errors_in_one_sentence

KERNEL = "plain_attention_fwd_kernel"
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


def measure(name: str) -> dict:
    """One launch under ncu: what the counters say, and the two rates that follow from them."""
    command = [sys.executable, str(Path(__file__).resolve()), "--launch", name]
    try:
        (found,) = counters.watch(command, KERNEL, 1)
    except counters.NoCounters as error:
        sys.exit(f"{name}: {error}")
    return {"name": name} | counters.rates(found)


def read_points(path: Path) -> dict[str, dict]:
    """name -> point of an earlier run, in its order; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        return {point["name"]: point for point in json.loads(path.read_text())["points"]}
    except (ValueError, KeyError, TypeError):
        sys.exit(f"{path} holds no points of an earlier run: remove it, or name another --out.")


def write_points(path: Path, points: dict[str, dict]) -> None:
    """All points so far, beside what else the file holds. It is replaced as a whole, and so complete at any time."""
    beside = path.with_name(path.name + ".part")
    kept = json.loads(path.read_text()) if path.exists() else {}
    beside.write_text(json.dumps({**kept, "points": list(points.values())}, indent=2) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", action="store_true", help="the four calibration launches instead")
    parser.add_argument(
        "--drift", action="store_true", help="the launch that drifts, and what keeps it together"
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="one launch; may be repeated")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("measured.json"), help="default: measured.json"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--launch", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = CALIBRATION if arguments.calibration else TOGETHER if arguments.drift else PREDICTED
    names = arguments.only or [point.name for point in chosen]
    unknown = [name for name in [*names, *filter(None, [arguments.launch])] if name not in POINTS]
    if unknown:
        sys.exit(f"unknown launch {', '.join(unknown)}: --list prints the names.")
    if arguments.list:
        print("\n".join(POINTS))
        return
    if arguments.launch:
        launch(POINTS[arguments.launch].grid)
        return
    points = read_points(arguments.out)
    for number, name in enumerate(names, start=1):
        place = f"[{number}/{len(names)}] {name}"
        if name in points:
            print(f"{place}: in {arguments.out} already", file=sys.stderr, flush=True)
            continue
        print(f"{place}: measuring", file=sys.stderr, flush=True)
        points[name] = measure(name)
        write_points(arguments.out, points)
        row = points[name]
        print(f"    {row['hit_rate']:.2%} hits, {row['hbm_bytes'] / 1e9:.1f} GB", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        main()
