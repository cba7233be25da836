"""numa-swizzle variant: which kernel, mapping and splits a layer would get on a device, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import print_table, table

from .. import settings
from . import UserError, choices
from .plan import sharing_table
from .simulate import one_sentence

if TYPE_CHECKING:
    from numa_attention.variants import Variant

PHASES = ("decode", "prefill")
MOST_REQUESTS = 1 << 16


def variant(
    q_heads: Annotated[int, typer.Option()],
    kv_heads: Annotated[int, typer.Option()],
    context: Annotated[str, typer.Option(help="Tokens of each request: 131072, 128k, 1M.")],
    device: Annotated[str, typer.Option(help="A product (MI300X) or generation (gfx942).")],
    head_dim: Annotated[int, typer.Option()] = 128,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    batch: Annotated[int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests at a time.")] = 1,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of one host that the heads and the context go over.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Explain the choice for one layer under the NUMA_SWIZZLE_* settings: kernel, tile, mapping, splits."""
    if phase not in PHASES:
        raise UserError(f"--phase {phase!r} is unknown: choose one of {', '.join(PHASES)}.")
    if gpus > 1 and phase != "decode":
        raise UserError("--gpus is about decode: a prefill is not divided over ranks here.")
    if device.lower() == "cpu" and gpus == 1:
        show_without_model(
            kernel_of(phase, q_heads, kv_heads, head_dim, device, settings_in_force()), as_json
        )
        return
    with one_sentence():
        from numa_attention.machine import dispatch, two_levels
        from numa_attention.machine.machines import machine as find
        from numa_attention.machine.plan import tokens as read_tokens

        tokens = read_tokens(context)
        device_model = find(device)
        chosen = settings_in_force()
        ways = []
        if gpus > 1:
            ways = two_levels.ways_to_share(
                device_model, gpus, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, element_bytes=2,
                context=tokens, requests=batch,
            )  # fmt: skip
            ranks = two_levels.fastest(ways).ranks
            # what one GPU has of the layer: some of the heads, and of their contexts its part
            parts = gpus // ranks
            kv_heads = -(-kv_heads // parts)
            q_heads, tokens = q_heads // parts, -(-tokens // ranks)
        kernel = kernel_of(phase, q_heads, kv_heads, head_dim, device, chosen)
        if phase == "prefill":
            choice = dispatch.explain_prefill(
                device_model,
                q_heads,
                kv_heads,
                head_dim,
                batch,
                tokens,
                block_m=kernel.block_m,
                asked=chosen.mapping,
                placed=kernel.queues > 0,
            )
        else:
            choice = dispatch.explain_decode(
                device_model,
                q_heads,
                kv_heads,
                batch,
                tokens,
                workgroups=kernel.workgroups,
                block_n=kernel.block_n,
                asked=chosen.mapping,
                row_blocks=-(-(q_heads // kv_heads) // kernel.block_m),
            )
    if as_json:
        answer = dataclasses.asdict(choice) | {"variant": dataclasses.asdict(kernel)}
        if ways:
            answer["ways_to_share"] = [dataclasses.asdict(way) for way in ways]
        typer.echo(json.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(kernel.describe())}[/]", soft_wrap=True)
    if ways:
        console.print(f"  {two_levels.explain(ways, gpus)}", soft_wrap=True)
        console.print(f"  On each GPU, {q_heads} query heads over {tokens:,} tokens:", soft_wrap=True)
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
    if ways:
        print_table(console, sharing_table(ways))


def show_without_model(kernel: Variant, as_json: bool) -> None:
    """The choice alone, for a CPU: the machine model knows the L2 caches of GPUs."""
    reason = (
        "A CPU is one NUMA domain here: every mapping places work alike, and there is nothing to compute."
    )
    if as_json:
        typer.echo(json.dumps({"reasons": [reason], "variant": dataclasses.asdict(kernel)}, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(kernel.describe())}[/]", soft_wrap=True)
    console.print(f"  {reason}", soft_wrap=True)


def settings_in_force() -> settings.Settings:
    """Raises UserError where one is wrong."""
    try:
        return settings.read()
    except settings.SettingsError as error:
        raise UserError(str(error)) from None


def kernel_of(
    phase: str, q_heads: int, kv_heads: int, head_dim: int, device: str, chosen: settings.Settings
) -> Variant:
    """What the dispatcher's table says for bfloat16, one query token a decoding request, pages of 16.

    Raises UserError where the device, the shape or a setting does not go together with the others.
    """
    import torch

    from numa_attention import topology
    from numa_attention.shapes import LayerShape

    shape = LayerShape(q_heads, kv_heads, head_dim, head_dim, torch.bfloat16, torch.bfloat16, page_size=16)
    try:
        shape.check()
        known = topology.pretend(device)
        kernels = choices.kernels_on(known, chosen, pretended=True)
        return choices.variants_of(shape, known, kernels, chosen)[phase]
    except (ValueError, ImportError) as error:
        raise UserError(f"{str(error).rstrip('.')}.") from None
