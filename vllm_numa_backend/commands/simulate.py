"""numa-swizzle simulate: the L2 under a mapping, and the seeds' figures beside the model's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import facts, print_table, table

from . import UserError

if TYPE_CHECKING:
    from numa_attention.machine import seed_one

LABEL_STYLES = {"derived": "green", "calibrated": "yellow", "contradicts": "red"}
PREDICTIONS = Path(__file__).resolve().parents[2] / "docs" / "machine-model-predictions.json"

simulate = typer.Typer(help="Ask the machine model: caches, placement, pipelines.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ClosedForm = Annotated[bool, typer.Option("--closed-form", help="The closed form, which needs no numba.")]


@contextmanager
def one_sentence() -> Iterator[None]:
    """What the model refuses ends as one sentence for the user."""
    from numa_attention.machine import ModelError

    try:
        yield
    except ModelError as error:
        raise UserError(str(error)) from None


@simulate.command()
def l2(
    machine: Annotated[str, typer.Option(help="mi300x, mi355x, mi450, h100, h200, b200, or a generation.")],
    mapping: Annotated[
        str, typer.Option(help="block-first, swizzled-block-first, head-first, swizzled-head-first.")
    ],
    q_heads: Annotated[int, typer.Option()],
    kv_heads: Annotated[int, typer.Option()],
    length: Annotated[str, typer.Option(help="Tokens of each request: 32768, 32k.")],
    batch: Annotated[int, typer.Option()] = 1,
    head_dim: Annotated[int, typer.Option()] = 128,
    block_m: Annotated[int, typer.Option(help="Query rows of a workgroup.")] = 128,
    block_n: Annotated[int, typer.Option(help="Tokens of a K/V tile.")] = 64,
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask, longest block first.")] = False,
    domains: Annotated[
        int | None, typer.Option(help="Domains to swizzle over; default: those the hardware deals to.")
    ] = None,
    in_waves: Annotated[
        bool, typer.Option("--in-waves", help="Workgroups start together, when all before them are done.")
    ] = False,
    alternate: Annotated[
        bool, typer.Option("--alternate", help="Every other wave walks its K/V from the end.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random delays.")] = 1,
    closed_form: ClosedForm = False,
    as_json: AsJson = False,
) -> None:
    """The L2 of one forward launch: hit rate, bytes from memory, K/V streams a domain, time."""
    with one_sentence():
        from numa_attention.machine.closed_form import estimate
        from numa_attention.machine.grid import Grid
        from numa_attention.machine.machines import machine as find
        from numa_attention.machine.plan import tokens

        device = find(machine)
        grid = Grid(
            mapping,
            batch,
            q_heads,
            kv_heads,
            tokens(length),
            head_dim,
            block_m,
            block_n,
            causal,
            device.dispatch_domains if domains is None else domains,
            longest_first=causal,
            in_waves=in_waves,
            alternate=alternate,
        )
        if closed_form:
            result: Any = estimate(grid, device)
        else:
            from numa_attention.machine import cache

            with Console(stderr=True).status("simulating"):
                result = cache.simulate(grid, device, seed=seed)
    answer = dataclasses.asdict(result) | {
        "method": "closed form" if closed_form else "simulation",
        "machine": device.name,
        "domains": device.domains,
        "grid": dataclasses.asdict(grid),
        "calibration": device.cache.source,
    }
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    shown = facts()
    shown.add_row(
        "L2 hit rate", f"{result.hit_rate:.2%} of all requests: for K and V, for Q (all misses) and for O"
    )
    share = result.hbm_bytes / result.requested_bytes
    shown.add_row("read from memory", f"{result.hbm_bytes / 1e9:.1f} GB, {share:.1%} of what is asked for")
    shown.add_row("K/V streams a domain", f"{result.streams_per_domain:.1f}")
    shown.add_row("time", f"{result.seconds * 1e3:.2f} ms, {result.tflops:.0f} TFLOP/s")
    for number, domain in enumerate(answer.get("per_domain", [])):
        shown.add_row(
            f"domain {number}",
            f"{domain['hit_rate']:.2%} of the requests for K and V, {domain['hbm_bytes'] / 1e9:.1f} GB of them",
        )
    shown.add_row("machine", f"{device.name}: {escape(device.cache.source)}")
    print_table(Console(highlight=False), shown)


@simulate.command(name="seed-1")
def seed_1(
    simulation: Annotated[
        bool, typer.Option("--simulation", help="The 24 named rows by simulation, a few minutes.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the hit rates (closed form) there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The figures of the NUMA-aware attention article beside ours, MI300X."""
    with one_sentence():
        from numa_attention.machine import seed_one
        from numa_attention.machine.closed_form import estimate

        model: Callable = estimate
        if simulation:
            from numa_attention.machine.cache import simulate as model
        with Console(stderr=True).status("comparing"):
            rows = seed_one.compare(model)
            points = () if simulation and plot is None else seed_one.sweep()
        if plot is not None:
            from numa_attention.machine.plots import plot_sweep

            plot_sweep(points, plot)
    if as_json:
        claims = [
            dataclasses.asdict(row.claim) | {"ours": row.ours, "difference": row.difference, "why": row.why}
            for row in rows
        ]
        typer.echo(
            json.dumps({"rows": claims, "sweep": [dataclasses.asdict(each) for each in points]}, indent=2)
        )
        return
    console = Console(highlight=False)
    for title, quantity in (("L2 hit rate", "hit_rate"), ("Relative performance", "relative")):
        if points:
            print_sweep(console, title, quantity, points)
    print_claims(console, rows)


def print_sweep(console: Console, title: str, quantity: str, points: tuple[seed_one.Sweep, ...]) -> None:
    from numa_attention.machine.grid import MAPPINGS

    shown = table("shape", "batch", "tokens", *MAPPINGS, title=f"{title} (closed form; figures 12 to 15)")
    for point in points:
        if point.batch in (1, 8):
            shape = f"{point.kind} {point.q_heads}/{point.kv_heads} x {point.head_dim}"
            values = getattr(point, quantity)
            style = "{:.1%}" if quantity == "hit_rate" else "{:.2f}"
            cells = [style.format(values[mapping]) for mapping in MAPPINGS]
            shown.add_row(shape, str(point.batch), f"{point.length >> 10}k", *cells)
    print_table(console, shown)
    console.print()


def print_claims(console: Console, rows: list[seed_one.Row]) -> None:
    shown = table(
        "figure, shape",
        "quantity",
        "article",
        "ours",
        "difference",
        title="The article's figures",
        text=("quantity",),
    )
    for row in rows:
        claim = row.claim
        shape = f"{claim.figure}: {claim.mapping} {claim.batch} x {claim.q_heads}/{claim.kv_heads} x {claim.head_dim}"
        shape += f", {claim.length >> 10}k" + (", backward" if claim.backward else "")
        hits = claim.quantity == "L2 hit rate"
        style = "{:.1%}" if hits else "{:.2f}"
        wanted = f"{style.format(claim.low)} - {style.format(claim.high)}"
        difference = f"{row.difference * 100:+.1f} points" if hits else f"{row.difference:+.2f}"
        mark = "[green]inside[/]" if row.difference == 0 else difference
        shown.add_row(shape, "hits" if hits else "relative", wanted, style.format(row.ours), mark)
    print_table(console, shown)
    for reason in dict.fromkeys(row.why for row in rows if row.why):
        named = ", ".join(f"{row.claim.figure} {row.claim.mapping}" for row in rows if row.why == reason)
        console.print(f"[yellow]{named}:[/] {escape(reason)}", soft_wrap=True)


@simulate.command(name="seed-2")
def seed_2(as_json: AsJson = False) -> None:
    """The figures of the fused GQA report beside ours: derived, calibrated, or contradicting one another."""
    with one_sentence():
        from numa_attention.machine import seed_two

        rows = seed_two.rows()
    if as_json:
        listed = [dataclasses.asdict(row) | {"difference": row.difference} for row in rows]
        typer.echo(json.dumps({"rows": listed}, indent=2))
        return
    shown = table(
        "figure", "report", "ours", "unit", "difference", "label", "why", text=("unit", "label", "why")
    )
    part = None
    for row in rows:
        if row.part != part:
            shown.add_row(f"[bold]{row.part}[/]")
            part = row.part
        difference = "" if row.difference is None else f"{row.difference:+.1%}"
        label = f"[{LABEL_STYLES[row.label]}]{row.label}[/]"
        shown.add_row(
            f"  {row.name}", plain(row.reported), plain(row.ours), row.unit, difference, label, row.reason
        )
    print_table(Console(highlight=False), shown)


def plain(value: float | str | None) -> str:
    """A number with as many digits as it deserves."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


@simulate.command()
def predictions(
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the JSON and a table there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The twelve H200 launches that the frozen model predicts, and the four it was calibrated on."""
    with one_sentence():
        from numa_attention.machine import predictions as predicted

        with Console(stderr=True).status("simulating 16 launches, three times each"):
            answer = predicted.predict()
    if write is not None:
        predicted.write(answer, write)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    shown = table("launch", "hits", "spread", "closed form", "GB read", "share", "TFLOP/s", "measured hits")
    for row in (*answer["calibration"], *answer["predictions"]):
        measured = row["measured_hit_rate"]
        shown.add_row(
            row["name"],
            f"{row['hit_rate']:.2%}",
            f"{row['hit_rate_spread']:.2%}",
            f"{row['closed_form_hit_rate']:.2%}",
            f"{row['hbm_bytes'] / 1e9:.1f}",
            f"{row['hbm_bytes'] / row['requested_bytes']:.1%}",
            f"{row['tflops']:.0f}",
            "" if measured is None else f"{measured:.2%}",
        )
    print_table(Console(highlight=False), shown)


@simulate.command()
def compare(
    measured: Annotated[Path, typer.Argument(help="JSON that benchmarks/measure_l2.py wrote.")],
    predicted: Annotated[Path, typer.Option(help="The committed predictions.")] = PREDICTIONS,
    rate: Annotated[
        str, typer.Option(help="Which measured rate: hit_rate (of the SMs) or hit_rate_all.")
    ] = "hit_rate",
    as_json: AsJson = False,
) -> None:
    """The committed predictions against a measurement. Exits with 1 where they miss their marks."""
    with one_sentence():
        from numa_attention.machine.h200_points import judge

        rows = read_json(predicted)["predictions"]
        found = measured_points(measured, rate)
        verdict = judge(rows, found)
    if not verdict.points:
        raise UserError(f"{measured} holds none of the points that {predicted} predicts.")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(verdict) | {"passed": verdict.passed}, indent=2))
    else:
        shown = table(
            "launch", "measured", "simulated", "error", "closed form", "error", "GB measured", "simulated",
            "closed form",
        )  # fmt: skip
        for row in rows:
            if row["name"] in found:
                real = found[row["name"]]
                shown.add_row(
                    row["name"],
                    f"{real['hit_rate']:.2%}",
                    f"{row['hit_rate']:.2%}",
                    f"{(row['hit_rate'] - real['hit_rate']) * 100:+.1f}",
                    f"{row['closed_form_hit_rate']:.2%}",
                    f"{(row['closed_form_hit_rate'] - real['hit_rate']) * 100:+.1f}",
                    f"{real['hbm_bytes'] / 1e9:.1f}",
                    f"{row['hbm_bytes'] / 1e9:.1f}",
                    f"{row['closed_form_hbm_bytes'] / 1e9:.1f}",
                )
        console = Console(highlight=False)
        print_table(console, shown)
        for method, errors in (("simulation", verdict.simulation), ("closed form", verdict.closed_form)):
            console.print(
                f"{method}, {verdict.points} points: hit rate RMS {errors.hit_rms * 100:.1f} points, worst "
                f"{errors.hit_worst * 100:.1f}, at the ends {errors.hit_worst_at_the_ends * 100:.1f}; share of bytes "
                f"worst {errors.bytes_worst * 100:.1f}",
                soft_wrap=True,
            )
        for line in verdict.missed:
            console.print(f"[yellow]a mark is missed:[/] {line}", soft_wrap=True)
        if verdict.passed:
            console.print("[green]all marks reached[/]")
    if not verdict.passed:
        raise typer.Exit(1)


def measured_points(path: Path, rate: str) -> dict[str, dict[str, float]]:
    """name -> {"hit_rate", "hbm_bytes"} in the file that the benchmark wrote."""
    try:
        return {
            row["name"]: {"hit_rate": row[rate], "hbm_bytes": row["hbm_bytes"]}
            for row in read_json(path)["points"]
        }
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lacks {error}: give what benchmarks/measure_l2.py wrote.") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from None
