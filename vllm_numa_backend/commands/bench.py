"""numa-swizzle bench: our kernels beside vLLM's own, in one run, on this machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import print_table, table

from . import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_numa_backend.bench.cases import Case
    from vllm_numa_backend.bench.rows import Row

KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}

bench = typer.Typer(help="Time our kernels beside vLLM's own, in one run.", no_args_is_help=True)

KvDtype = Annotated[str, typer.Option(metavar="|".join(KV_DTYPES), help="How the cache is held.")]
Rows = Annotated[str | None, typer.Option(metavar="0,2,...", help="Only these rows of the table.")]
Window = Annotated[
    int | None,
    typer.Option(min=1, help="Sliding window in tokens, the query's own one included; none by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@bench.command()
def decode(
    kv_dtype: KvDtype = "bf16",
    query_len: Annotated[int, typer.Option(min=1, max=8, help="New tokens a request.")] = 1,
    window: Window = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="hopper-decode or portable-decode: that kernel instead of the dispatcher's choice."
        ),
    ] = None,
    rows: Rows = None,
    as_json: AsJson = False,
) -> None:
    """Decode over a paged cache in random page order: time, TB/s of KV read, ratios."""
    run("decode", kv_dtype, query_len, window, kernel, rows, as_json)


@bench.command()
def prefill(
    kv_dtype: KvDtype = "bf16",
    window: Window = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="hopper-prefill or portable-prefill: that kernel instead of the dispatcher's choice."
        ),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Twenty random steps of 32 requests on cached prefixes instead."),
    ] = False,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Contiguous tensors, beside torch through cuDNN, instead.")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", help="With --contiguous: a causal mask.")] = False,
    rows: Rows = None,
    as_json: AsJson = False,
) -> None:
    """Causal prefill of whole prompts over a paged cache: time, TFLOP/s, ratios."""
    if contiguous:
        if mixed or window is not None or kv_dtype != "bf16":
            raise UserError("--contiguous goes with --causal, --kernel and --rows only: there is no cache.")
        from .bench_contiguous import run_contiguous

        run_contiguous(causal, kernel, rows, as_json)
        return
    if causal:
        raise UserError("--causal goes with --contiguous: prefill over a cache is always causal.")
    run("mixed" if mixed else "prefill", kv_dtype, 1, window, kernel, rows, as_json)


@bench.command()
def report(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes.")] = Path(
        "numa-swizzle-report"
    ),
    rows: Annotated[int, typer.Option(min=1, help="At most so many cases of each table.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Test every kernel against the specification, time mappings, decode and prefill beside vLLM's own, write a report.

    For any GPU, where it takes some ten minutes or more; on a CPU the shapes are tiny and the report says so. Exits
    with 1 if a kernel of ours is wrong or does not run.
    """
    import torch

    from vllm_numa_backend import settings
    from vllm_numa_backend.bench.report import failures
    from vllm_numa_backend.bench.report_files import as_dict, write_report
    from vllm_numa_backend.bench.report_parts import make_report
    from vllm_numa_backend.bench.report_process import NothingMeasured, measure_apart

    try:
        chosen = settings.current()
    except settings.SettingsError as error:
        raise UserError(str(error)) from None
    out.mkdir(parents=True, exist_ok=True)
    log = out / "report.log"
    measure = partial(measure_apart, log) if torch.cuda.is_available() else make_report
    console = Console(stderr=True)
    with console.status("starting") as status:
        try:
            made = measure(
                rows=rows,
                kernels=chosen.kernels,
                # a status is seen on a terminal only
                progress=status.update if console.is_terminal else partial(console.print, soft_wrap=True),
                keep=lambda so_far: write_report(so_far, out, plots=False),
            )
        except NothingMeasured as error:
            raise UserError(f"the report came to a halt: {error}; {log} has the whole output.") from None
    write_report(made, out)
    wrong = failures(made)
    if as_json:
        typer.echo(json.dumps(as_dict(made), indent=2))
    else:
        printed = Console(highlight=False)
        for line in wrong:
            printed.print(f"[red]wrong:[/] {escape(line)}", soft_wrap=True)
        passed = f"{sum(check.passed for check in made.checks)} of {len(made.checks)} checks pass"
        ran = sum(not math.isnan(timing.seconds) for timing in made.timings)
        color = "red" if wrong else "green"
        verdict = f"[{color}]{passed}[/], {ran} of {len(made.timings)} timings ran"
        last = (
            f"This is a CPU: {out} is a test of the report, there is nothing to learn from it"
            if made.tiny
            else f"Send the folder {out} back"
        )
        printed.print(f"{verdict}. {escape(last)}.", soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


def run(
    phase: str,
    kv_dtype: str,
    query_len: int,
    window: int | None,
    kernel: str | None,
    rows: str | None,
    as_json: bool,
) -> None:
    """Measure the rows asked for and print them."""
    if kv_dtype not in KV_DTYPES:
        raise UserError(f"--kv-dtype {kv_dtype!r} is unknown: choose one of {', '.join(KV_DTYPES)}.")
    require_gpu_and_vllm()
    import torch

    from vllm_numa_backend.bench.cases import decode_cases, prefill_cases
    from vllm_numa_backend.bench.mixed import mixed_cases

    dtype = getattr(torch, KV_DTYPES[kv_dtype])
    cases = {
        "decode": lambda: decode_cases(dtype, query_len),
        "prefill": lambda: prefill_cases(dtype),
        "mixed": lambda: mixed_cases(dtype),
    }[phase]()
    if window is not None:
        cases = [replace(case, window=window - 1) for case in cases]
    numbers = wanted_rows(rows, len(cases))
    console = Console(stderr=True)
    measured: dict[int, Row] = {}
    for number in numbers:
        with console.status(f"{phase} {cases[number].name} ({number})"):
            measured[number] = measure_or_say_why_not(cases[number], kernel)
    disturbed = [] if window or phase == "mixed" else disturbed_rows(phase, kv_dtype, query_len, measured)
    if as_json:
        typer.echo(json.dumps(as_records(measured, disturbed), indent=2))
    else:
        print_table(Console(highlight=False), as_table(phase, kv_dtype, measured, disturbed))
    if disturbed:
        raise UserError(
            f"FlashAttention-3 was slower than it is on an undisturbed H200 in row {', '.join(map(str, disturbed))}: "
            "these figures are void, run again."
        )


def measure_or_say_why_not(case: Case, kernel: str | None) -> Row:
    """`rows.measure`; raises UserError for a kernel that is unknown or does not take the case."""
    from vllm_numa_backend.bench.rows import measure

    try:
        return measure(case, kernel=kernel)
    except ValueError as error:
        raise UserError(f"row {case.name}: {error}") from None


def require_gpu_and_vllm() -> None:
    """Raise UserError where there is no Hopper GPU or no vLLM to compare with."""
    import importlib.util

    import torch

    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
        raise UserError("bench compares with FlashAttention-3 and needs an H100 or H200; there is none here.")
    if importlib.util.find_spec("vllm.vllm_flash_attn") is None:
        raise UserError(
            "bench needs vLLM's CUDA build with FlashAttention-3: install vllm beside this package."
        )


def wanted_rows(rows: str | None, count: int) -> list[int]:
    """Row numbers from "0,2"; all where None."""
    if rows is None:
        return list(range(count))
    try:
        numbers = [int(word) for word in rows.split(",")]
    except ValueError:
        raise UserError(f"--rows {rows!r} is no list of row numbers such as 0,2.") from None
    if not all(0 <= number < count for number in numbers):
        raise UserError(f"--rows {rows!r} names a row that does not exist: there are 0 to {count - 1}.")
    return numbers


def disturbed_rows(phase: str, kv_dtype: str, query_len: int, measured: dict[int, Row]) -> list[int]:
    """Rows in which FlashAttention-3 was clearly slower than it is on an undisturbed H200; [] on another GPU."""
    import torch

    from vllm_numa_backend.bench.h200 import is_disturbed

    if query_len != 1 or "H200" not in torch.cuda.get_device_name():
        return []
    return [
        number
        for number, row in measured.items()
        if is_disturbed(
            phase, kv_dtype, number, row.flash_attention_3, row.case.flops / row.flash_attention_3 / 1e12
        )
    ]


def as_records(measured: dict[int, Row], disturbed: list[int]) -> list[dict]:
    """One record a row, times in microseconds."""
    return [
        {
            "row": number,
            "case": row.case.name,
            "variant": row.variant,
            "us": row.ours * 1e6,
            "rate": row.rate(row.ours),
            "flash_attention_3_us": row.flash_attention_3 * 1e6,
            "triton_attn_us": None if row.triton_attn is None else row.triton_attn * 1e6,
            "void": number in disturbed,
        }
        for number, row in measured.items()
    ]


def as_table(phase: str, kv_dtype: str, measured: dict[int, Row], disturbed: list[int]) -> Table:
    """The rows with ratios (above 1: we are faster), and their geometric means."""
    unit = "TB/s" if phase == "decode" else "TFLOP/s"
    shown = table(
        "row",
        "case",
        "variant",
        "us",
        unit,
        "FA3 us",
        f"FA3 {unit}",
        "x FA3",
        "TRITON_ATTN us",
        "x TRITON_ATTN",
        title=f"{phase}, {kv_dtype} cache, head_dim 128: {'' if phase == 'mixed' else 'batch, length, '}"
        "q heads/kv heads, page",
        text=("case", "variant"),
    )
    ratios = {"fa3": [], "triton": []}
    for number, row in measured.items():
        ratios["fa3"].append(row.flash_attention_3 / row.ours)
        ratios["triton"].append((row.triton_attn or math.nan) / row.ours)
        shown.add_row(
            f"{number}{' void' if number in disturbed else ''}",
            row.case.name,
            row.variant,
            f"{row.ours * 1e6:.1f}",
            f"{row.rate(row.ours):.2f}",
            f"{row.flash_attention_3 * 1e6:.1f}",
            f"{row.rate(row.flash_attention_3):.2f}",
            f"{ratios['fa3'][-1]:.2f}",
            f"{(row.triton_attn or math.nan) * 1e6:.1f}",
            f"{ratios['triton'][-1]:.2f}",
        )  # fmt: skip
    means = {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in ratios.items()}
    shown.add_section()
    shown.add_row(
        "", "geometric mean", "", "", "", "", "", f"{means['fa3']:.2f}", "", f"{means['triton']:.2f}"
    )
    return shown
