"""A report as files: report.json for programs, report.md and plots for people."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from vllm_numa_backend.bench.report import OURS, Report, Timing


def as_dict(report: Report) -> dict:
    """Plain data; what did not run has no number."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(dataclasses.asdict(report))


def write_report(report: Report, folder: Path, *, plots: bool = True) -> None:
    """report.json and report.md, and a plot of each table where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(report, folder) if plots else []
    for name, text in (
        ("report.json", json.dumps(as_dict(report), indent=2) + "\n"),
        ("report.md", as_markdown(report, drawn)),
    ):
        part = folder / f"{name}.part"
        part.write_text(text)
        part.replace(folder / name)


def tables(report: Report) -> dict[str, dict[str, list[Timing]]]:
    """Table -> case -> timings, in the order in which they were made."""
    found: dict[str, dict[str, list[Timing]]] = {}
    for timing in report.timings:
        found.setdefault(timing.table, {}).setdefault(timing.case, []).append(timing)
    return found


def as_markdown(report: Report, drawn: list[str]) -> str:
    device = report.device
    lines = [
        f"# NUMA_SWIZZLE on {device['name']}",
        "",
        f"{device['generation']}, {device['compute_units']} compute units, {device['domains']} NUMA domains.",
        "",
        *(f"**{note}**\n" for note in report.notes),
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in report.environment.items()),
        "",
        *dealt_lines(report),
        "## Right?",
        "",
        f"{sum(check.passed for check in report.checks)} of {len(report.checks)} steps agree with the specification in "
        "float64. Error: ||out - reference|| / ||reference||.",
        "",
        "| step | kernels | error | mark | |",
        "|---|---|---|---|---|",
        *(
            f"| {check.name} | {check.variants} | {check.error:.1e} | {check.mark:.0e} | "
            f"{'' if check.passed else cell('WRONG ' + check.complaint)} |"
            for check in report.checks
        ),
        "",
    ]
    for table, cases in tables(report).items():
        lines += table_lines(report, table, cases)
    lines += [f"![{name}]({name})" for name in drawn]
    return "\n".join(lines).rstrip("\n") + "\n"


def cell(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ").strip()


def dealt_lines(report: Report) -> list[str]:
    """How the device dealt the workgroups of a launch to its XCDs, where it says so."""
    if not report.dealt.get("measured"):
        return []
    counts = ", ".join(f"{xcc}: {count}" for xcc, count in report.dealt["workgroups_of_xcc"].items())
    return [
        f"Workgroups of each XCD: {counts}. {report.dealt['dealt_in_turn']:.1%} of the workgroups w ran on XCD w mod "
        f"{report.device['domains']}, as placement by dispatch trusts; the first on "
        f"{', '.join(map(str, report.dealt['first_xccs']))}.",
        "",
    ]


def table_lines(report: Report, table: str, cases: dict[str, list[Timing]]) -> list[str]:
    """One table. Times are relative to the first row of each case that ran, which is ours where ours runs."""
    of_mappings = table == "mappings"
    lines = [f"## {table[0].upper()}{table[1:]}", "", "Case: batch, length, query heads/KV heads, page."]
    lines += ["Hits are computed by the machine model, not measured.", ""] if of_mappings else [""]
    columns = ["case", "mapping" if of_mappings else "contestant", "kernel", "us", "rate", "time relative"]
    columns += ["hits, computed"] if of_mappings else []
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, timings in cases.items():
        base = next((each.seconds for each in timings if not math.isnan(each.seconds)), math.nan)
        for timing in timings:
            if math.isnan(timing.seconds):
                cells = [case, timing.contestant, timing.variant, "", "", cell(f"did not run: {timing.note}")]
            else:
                cells = [
                    case, timing.contestant, timing.variant, f"{timing.seconds * 1e6:.1f}",
                    f"{timing.rate:.3g} {timing.unit}", f"{timing.seconds / base:.2f}",
                ]  # fmt: skip
            if of_mappings:
                hits = report.predicted.get(case, {}).get(timing.contestant)
                cells.append("" if hits is None else f"{hits:.1%}")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def draw(report: Report, folder: Path) -> list[str]:
    """One bar chart a table, of rates; the names of the files, none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        report.notes.append("No plots: matplotlib is not installed (pip install matplotlib).")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    for table, cases in tables(report).items():
        contestants = list(dict.fromkeys(each.contestant for timings in cases.values() for each in timings))
        figure, axes = pyplot.subplots(figsize=(2 + 1.4 * len(cases), 4))
        width = 0.8 / len(contestants)
        for number, contestant in enumerate(contestants):
            rates = [
                next((each.rate for each in timings if each.contestant == contestant), math.nan)
                for timings in cases.values()
            ]
            places = [place + number * width for place in range(len(cases))]
            hatch = "//" if contestant == OURS else None
            axes.bar(places, rates, width, label=contestant, hatch=hatch)
        middle = (len(contestants) - 1) * width / 2
        axes.set_xticks([place + middle for place in range(len(cases))], list(cases), rotation=30, ha="right")
        unit = next((each.unit for timings in cases.values() for each in timings if each.unit), "")
        axes.set_ylabel(unit)
        mark = " (tiny shapes on a CPU: times mean nothing)" if report.tiny else ""
        axes.set_title(f"{table}, {report.device['name']}{mark}", fontsize=9)
        axes.legend(fontsize=7)
        names.append(table.replace(", ", "-").replace(" ", "-") + ".png")
        figure.savefig(folder / names[-1], bbox_inches="tight", dpi=110)
        pyplot.close(figure)
    return names
