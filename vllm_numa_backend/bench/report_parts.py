"""What is measured for a report: every kernel against the specification, mappings, prefill and decode beside others."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from numa_attention import aiter_adapter, runner
from numa_attention.decode import cdna5_variant
from numa_attention.jit import triton_release
from numa_attention.machine.dispatch import compare_mappings
from numa_attention.mapping import MAPPINGS
from numa_attention.placement_device import GENERATIONS
from numa_attention.topology import Topology, detect
from numa_attention.variants import PLACED_BY_HARDWARE, PLACED_BY_SM, choose_decode, machine_of
from vllm_numa_backend.bench import contestants
from vllm_numa_backend.bench.cases import (
    MAX_DECODE_QUERY,
    Case,
    Tensors,
    article_cases,
    decode_cases,
    make_tensors,
    prefill_cases,
)
from vllm_numa_backend.bench.checks import Step, cluster_steps, run_check, steps, write_checks
from vllm_numa_backend.bench.report import OURS, Report, Timing, add_failure, device_of, in_words, new_report
from vllm_numa_backend.bench.timing import time_calls

AGREEMENT = 6e-2  # between contestants; some quantise queries and probabilities where the cache is float8
CPU_REPEATS = 3
MAPPED = (Case(1, 16384, 128, 128, 64, 16384), Case(1, 16384, 64, 8, 64, 16384))


@dataclass(frozen=True)
class Part:
    """One check or one case of a table, whose results it adds to a report. table: "checks" or that of the timings."""

    table: str
    name: str
    measure: Callable[[Report], None]


def parts(*, rows: int = 100, device: torch.device | str | None = None, kernels: str = "auto") -> list[Part]:
    """All that is measured, in order. rows: the most cases of each table."""
    device = device_of(device)
    topology = detect(device)
    tiny, float8 = device.type == "cpu", float8_of(topology)
    found = [Part("checks", "dealing", measure_dealing)] if topology.generation in GENERATIONS else []
    found += [
        _check(dataclasses.replace(step, name=step.name + label), device, kernels, options)
        for label, options in ways(topology)
        for step in steps(float8, tiny=tiny)[:rows]
    ]
    if has_clusters(topology):
        found += [_check(step, device, kernels, {}) for step in cluster_steps(float8)[:rows]]
    found += [
        Part("checks", f"cache write {number}", lambda report, check=check: report.checks.append(check()))
        for number, check in enumerate(write_checks(float8, device, kernels)[:rows])
    ]
    for case in (tiny_cases(MAPPED) if tiny else list(MAPPED))[:rows]:
        found.append(
            Part(
                "mappings",
                case.name,
                partial(measure_mappings, case=case, device=device, topology=topology, kernels=kernels),
            )
        )
    tables = [
        ("prefill", prefill_cases(torch.bfloat16)),
        ("decode", decode_cases(torch.bfloat16)),
        ("decode, float8 cache", decode_cases(float8)),
    ]
    if topology.generation == "gfx1250":
        tables.append(("decode of AMD's article, float8 cache", article_cases(float8)))
    for table, cases in tables:
        for case in (tiny_cases(cases) if tiny else cases)[:rows]:
            found.append(
                Part(
                    table,
                    case.name,
                    partial(measure_case, table=table, case=case, device=device, kernels=kernels),
                )
            )
    return found


def _check(step: Step, device: torch.device, kernels: str, options: dict[str, str]) -> Part:
    def measure(report: Report) -> None:
        report.checks.append(run_check(step, device, kernels, **options))

    return Part("checks", step.name, measure)


def make_report(
    *,
    rows: int = 100,
    device: torch.device | str | None = None,
    kernels: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measure everything in this process. rows: the most cases of each table. keep: called after every part."""
    report, todo = new_report(device), parts(rows=rows, device=device, kernels=kernels)
    for number, part in enumerate(todo, 1):
        progress(f"{number} of {len(todo)}: {part.table}, {part.name}")
        measure_part(report, part)
        keep(report)
    return report


def measure_part(report: Report, part: Part) -> None:
    """Measure one part; where that fails as a whole, the report says so in its place."""
    try:
        part.measure(report)
    except Exception as failure:  # the other parts are still of interest
        add_failure(report, part.table, part.name, in_words(failure))


def ways(topology: Topology) -> list[tuple[str, dict[str, str]]]:
    """(label, options of the planner) of the choices that a device leaves to its owner, the usual one first."""
    found: list[tuple[str, dict[str, str]]] = [("", {})]
    if topology.generation in PLACED_BY_HARDWARE:
        found.append((", placed by hardware", {"placement": "hardware"}))
    if topology.generation in aiter_adapter.GENERATIONS and aiter_adapter.installed() is not None:
        found.append((", amd-aiter where it can", {"aiter": "always"}))
    return found


def has_clusters(topology: Topology) -> bool:
    """Whether decode can run in clusters of workgroups."""
    release = triton_release()
    return (
        topology.generation == "gfx1250"
        and release is not None
        and release >= cdna5_variant.OLDEST_TRITON_WITH_CLUSTERS
    )


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
    if case.query_len <= MAX_DECODE_QUERY:
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


def measure_dealing(report: Report) -> None:
    """Which XCD got which workgroup: what a placement by dispatch trusts."""
    from numa_attention.domains_probe import dealt_xccs

    report.dealt = dealt_xccs(detect("cuda"))


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
            try:
                call, schedule = contestants.ours(tensors, kernels=kernels, **options)
            except Exception as failure:  # such as domains that cannot be told
                note_failure(report, "mappings", case, label.removeprefix(", "), failure)
                continue
            label = f"{schedule.prefill.variant.mapping}{label}"
            name = schedule.prefill.variant.name
            add_timing(report, "mappings", case, label, name, call, tensors, expected)
    machine = machine_of(topology)
    if machine is not None:
        rows = compare_mappings(machine, case.q_heads, case.kv_heads, case.head_dim, case.batch, case.length)
        report.predicted[case.name] = {row.mapping: row.hit_rate for row in rows}


def measure_case(report: Report, table: str, case: Case, device: torch.device, kernels: str) -> None:
    """Ours, in each way that the device's owner can choose, then what of vLLM's own and AMD's kernels can run here."""
    tensors = make_tensors(case, device=device)
    expected = None
    for contestant, options in {OURS: {}, **own_ways(case, detect(device))}.items():
        try:
            call, schedule = contestants.ours(tensors, kernels=kernels, **options)
        except Exception as failure:  # the next way may be possible
            note_failure(report, table, case, contestant, failure)
            continue
        name = (schedule.decode or schedule.prefill or schedule.extend).variant.name
        expected = add_timing(report, table, case, contestant, name, call, tensors, expected)
    for contestant, make in rivals(tensors).items():
        try:
            call = make()
        except Exception as failure:  # a rival that is not there must not end the report
            note_failure(report, table, case, contestant, failure)
            continue
        add_timing(report, table, case, contestant, "", call, tensors, expected)
    del tensors
    if device.type != "cpu":
        torch.cuda.empty_cache()


def own_ways(case: Case, topology: Topology) -> dict[str, dict]:
    """Contestant -> options of the planner, beside the dispatcher's choice, of a decode."""
    if case.query_len > MAX_DECODE_QUERY:
        return {}
    found: dict[str, dict] = {}
    if topology.generation in PLACED_BY_HARDWARE and topology.generation not in PLACED_BY_SM:
        found[f"{OURS}, placed by hardware"] = {"placement": "hardware"}
    if has_clusters(topology):
        found[f"{OURS}, in clusters where they fit"] = {"clusters": True}
    if topology.generation == "gfx1250":
        chosen = choose_decode(case.shape, topology, "triton", case.query_len)
        for buffers, form in enumerate(cdna5_variant.FORMS, 1):
            if chosen.name == "cdna5-decode" and buffers < chosen.num_stages:
                variant = dataclasses.replace(chosen, form=form, num_stages=buffers)
                found[f"{OURS}, {form}"] = {"decode_variant": variant}
    return found


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
        note_failure(report, table, case, contestant, failure)
        return expected
    rate, unit = rate_of(case, seconds)
    report.timings.append(Timing(table, case.name, contestant, variant, seconds, rate, unit))
    return result if expected is None else expected


def note_failure(report: Report, table: str, case: Case, contestant: str, failure: Exception) -> None:
    report.timings.append(Timing(table, case.name, contestant, "", math.nan, math.nan, "", in_words(failure)))
