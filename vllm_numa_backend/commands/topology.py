"""numa-swizzle topology: which compute units share a NUMA domain, measured, or what is known of another device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import facts, print_table, table

from . import UserError
from .doctor import describe_device

if TYPE_CHECKING:
    import torch

    from numa_attention.domain_map import Clusters, DomainMap
    from numa_attention.topology import Topology

SMS_A_LINE = 16


def topology(
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What is known of another device: a product or a generation."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever the cache holds.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure again and draw the latencies.")
    ] = None,
    latencies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure again and keep the latencies, also where they tell nothing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show which SM or XCD belongs to which NUMA domain of the device here: read from the cache, or measured."""
    from numa_attention import topology as library

    console = Console(highlight=False)
    if device is not None:
        if fresh or plot or latencies:
            raise UserError("--fresh, --plot and --latencies measure the device here: leave out --device.")
        try:
            known = library.pretend(device)
        except ValueError as error:
            raise UserError(f"{error}.") from None
        show(console, known, {"measured": False, "how": how_to_tell(known)}, as_json)
        return
    import torch

    known = library.detect()
    if known.generation == "cpu":
        raise UserError(
            "there is no GPU here, on which NUMA domains are measured: --device MI300X shows what is known of one."
        )
    if known.domains == 1:
        show(console, known, {"measured": False, "how": how_to_tell(known)}, as_json)
    elif torch.version.hip:
        from numa_attention.domains_probe import dealt_xccs

        show(console, known, dealt_xccs(known), as_json)
    else:
        found = mapped(torch.device("cuda", torch.cuda.current_device()), fresh, plot, latencies)
        show(console, known, {"measured": True} | dataclasses.asdict(found), as_json)


def how_to_tell(known: Topology) -> str:
    """How the domains of a device are found, in one sentence."""
    if known.domains == 1:
        return "It has one NUMA domain as far as is known: there is nothing to map."
    if known.generation.startswith("gfx"):
        return f"Its {known.domains} domains are its XCDs; on the device this command shows how workgroups are dealt."
    return (
        f"Its {known.domains} domains are measured by the latency of L2 hits: run this command on the device."
    )


def mapped(device: torch.device, fresh: bool, plot: Path | None, latencies_file: Path | None) -> DomainMap:
    """The map of the NVIDIA device here, from the cache where nothing asks for a measurement."""
    import torch

    from numa_attention import domain_map

    if (
        not (fresh or plot or latencies_file)
        and (known := domain_map.read(domain_map.uuid_of(device))) is not None
    ):
        return known
    for file in filter(None, (plot, latencies_file)):
        if not file.absolute().parent.is_dir():
            raise UserError(f"{file} cannot be written: there is no folder {file.absolute().parent}.")
    latencies: dict[str, torch.Tensor] = {}
    try:
        found, clusters = domain_map.measure(device, latencies)
    except domain_map.NoDomainMap as error:
        raise UserError(str(error)) from None
    finally:
        if latencies_file is not None and latencies:
            torch.save(latencies, latencies_file)
    domain_map.write(found)
    if plot is not None:
        draw(latencies[found.method], found, clusters, plot)
    return found


def draw(latencies: torch.Tensor, found: DomainMap, clusters: Clusters, path: Path) -> None:
    """Latencies of every SM and address, both in the order of their domains, and how often each latency is seen.

    Raises UserError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("figures need matplotlib: pip install 'vllm-numa-backend[model]'.") from None
    ids = [sm for sm in range(len(found.domain_of_sm)) if found.domain_of_sm[sm] >= 0]
    ids.sort(key=lambda sm: found.domain_of_sm[sm])
    rows = latencies[ids][:, clusters.home.argsort(stable=True)]
    spread = found.far_cycles - found.near_cycles
    low, high = found.near_cycles - 2 * spread, found.far_cycles + 2 * spread
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    image, counts = figure.subplots(1, 2, width_ratios=(2, 1))
    drawn = image.imshow(rows.tolist(), aspect="auto", vmin=low, vmax=high, interpolation="nearest")
    image.set_xlabel("addresses, by home")
    image.set_ylabel("SMs, by domain")
    figure.colorbar(drawn, ax=image, label="cycles")
    near = clusters.home[clusters.home.argsort(stable=True)][None, :] == _domains(ids, found)[:, None]
    for name, chosen in (("own domain", near), ("other domain", ~near)):
        counts.hist(rows[chosen].clamp(low, high).tolist(), bins=80, alpha=0.6, label=name)
    counts.set_xlabel("cycles")
    counts.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the figure cannot be written to {path}: {error}.") from None


def _domains(ids: list[int], found: DomainMap) -> torch.Tensor:
    import torch

    return torch.tensor([found.domain_of_sm[sm] for sm in ids])


def show(console: Console, known: Topology, found: dict, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"device": dataclasses.asdict(known)} | found, indent=2))
        return
    console.print(f"[bold]{escape(describe_device(dataclasses.asdict(known)))}[/]", soft_wrap=True)
    if not found["measured"]:
        console.print(escape(found["how"]), soft_wrap=True)
    elif "domain_of_sm" in found:
        show_map(console, found)
    else:
        counts = table("XCD", "workgroups")
        for xcc, count in found["workgroups_of_xcc"].items():
            counts.add_row(str(xcc), str(count))
        print_table(console, counts)
        console.print(
            f"the first workgroups ran on XCD {', '.join(map(str, found['first_xccs']))}", soft_wrap=True
        )
        console.print(
            f"{found['dealt_in_turn']:.1%} of the workgroups w ran on XCD w mod {known.domains}, as placement by "
            "dispatch trusts.",
            soft_wrap=True,
        )


def show_map(console: Console, found: dict) -> None:
    """Domains with their SMs, and the map: one digit an SM, in the order of ids."""
    places = found["domain_of_sm"]
    domains = table("domain", "SMs")
    for domain in range(max(places) + 1):
        domains.add_row(str(domain), str(places.count(domain)))
    print_table(console, domains)
    console.print("domain of each SM:")
    for first in range(0, len(places), SMS_A_LINE):
        line = "".join(" ." if place < 0 else f" {place}" for place in places[first : first + SMS_A_LINE])
        console.print(f"  {first:>4}:{line}")
    shown = facts()
    shown.add_row("L2 hit in the own domain", f"{found['near_cycles']:.0f} cycles")
    shown.add_row("L2 hit in the other domain", f"{found['far_cycles']:.0f} cycles")
    shown.add_row("least certain SM", f"{found['certainty']:.2f} (1: like the others of its domain)")
    shown.add_row("measured by", {"read": "reads", "add": "atomic additions"}[found["method"]])
    print_table(console, shown)
