"""Launches on one H200: those that the cache model was calibrated on, those that it predicts, and one that drifts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from .grid import MAPPINGS, Grid

BLOCK, SWIZZLED_BLOCK, HEAD, SWIZZLED_HEAD = MAPPINGS
SEEDS = (1, 2, 3)  # a prediction is the mean over these


@dataclass(frozen=True)
class Point:
    """A named launch; hit_rate and hbm_bytes where it has been measured."""

    name: str
    grid: Grid
    hit_rate: float | None = None
    hbm_bytes: float | None = None


CALIBRATION = (
    Point("block-first-h128-32k", Grid(BLOCK, 1, 128, 128, 32768, 128), 0.0021, 551e9),
    Point("head-first-h128-32k", Grid(HEAD, 1, 128, 128, 32768, 128), 0.9905, 3.7e9),
    Point("swizzled-over-8-h128-32k", Grid(SWIZZLED_HEAD, 1, 128, 128, 32768, 128, domains=8), 0.6465, 114e9),
    Point("head-first-h128-128k", Grid(HEAD, 1, 128, 128, 131072, 128), 0.6868, 1980e9),
)
PREDICTED = (
    Point("block-first-h16-32k", Grid(BLOCK, 1, 16, 16, 32768, 128)),
    Point("block-first-h32-16k", Grid(BLOCK, 1, 32, 32, 16384, 128)),
    Point("block-first-h64-8k-b2", Grid(BLOCK, 2, 64, 64, 8192, 128)),
    Point("block-first-h64kv8-64k", Grid(BLOCK, 1, 64, 8, 65536, 128)),
    Point("head-first-h64-64k", Grid(HEAD, 1, 64, 64, 65536, 128)),
    Point("head-first-h32-128k", Grid(HEAD, 1, 32, 32, 131072, 128)),
    Point("swizzled-over-2-h128-32k", Grid(SWIZZLED_HEAD, 1, 128, 128, 32768, 128, domains=2)),
    Point("swizzled-over-8-h64kv8-32k", Grid(SWIZZLED_HEAD, 1, 64, 8, 32768, 128, domains=8)),
    Point("swizzled-over-4-h32-16k-b4", Grid(SWIZZLED_HEAD, 4, 32, 32, 16384, 128, domains=4)),
    Point("swizzled-block-over-8-h64-16k-b2", Grid(SWIZZLED_BLOCK, 2, 64, 64, 16384, 64, domains=8)),
    Point("block-first-h48-32k-causal", Grid(BLOCK, 1, 48, 48, 32768, 128, causal=True, longest_first=True)),
    Point("head-first-h128-32k-causal", Grid(HEAD, 1, 128, 128, 32768, 128, causal=True, longest_first=True)),
)
DRIFTING = CALIBRATION[3]
# what keeps the workgroups of a head together
TOGETHER = (
    DRIFTING,
    Point("head-first-h128-128k-alternate", replace(DRIFTING.grid, alternate=True)),
    Point("head-first-h128-128k-in-waves", replace(DRIFTING.grid, in_waves=True)),
    Point("head-first-h128-128k-in-waves-alternate", replace(DRIFTING.grid, in_waves=True, alternate=True)),
)
POINTS = {point.name: point for point in (*CALIBRATION, *PREDICTED, *TOGETHER)}

# pass marks, as fractions
RMS, WORST, AT_THE_ENDS, BYTES, CLOSED_FORM_RMS = 0.06, 0.12, 0.03, 0.12, 0.07
HIGH, LOW = 0.95, 0.02  # hit rates above and below which AT_THE_ENDS holds


@dataclass(frozen=True)
class Errors:
    """Of one method against a measurement: root mean square and worst error of hit rates, worst of byte shares."""

    hit_rms: float
    hit_worst: float
    hit_worst_at_the_ends: float
    bytes_worst: float


@dataclass(frozen=True)
class Verdict:
    """Both methods against `points` measured points. missed: the pass marks that were not reached, in words."""

    points: int
    simulation: Errors
    closed_form: Errors
    missed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.points > 0 and not self.missed


def errors_of(rows: list[tuple[dict, dict]], prefix: str = "") -> Errors:
    """Of (prediction, measurement) pairs; prefix: of the prediction's keys, "closed_form_" for the closed form."""
    hits = [row[prefix + "hit_rate"] - found["hit_rate"] for row, found in rows]
    shares = [
        (row[prefix + "hbm_bytes"] - found["hbm_bytes"]) / row["requested_bytes"] for row, found in rows
    ]
    ends = [
        abs(error)
        for error, (_, found) in zip(hits, rows, strict=True)
        if found["hit_rate"] > HIGH or found["hit_rate"] < LOW
    ]
    return Errors(
        sqrt(sum(error**2 for error in hits) / len(hits)),
        max(map(abs, hits)),
        max(ends, default=0.0),
        max(map(abs, shares)),
    )


def judge(predictions: list[dict], measured: dict[str, dict]) -> Verdict:
    """`predictions`: rows of the predictions file. `measured`: name -> {"hit_rate", "hbm_bytes"}."""
    rows = [(row, measured[row["name"]]) for row in predictions if row["name"] in measured]
    if not rows:
        return Verdict(0, Errors(0.0, 0.0, 0.0, 0.0), Errors(0.0, 0.0, 0.0, 0.0), ())
    simulation, closed_form = errors_of(rows), errors_of(rows, "closed_form_")
    marks = (
        ("hit rate RMS", simulation.hit_rms, RMS),
        ("worst hit rate", simulation.hit_worst, WORST),
        ("worst hit rate at the ends", simulation.hit_worst_at_the_ends, AT_THE_ENDS),
        ("worst share of bytes", simulation.bytes_worst, BYTES),
        ("closed form's hit rate RMS", closed_form.hit_rms, CLOSED_FORM_RMS),
    )
    missed = tuple(
        f"{name} {value * 100:.1f} points, the mark is {mark * 100:.0f}"
        for name, value, mark in marks
        if value > mark
    )
    return Verdict(len(rows), simulation, closed_form, missed)
