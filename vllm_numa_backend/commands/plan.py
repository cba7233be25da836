"""numa-swizzle plan: tensor-parallel and context-parallel sizes for a model on some GPUs, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from numa_attention.terminal import print_table, table

from .simulate import one_sentence

if TYPE_CHECKING:
    from numa_attention.machine.plan import Plan
    from numa_attention.machine.two_levels import TwoLevels


def plan(
    model: Annotated[Path, typer.Option(metavar="CONFIG", help="A Hugging Face config.json, or its folder.")],
    context: Annotated[str, typer.Option(help="Tokens of each request: 131072, 128k, 1M.")],
    machine: Annotated[str, typer.Option(help="mi300x, mi355x, mi450, h100, h200, b200, or a generation.")],
    gpus: Annotated[int, typer.Option(help="GPUs of one host.")] = 1,
    requests: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="auto (as the model), bfloat16, float16 or fp8.")] = "auto",
    memory: Annotated[float, typer.Option(help="Share of the GPU's memory that the engine may use.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Plan a long context: sizes, KV per GPU, the longest context that fits.

    Exits with 1 where it does not fit, or not with NUMA_SWIZZLE.
    """
    with one_sentence():
        from numa_attention.machine import plan as planning
        from numa_attention.machine.machines import machine as find

        answer = planning.make_plan(
            planning.read_config(model),
            find(machine),
            gpus,
            planning.tokens(context),
            requests=requests,
            kv_dtype=kv_dtype,
            utilisation=memory,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(answer), indent=2))
    else:
        show(Console(highlight=False), answer)
    if not answer.fits or answer.best.obstacle:
        raise typer.Exit(1)


def sharing_table(ways: Sequence[TwoLevels]) -> Table:
    """Each number of ranks with its splits and times; a star at the fastest."""
    from numa_attention.machine.two_levels import fastest

    best = fastest(ways)
    shown = table("ranks x splits", "tokens a split", "read", "sent", "reading", "merging", "exchanging")
    for way in ways:
        shown.add_row(
            f"{way.ranks} x {way.splits}{' *' if way == best else ''}",
            f"{way.split_tokens:,}",
            f"{way.read_bytes / 1e6:.1f} MB",
            f"{way.sent_bytes / 1e3:.1f} KB",
            f"{way.reading * 1e6:.1f} us",
            f"{way.merging * 1e6:.1f} us",
            f"{way.exchanging * 1e6:.1f} us",
        )
    return shown


def show(console: Console, answer: Plan) -> None:
    best = answer.best
    headline = f"vllm serve ... {answer.flags}"
    if best.obstacle:
        headline += "  (not with NUMA_SWIZZLE)"
    console.print(f"[bold]{headline}[/]", soft_wrap=True)
    for reason in answer.reasons:
        console.print(f"  {escape(reason)}", soft_wrap=True)
    console.print()
    options = table(
        "TP x CP", "KV copies", "KV a GPU", "room", "fits", "longest context", "decode step", "NUMA_SWIZZLE",
        text=("NUMA_SWIZZLE",),
    )  # fmt: skip
    for each in answer.options:
        chosen = " *" if each == best else ""
        options.add_row(
            f"{each.tensor_parallel} x {each.context_parallel}{chosen}",
            str(each.kv_copies),
            f"{each.kv_bytes / 1e9:.2f} GB",
            f"{each.room_bytes / 1e9:.1f} GB",
            "yes" if each.fits else "no",
            f"{each.longest_context:,}",
            f"{each.seconds * 1e3:.2f} ms",
            each.obstacle or "serves it",
        )
    print_table(console, options)
    if answer.gpus > 1 and answer.ways_to_share:
        console.print(
            f"\nRanks that share each sequence, and splits inside each, one layer, computed. {answer.sharing}",
            soft_wrap=True,
        )
        print_table(console, sharing_table(answer.ways_to_share))
    several = "s" if answer.gpus > 1 else ""
    console.print(
        f"\nWhere KV could lie, over {answer.gpus} GPU{several} (outer) and their NUMA domains (inner), one request, "
        "computed. NUMA_SWIZZLE places workgroups, not pages:",
        soft_wrap=True,
    )
    placements = table("case", "KV a domain", "fits", "work", "copies", "moved a token", "time")
    rows = zip(answer.placements, answer.placements_fit, answer.placements_seconds, strict=True)
    for each, fits, seconds in rows:
        placements.add_row(
            f"{each.case}: {each.name}{' *' if each.case == answer.placement else ''}",
            f"{each.unit_kv_bytes / 1e9:.2f} GB",
            "yes" if fits else "no",
            f"{each.unit_tokens / answer.context:.0f}x",
            str(each.copies),
            f"{(each.score_bytes + each.state_bytes) / 1e6:.1f} MB",
            f"{seconds * 1e3:.2f} ms",
        )
    print_table(console, placements)
