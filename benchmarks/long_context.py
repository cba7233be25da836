"""Decode of one long request over several GPUs: six placements of its KV cache, merged in a kernel or by collectives.

    torchrun --nproc-per-node 2 benchmarks/long_context.py
    torchrun --nproc-per-node 2 benchmarks/long_context.py --context 128k --kv-dtype fp8 --json

Each step is checked against attention in float32 before it is timed. Times are medians of graph replays, those of the
slowest rank. docs/merge-across-devices.md says what the six are.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from placements import Data, Layer, Step, make_data, make_step  # noqa: E402

from numa_attention import across_devices  # noqa: E402
from numa_attention.machine import ModelError  # noqa: E402
from numa_attention.machine.placement import CASES, Axis  # noqa: E402
from numa_attention.machine.plan import tokens as read_tokens  # noqa: E402
from numa_attention.merge import EXCHANGES  # noqa: E402
from numa_attention.peer_memory import Unreachable  # noqa: E402
from numa_attention.terminal import output_errors_in_one_sentence, print_error, print_table, table  # noqa: E402

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# ||out - expected|| / ||expected||, of bfloat16
MARK = 1e-2
CALLS, REPLAYS = 20, 9


@dataclass(frozen=True)
class Row:
    """One placement. kv_bytes: of a rank. sent_bytes: of a rank and token, by the fused launch or else by collectives.

    fused_us, collectives_us: of one decode step of one layer; None where there is no such step.
    """

    case: int
    name: str
    kv_bytes: int
    fused_bytes: int | None
    collective_bytes: int | None
    fused_us: float | None
    collectives_us: float | None


def error_of(step: Step, expected: torch.Tensor, rank: int) -> float:
    """Relative error of a rank's heads after one call."""
    step.merged.fill_(torch.nan)
    step.call()
    own = expected.unflatten(0, (-1, step.merged.shape[1]))[rank]
    error = float((step.merged[0].float() - own).norm() / own.norm())
    return error if error == error else float("inf")


def seconds(call: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Median seconds of a call, on the rank that is slowest. Every rank makes the same calls."""
    if device.type == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        own = statistics.median(times)
    else:
        own = _graph_seconds(call, group)
    slowest = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _graph_seconds(call: Callable[[], None], group: dist.ProcessGroup) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        dist.barrier(group)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # ranks begin together, give or take a launch
            dist.barrier(group)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def measure(
    data: Data,
    group: dist.ProcessGroup,
    workspace: across_devices.Workspace | None,
    kernels: str = "auto",
    exchange: str = "ag_rs",
) -> list[Row]:
    """All placements on this rank; every rank of `group` calls this. Without a workspace, by collectives alone.
    exchange: which collectives, of `merge.EXCHANGES`.

    Raises RuntimeError on every rank where a step is wrong.
    """
    device, world = data.q.device, group.size()
    expected = data.expected()
    rows = []
    for placement in CASES:
        exchanging = placement.outer is Axis.SEQUENCE
        times: dict[bool, float | None] = {True: None, False: None}
        sent: dict[bool, int | None] = {True: None, False: None}
        for fused in (True, False):
            # without an exchange the two are one and the same; slices of head_dim over ranks have no fused step
            if fused and (workspace is None or not exchanging):
                continue
            step = make_step(placement, data, group, workspace if fused else None, kernels, exchange)
            if step is None:
                continue
            worst = torch.tensor(error_of(step, expected, group.rank()), device=device)
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
            if not float(worst) <= MARK:
                raise RuntimeError(
                    f"case {placement.case} ({placement.name}) is wrong {'fused' if fused else 'by collectives'}: "
                    f"relative error {float(worst):.1e} exceeds {MARK:.0e}. Nothing is timed."
                )
            times[fused], sent[fused] = seconds(step.call, group, device) * 1e6, step.sent_bytes
            if workspace is not None:
                workspace.check()
        share = 1 if placement.outer is Axis.REPLICATE else world
        kv_bytes = data.pages.nbytes // share
        rows.append(
            Row(placement.case, placement.name, kv_bytes, sent[True], sent[False], times[True], times[False])
        )
    return rows


def show(rows: list[Row], layer: Layer, world: int) -> None:
    """A table with ratios: times are of this machine, ratios compare."""
    last = rows[-1]
    best = last.fused_us or last.collectives_us
    shown = table(
        "case", "KV a rank", "sent", "fused", "collectives", "collectives / fused", "of case 6",
        title=f"{layer.context:,} tokens, {layer.q_heads}/{layer.kv_heads} heads of {layer.head_dim}, "
        f"{str(layer.kv_dtype).removeprefix('torch.')} KV, {world} ranks: one layer, one token",
    )  # fmt: skip
    for row in rows:
        own = row.fused_us or row.collectives_us
        sent = row.fused_bytes if row.fused_bytes is not None else row.collective_bytes
        ratio = row.collectives_us / row.fused_us if row.fused_us and row.collectives_us else None
        shown.add_row(
            f"{row.case}: {row.name}",
            f"{row.kv_bytes / 1e6:,.1f} MB",
            "-" if sent is None else f"{sent / 1e3:,.1f} KB",
            "-" if row.fused_us is None else f"{row.fused_us:,.1f} us",
            "-" if row.collectives_us is None else f"{row.collectives_us:,.1f} us",
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if own is None or best is None else f"{own / best:.2f}",
        )
    print_table(Console(highlight=False), shown)


def main(
    context: Annotated[str, typer.Option(help="Cached tokens: 131072, 128k, 1M.")] = "1M",
    q_heads: Annotated[int, typer.Option()] = 8,
    kv_heads: Annotated[int, typer.Option()] = 1,
    head_dim: Annotated[int, typer.Option()] = 128,
    kv_dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    exchange: Annotated[str, typer.Option(help=f"The collectives: {' or '.join(EXCHANGES)}.")] = "ag_rs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Time the six placements of a KV cache over the GPUs of this host."""
    gpus, world = torch.cuda.device_count(), int(os.environ.get("WORLD_SIZE", "0"))
    if gpus < 2:
        raise typer.BadParameter(
            f"it takes two GPUs or more on one host; there {'is 1' if gpus else 'is none'}"
        )
    if not 2 <= world <= gpus:
        raise typer.BadParameter(
            f"start it with torchrun --nproc-per-node 2 (or more, up to {gpus}) {Path(sys.argv[0]).name}"
        )
    if kv_dtype not in KV_DTYPES:
        raise typer.BadParameter(f"--kv-dtype {kv_dtype!r} is unknown: choose one of {', '.join(KV_DTYPES)}")
    if exchange not in EXCHANGES:
        raise typer.BadParameter(f"--exchange {exchange!r} is unknown: choose one of {', '.join(EXCHANGES)}")
    try:
        layer = Layer(read_tokens(context), q_heads, kv_heads, head_dim, KV_DTYPES[kv_dtype])
        layer.check(world)
    except (ValueError, ModelError) as error:
        raise typer.BadParameter(str(error)) from None
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    try:
        workspace = across_devices.allocate(group, device, max_tokens=1, q_heads=q_heads, head_dim_v=head_dim)
    except Unreachable as error:
        workspace = None
        if group.rank() == 0:
            print(f"nothing is merged in a kernel, only collectives are timed: {error}", file=sys.stderr)
    try:
        rows = measure(make_data(layer, device), group, workspace, exchange=exchange)
    except RuntimeError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    if group.rank() == 0:
        if as_json:
            print(json.dumps([asdict(row) for row in rows], indent=2))
        else:
            show(rows, layer, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        typer.run(main)
