"""numa-swizzle plan: tensor-parallel and context-parallel sizes for a model on some GPUs, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .simulate import one_sentence, table, wide_console


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
    """Plan a long context: sizes, KV per GPU, the longest context that fits."""
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
        show(wide_console(), answer)


def show(console: Console, answer) -> None:
    console.print(f"[bold]vllm serve ... {answer.flags}[/]", soft_wrap=True)
    for reason in answer.reasons:
        console.print(f"  {escape(reason)}", soft_wrap=True)
    console.print()
    options = table("TP x CP", "KV copies", "KV a GPU", "room", "fits", "longest context", "decode step")
    for each in answer.options:
        chosen = " *" if each == answer.best else ""
        options.add_row(
            f"{each.tensor_parallel} x {each.context_parallel}{chosen}",
            str(each.kv_copies),
            f"{each.kv_bytes / 1e9:.2f} GB",
            f"{each.room_bytes / 1e9:.1f} GB",
            ("yes" if each.fits else "no") if each.possible else "vLLM refuses",
            f"{each.longest_context:,}",
            f"{each.seconds * 1e3:.2f} ms",
        )
    console.print(options)
    console.print(f"\nKV over {answer.gpus} GPUs (outer) and their NUMA domains (inner), one request:")
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
    console.print(placements)
