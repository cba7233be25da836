"""The NUMA_SWIZZLE_* environment variables: one table, read once, checked before anything runs."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "NUMA_SWIZZLE_"


class SettingsError(ValueError):
    """A NUMA_SWIZZLE_* variable is unknown, has an unknown value, or cannot work on this machine."""


@dataclass(frozen=True)
class Setting:
    """One row of the table. The first allowed value is the default."""

    variable: str
    allowed: tuple[str, ...]
    meaning: str

    @property
    def default(self) -> str:
        return self.allowed[0]


TABLE = (
    Setting(
        "NUMA_SWIZZLE_KERNELS",
        ("auto", "triton", "torch", "interpret"),
        "which kernels run: auto (Triton on a GPU, torch on a CPU), triton, torch, "
        "or interpret (the Triton kernels under Triton's interpreter, slow, for debugging)",
    ),
    Setting(
        "NUMA_SWIZZLE_MAPPING",
        ("auto", "block-first", "swizzled-block-first", "head-first", "swizzled-head-first"),
        "how workgroups are placed on NUMA domains: auto (from the GQA shape and the device) or one mapping",
    ),
    Setting(
        "NUMA_SWIZZLE_AITER",
        ("auto", "never", "always"),
        "AMD's own kernels (amd-aiter) on MI300X and MI355X, where installed: auto (prefill that its assembly kernel "
        "takes: bfloat16, head_dim 128, pages of a multiple of 128 tokens), never, or always (decode too, and whatever "
        "else it can run)",
    ),
    Setting(
        "NUMA_SWIZZLE_PLACEMENT",
        ("dispatch", "hardware"),
        "whom the mapping trusts: dispatch (the hardware deals workgroups to the domains in turn) or hardware (each "
        "workgroup reads its XCD, on MI300X and MI355X, or its SM, in prefill on H100 and H200, and takes work from "
        "the queue of that domain)",
    ),
    Setting(
        "NUMA_SWIZZLE_EXCHANGE",
        ("auto", "ag_rs", "a2a", "peers"),
        "how ranks that share a sequence merge their results: auto (as vLLM's --dcp-comm-backend says), ag_rs (gather "
        "the LSEs, reduce-scatter the outputs), a2a (all in one all-to-all) or peers (in kernels that write into the "
        "other GPUs' memory, queries included, where it can be reached; auto where not)",
    ),
    Setting(
        "NUMA_SWIZZLE_CLUSTERS",
        ("off", "on"),
        "on an MI450, whether decode steps that fill the device with clusters of workgroups, over pages long enough, "
        "are run in clusters, which suit even lengths (on), or all by the work list, which balances them (off)",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The values in force. `mapping` is None for auto, as the planner takes it, and so is `exchange`."""

    kernels: str = "auto"
    mapping: str | None = None
    aiter: str = "auto"
    placement: str = "dispatch"
    exchange: str | None = None
    clusters: bool = False


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the settings in `environ` (default: os.environ). Raises SettingsError."""
    environ = os.environ if environ is None else environ
    known = {row.variable for row in TABLE}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            raise SettingsError(f"{name} is not a setting; the settings are {', '.join(sorted(known))}.")
    values = {row.variable: _value(row, environ) for row in TABLE}
    mapping, exchange = values["NUMA_SWIZZLE_MAPPING"], values["NUMA_SWIZZLE_EXCHANGE"]
    return Settings(
        kernels=values["NUMA_SWIZZLE_KERNELS"],
        mapping=None if mapping == "auto" else mapping,
        aiter=values["NUMA_SWIZZLE_AITER"],
        placement=values["NUMA_SWIZZLE_PLACEMENT"],
        exchange=None if exchange == "auto" else exchange,
        clusters=values["NUMA_SWIZZLE_CLUSTERS"] == "on",
    )


def _value(row: Setting, environ: Mapping[str, str]) -> str:
    value = environ.get(row.variable, "").strip().lower() or row.default
    if value not in row.allowed:
        allowed = f"{', '.join(row.allowed[:-1])} or {row.allowed[-1]}"
        raise SettingsError(f"{row.variable}={environ[row.variable]} is unknown; it can be {allowed}.")
    return value


@functools.cache
def current() -> Settings:
    """This process's settings, read at the first call. Raises SettingsError."""
    return read()


def why_unusable(settings: Settings, device_type: str) -> str | None:
    """Why the chosen kernels cannot run on a torch device type ("cpu", "cuda"), in one sentence, or None."""
    wants_triton = settings.kernels in ("triton", "interpret") or (
        settings.kernels == "auto" and device_type != "cpu"
    )
    if settings.kernels == "triton" and device_type == "cpu":
        return (
            "NUMA_SWIZZLE_KERNELS=triton needs a GPU and vLLM runs on the CPU here; "
            "unset it, or set it to torch or interpret."
        )
    if settings.kernels == "torch" and device_type != "cpu":
        return (
            f"NUMA_SWIZZLE_KERNELS=torch attends on the CPU only and vLLM runs on {device_type} here; "
            "unset it, or set it to triton."
        )
    if wants_triton and importlib.util.find_spec("triton") is None:
        instead = ", or set NUMA_SWIZZLE_KERNELS=torch" if device_type == "cpu" else ""
        return (
            f"NUMA_SWIZZLE_KERNELS={settings.kernels} needs the Triton package, which is not installed; "
            f'run `pip install "triton>=3.6"`{instead}.'
        )
    return None
