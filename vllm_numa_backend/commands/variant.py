"""numa-swizzle variant: which kernel, mapping and splits a layer would get on a device, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import print_table, table

from . import UserError
from .simulate import one_sentence

PHASES = ("decode", "prefill")


def variant(
    q_heads: Annotated[int, typer.Option()],
    kv_heads: Annotated[int, typer.Option()],
    context: Annotated[int, typer.Option(help="Tokens of each request.")],
    device: Annotated[str, typer.Option(help="A product (MI300X) or generation (gfx942).")],
    head_dim: Annotated[int, typer.Option()] = 128,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Explain the choice for one layer: kernel, tile, mapping, splits."""
    if phase not in PHASES:
        raise UserError(f"--phase {phase!r} is unknown: choose one of {', '.join(PHASES)}.")
    with one_sentence():
        from numa_attention.machine import dispatch
        from numa_attention.machine.machines import machine as find

        device_model = find(device)
        kernel = kernel_of(phase, q_heads, kv_heads, head_dim, device)
        if phase == "prefill":
            choice = dispatch.explain_prefill(
                device_model, q_heads, kv_heads, head_dim, batch, context, block_m=kernel.block_m
            )
        else:
            choice = dispatch.explain_decode(
                device_model,
                q_heads,
                kv_heads,
                batch,
                context,
                workgroups=kernel.workgroups,
                block_n=kernel.block_n,
                row_blocks=-(-(q_heads // kv_heads) // kernel.block_m),
            )
    if as_json:
        answer = dataclasses.asdict(choice) | {"variant": dataclasses.asdict(kernel)}
        typer.echo(json.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(kernel.describe())}[/]", soft_wrap=True)
    for reason in choice.reasons:
        console.print(f"  {escape(reason)}", soft_wrap=True)
    if choice.rows:
        shown = table(
            "mapping", "hits, closed form", "streams a domain", "time", "measured", text=("measured",)
        )
        for row in choice.rows:
            shown.add_row(
                row.mapping,
                f"{row.hit_rate:.1%}",
                f"{row.streams_per_domain:.1f}",
                f"{row.relative_time:.2f}",
                row.measured,
            )
        print_table(console, shown)


def kernel_of(phase: str, q_heads: int, kv_heads: int, head_dim: int, device: str):
    """What the dispatcher's table says for bfloat16, one query token a decoding request, pages of 16."""
    import torch

    from numa_attention import topology, variants
    from numa_attention.shapes import LayerShape, UnsupportedShape

    try:
        shape = LayerShape(
            q_heads, kv_heads, head_dim, head_dim, torch.bfloat16, torch.bfloat16, page_size=16
        )
        shape.check()
        known = topology.pretend(device)
        if phase == "prefill":
            return variants.choose_prefill(shape, known, "triton")
        return variants.choose_decode(shape, known, "triton", 1)
    except UnsupportedShape as error:
        raise UserError(str(error)) from None
    except ValueError as error:
        raise UserError(f"{error}.") from None
