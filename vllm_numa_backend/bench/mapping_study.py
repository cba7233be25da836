"""The mapping study: every point is checked, timed, and some are counted by ncu, within a time that it is given.

python -m vllm_numa_backend.bench.mapping_study NAME...     launches these points once each, for ncu to watch
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from numa_attention import operation, runner
from numa_attention.jit import resolve
from numa_attention.machine import counters
from numa_attention.topology import detect
from vllm_numa_backend.bench.mapping_points import Layer, Point, call_of, chosen, is_counted, points, predict
from vllm_numa_backend.bench.timing import time_few

KERNEL = "^prefill_kernel$"  # as ncu sees it, ours for any GPU and the one of sm_90
CHECKED_ROWS = 64
TOLERANCE = 1e-2
COUNTED_AT_A_TIME = 2  # points of one process under ncu: what it counted is lost where it does not end
COUNTING_S = 150.0  # of one process, at most


class WrongResult(RuntimeError):
    """A point computes something else than attention."""


@dataclass
class Measured:
    """One point. streams_per_domain and the predictions are computed, all else is measured; None where it is not.

    partition_bytes: what the partitions of the L2 asked of one another. note: what kept something from being measured.
    """

    name: str
    layer: str
    mapping: str
    placement: str
    kernel: str = ""
    domains: int = 0
    seconds: float | None = None
    tflops: float | None = None
    streams_per_domain: float | None = None
    predicted_hit_rate: float | None = None
    predicted_hbm_bytes: float | None = None
    hit_rate: float | None = None
    hbm_bytes: float | None = None
    partition_bytes: float | None = None
    note: str = "not measured"


def tensors_of(layer: Layer, device: torch.device) -> list[torch.Tensor]:
    """q, k and v, random, contiguous."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (layer.q_heads, layer.head_dim),
        (layer.kv_heads, layer.head_dim),
        (layer.kv_heads, layer.head_dim_v),
    )
    return [
        torch.randn(
            layer.batch, heads, layer.length, dim, device=device, dtype=torch.bfloat16, generator=generator
        )
        for heads, dim in sizes
    ]


def launcher(
    point: Point, qkv: list[torch.Tensor], out: torch.Tensor, kernels: str, kernel: str | None
) -> tuple[Callable[[], None], object]:
    """What launches a point, and its variant."""
    topology = detect(out.device)
    call = call_of(point, out.device, kernels, kernel)
    shape, variant = chosen(call, topology, resolve(kernels, out.device))
    schedule = operation.plan_with(call, topology, shape, variant)
    rows = operation.rows_of((*qkv, out), shape, by_tokens=False)
    scale = point.layer.head_dim**-0.5
    return (lambda: runner.attend(*rows, schedule, scale=scale)), schedule.prefill.variant


def check_rows(layer: Layer, qkv: list[torch.Tensor], out: torch.Tensor) -> None:
    """Compare the first and the last rows with a float32 computation of them. Raises WrongResult."""
    q, k, v = qkv
    group = layer.q_heads // layer.kv_heads
    count = min(CHECKED_ROWS, layer.length)
    for request, head, first in ((0, 0, 0), (layer.batch - 1, layer.q_heads - 1, layer.length - count)):
        rows = slice(first, first + count)
        scores = q[request, head, rows].float() @ k[request, head // group].float().T * layer.head_dim**-0.5
        if layer.causal:
            position = torch.arange(layer.length, device=q.device)
            scores.masked_fill_(position > position[rows, None], -math.inf)
        right = scores.softmax(-1) @ v[request, head // group].float()
        error = float((out[request, head, rows].float() - right).norm() / right.norm())
        if not error <= TOLERANCE:
            raise WrongResult(f"request {request}, head {head}, rows from {first}: {error:.1e} away")


def study(
    device: torch.device,
    wanted: list[Point],
    *,
    kernels: str = "auto",
    kernel: str | None = None,
    seconds: float = 420.0,
    count: bool = True,
    progress: Callable[[Measured], None] = lambda found: None,
) -> list[Measured]:
    """Measure the points in their order until `seconds` are over, first the times of all, then what ncu counts.

    progress: told of each point whenever something new is known of it. A point that cannot run says so in its note.
    """
    end = time.monotonic() + seconds
    topology = detect(device)
    found = {
        point.name: Measured(point.name, point.layer.name, point.way.mapping, point.way.placement)
        for point in wanted
    }
    for layer, of_layer in groupby(wanted, key=lambda point: point.layer):
        if time.monotonic() > end:
            break
        _time_layer(layer, list(of_layer), found, topology, device, kernels, kernel, end, progress)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    counted = [point for point in wanted if is_counted(point) and found[point.name].seconds is not None]
    if not count:
        counted = []
    metrics = counters.METRICS | counters.BETWEEN_PARTITIONS
    while counted:
        some, counted = counted[:COUNTED_AT_A_TIME], counted[COUNTED_AT_A_TIME:]
        left = end - time.monotonic()
        if left <= 0:
            counted = some + counted
            break
        metrics = _count(some, found, kernel, metrics, min(left, COUNTING_S), progress)
        if metrics is None:
            break
    for point in counted:
        found[point.name].note = "timed, not counted"
    return list(found.values())


def _time_layer(layer, of_layer, found, topology, device, kernels, kernel, end, progress) -> None:
    """Time every way of one layer, in turns; all of them must give the same bits."""
    qkv, out, first = tensors_of(layer, device), None, None
    launches: dict[str, Callable[[], None]] = {}
    for point in of_layer:
        if time.monotonic() > end:
            break
        row = found[point.name]
        out = torch.full((*qkv[0].shape[:3], layer.head_dim_v), math.nan, device=device, dtype=torch.bfloat16)
        try:
            launch, variant = launcher(point, qkv, out, kernels, kernel)
            row.kernel, row.domains = variant.name, variant.domains_used
            predicted = predict(point, variant, topology)
            if predicted is not None:
                row.streams_per_domain, row.predicted_hit_rate, row.predicted_hbm_bytes = (
                    predicted.streams, predicted.hit_rate, predicted.hbm_bytes,
                )  # fmt: skip
            runner.ran.clear()
            launch()
            if dict(runner.ran) != {variant.name: 1}:
                raise WrongResult(f"the schedule names {variant.name}, but {dict(runner.ran)} ran")
            if first is None:
                check_rows(layer, qkv, out)
                first = out
            elif not torch.equal(out, first):
                raise WrongResult("its output differs from that of the first mapping")
            launches[point.name] = launch
        except Exception as failure:  # one way that fails must not end the study
            row.note = f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"
            progress(row)
    timer = time_few if device.type == "cuda" else _cpu_seconds
    for name, seconds in zip(launches, timer(list(launches.values())), strict=True):
        row = found[name]
        row.seconds, row.tflops, row.note = seconds, layer.flops / seconds / 1e12, ""
        progress(row)


def _cpu_seconds(launches: list[Callable[[], None]]) -> list[float]:
    times = []
    for launch in launches:
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return times


def _count(some, found, kernel, metrics, timeout, progress) -> dict[str, str] | None:
    """Put some points under ncu. Returns the metrics to go on with, None where there is no counting here."""
    command = [
        sys.executable,
        "-m",
        "vllm_numa_backend.bench.mapping_study",
        json.dumps([kernel, [p.name for p in some]]),
    ]
    try:
        rows = counters.watch(command, KERNEL, len(some), metrics=metrics, timeout=timeout)
    except counters.NoCounters as failure:
        if metrics is not counters.METRICS and "took longer" not in str(failure):
            # traffic between partitions is not counted on every chip
            return _count(some, found, kernel, counters.METRICS, timeout, progress)
        lines = [line for line in str(failure).splitlines() if line.strip()]
        for point in some:
            found[point.name].note = " | ".join([lines[0], *lines[-2:]] if len(lines) > 3 else lines)
            progress(found[point.name])
        return metrics if "took longer" in str(failure) else None
    for point, counted in zip(some, map(counters.rates, rows), strict=True):
        row = found[point.name]
        row.hit_rate, row.hbm_bytes = counted["hit_rate"], counted["hbm_bytes"]
        if "partition_sectors" in counted:
            row.partition_bytes = counted["partition_sectors"] * counters.SECTOR_BYTES
        progress(row)
    return metrics


def launch_once(kernel: str | None, names: list[str], device: torch.device) -> None:
    """Launch each named point once: this is the process that ncu watches."""
    by_name = {point.name: point for point in points(detect(device))}
    for name in names:
        layer = by_name[name].layer
        qkv = tensors_of(layer, device)
        out = torch.empty(*qkv[0].shape[:3], layer.head_dim_v, device=device, dtype=torch.bfloat16)
        launch, _ = launcher(by_name[name], qkv, out, "auto", kernel)
        launch()
        torch.cuda.synchronize()


def write(found: list[Measured], path: Path) -> None:
    """All points. The file is replaced as a whole, so that it is complete whenever the study is stopped."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"points": [asdict(row) for row in found]}, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    launch_once(*json.loads(sys.argv[1]), torch.device("cuda", torch.cuda.current_device()))
