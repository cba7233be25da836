"""numa-swizzle bench mapping: every mapping, placed by dispatch and by hardware, on layers of many kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import print_table, table

from . import UserError

if TYPE_CHECKING:
    from vllm_numa_backend.bench.mapping_points import Point
    from vllm_numa_backend.bench.mapping_study import Measured

ABSENT = "-"
TIE = 0.01  # relative time within which two ways are as fast, as the dispatcher has it


def mapping(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the points go, as JSON.")] = Path(
        "mapping-study.json"
    ),
    seconds: Annotated[
        float, typer.Option(min=1, help="Stop after so long; what is left is marked.")
    ] = 420.0,
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only points whose name has this in it.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="hopper-prefill: that kernel, for the layers that it takes.")
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters/--no-counters", help="Whether ncu counts some of the points.")
    ] = True,
    show_points: Annotated[
        bool, typer.Option("--list", help="Print the names of the points and stop.")
    ] = False,
) -> None:
    """Time four mappings on ten layers, placed by dispatch and by hardware; 16 points are also counted by ncu.

    Prints each point as it is measured. Every result is checked first.
    """
    import torch

    from numa_attention.topology import detect, pretend
    from vllm_numa_backend.bench.mapping_points import is_counted, points

    console = Console(highlight=False)
    if show_points:
        for point in points(detect() if torch.cuda.is_available() else pretend("H200")):
            console.print(f"{escape(point.name)}{' (counted)' if is_counted(point) else ''}", soft_wrap=True)
        return
    if not torch.cuda.is_available():
        raise UserError("bench mapping needs a GPU, and there is none here; --list prints its points.")
    from vllm_numa_backend.bench.mapping_study import study, write

    wanted = named(points(detect()), only)
    found = study(
        torch.device("cuda", torch.cuda.current_device()),
        wanted,
        kernel=kernel,
        seconds=seconds,
        count=counters,
        progress=lambda row: console.print(line(row), soft_wrap=True, markup=False),
    )
    write(found, out)
    show(console, found)
    for verdict in verdicts(found):
        console.print(escape(verdict), soft_wrap=True)
    console.print(f"The points are in {escape(str(out))}.", soft_wrap=True)


def named(points: list[Point], text: str | None) -> list[Point]:
    """The points whose name has `text` in it. Raises UserError where none has."""
    chosen = [point for point in points if text is None or text in point.name]
    if not chosen:
        raise UserError(f"--only {text!r} is in no point's name: --list prints them.")
    return chosen


def line(row: Measured) -> str:
    """One point in one line."""
    words = [row.name, row.kernel]
    if row.seconds is not None:
        words.append(f"{row.seconds * 1e3:.3f} ms, {row.tflops:.0f} TFLOP/s")
    if row.hit_rate is not None:
        words.append(f"{row.hit_rate:.2%} hits, {row.hbm_bytes / 1e9:.1f} GB from HBM")
    return "; ".join(filter(None, [*words, row.note]))


def show(console: Console, found: list[Measured]) -> None:
    shown = table(
        "layer",
        "mapping",
        "placement",
        "kernel",
        "ms",
        "TFLOP/s",
        "x first",
        "streams a domain",
        "hits",
        "GB from HBM",
        "GB between partitions",
        "hits, closed form",
        "note",
        title="Streams and the closed form are computed; the rest is measured, or marked as not measured.",
        text=("mapping", "placement", "kernel", "note"),
    )
    first: dict[str, float] = {}
    for row in found:
        if row.seconds is not None:
            first.setdefault(row.layer, row.seconds)
        shown.add_row(
            row.layer,
            row.mapping,
            row.placement,
            row.kernel or ABSENT,
            number(row.seconds, 1e3, ".3f"),
            number(row.tflops, 1, ".0f"),
            ABSENT if row.seconds is None else f"{first[row.layer] / row.seconds:.2f}",
            number(row.streams_per_domain, 1, ".1f"),
            number(row.hit_rate, 1, ".2%"),
            number(row.hbm_bytes, 1e-9, ".1f"),
            number(row.partition_bytes, 1e-9, ".1f"),
            number(row.predicted_hit_rate, 1, ".1%"),
            escape(row.note),
        )
    print_table(console, shown)


def verdicts(found: list[Measured]) -> list[str]:
    """For each layer that was timed whole: the fastest ways, and what the slowest costs; or that it does not matter."""
    lines = []
    for layer in dict.fromkeys(row.layer for row in found):
        rows = [row for row in found if row.layer == layer]
        if any(row.seconds is None for row in rows):
            continue
        fastest, slowest = min(row.seconds for row in rows), max(row.seconds for row in rows)
        if slowest <= fastest * (1 + TIE):
            lines.append(f"{layer}: the mapping does not matter, all are within {TIE:.0%}.")
            continue
        best = [way(row) for row in rows if row.seconds <= fastest * (1 + TIE)]
        worst = next(row for row in rows if row.seconds == slowest)
        lines.append(
            f"{layer}: fastest, within {TIE:.0%}: {', '.join(best)}; {way(worst)} takes {slowest / fastest:.2f} times "
            "as long."
        )
    return lines


def way(row: Measured) -> str:
    return f"{row.mapping} by {row.placement}"


def number(value: float | None, factor: float, form: str) -> str:
    """A number for people; ABSENT where it was not measured."""
    return ABSENT if value is None else format(value * factor, form)
