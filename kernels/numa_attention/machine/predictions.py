"""Predictions for launches on one H200, to be compared with a measurement made after the model was frozen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from .cache import simulate
from .closed_form import estimate
from .h200_points import CALIBRATION, PREDICTED, SEEDS, Point
from .machines import H200

NAME = "machine-model-predictions"


def predict_point(point: Point) -> dict:
    """One launch: means over the random seeds, and the spread between them."""
    runs = [simulate(point.grid, H200, seed=seed) for seed in SEEDS]
    closed = estimate(point.grid, H200)

    def mean(name: str) -> float:
        return sum(getattr(run, name) for run in runs) / len(runs)

    rates = [run.hit_rate for run in runs]
    return {
        "name": point.name,
        "grid": dataclasses.asdict(point.grid),
        "hit_rate": mean("hit_rate"),
        "hit_rate_spread": max(rates) - min(rates),
        "hbm_bytes": mean("hbm_bytes"),
        "requested_bytes": mean("requested_bytes"),
        "seconds": mean("seconds"),
        "tflops": mean("tflops"),
        "streams_per_domain": mean("streams_per_domain"),
        "closed_form_hit_rate": closed.hit_rate,
        "closed_form_hbm_bytes": closed.hbm_bytes,
        "measured_hit_rate": point.hit_rate,
        "measured_hbm_bytes": point.hbm_bytes,
    }


def predict() -> dict:
    """All launches, with the parameters they were predicted with."""
    return {
        "machine": H200.name,
        "parameters": dataclasses.asdict(H200.cache),
        "seeds": list(SEEDS),
        "calibration": [predict_point(point) for point in CALIBRATION],
        "predictions": [predict_point(point) for point in PREDICTED],
    }


def write(answer: dict, folder: Path) -> None:
    """Writes the JSON and a table of it."""
    (folder / f"{NAME}.json").write_text(json.dumps(answer, indent=2) + "\n")
    (folder / f"{NAME}.md").write_text(as_markdown(answer))


def as_markdown(answer: dict) -> str:
    lines = [
        "# Predictions for one H200",
        "",
        "Written by `numa-swizzle simulate predictions --write docs` with the parameters in the JSON file beside this",
        "one. `benchmarks/measure_l2.py` measures the same launches, `numa-swizzle simulate compare` compares them;",
        "[machine-model.md](machine-model.md) says what came of it.",
        "A plain Triton forward kernel, bf16, query blocks of 128 rows, K/V tiles of 64 tokens; causal launches start",
        "their longest blocks first. Means over three random seeds; *spread* is the largest difference between them.",
        "*share*: bytes read from memory, of all bytes that workgroups ask the L2 for.",
        "",
        "## Predicted, not measured when this was written",
        "",
        *markdown_table(answer["predictions"]),
        "",
        "## Calibrated",
        "",
        *markdown_table(answer["calibration"]),
        "",
    ]
    return "\n".join(lines)


def markdown_table(rows: list[dict]) -> list[str]:
    lines = [
        "| launch | hits | spread | GB read | share | closed form hits | closed form GB | TFLOP/s | measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = ""
        if row["measured_hit_rate"] is not None:
            measured = f"{row['measured_hit_rate']:.2%}, {row['measured_hbm_bytes'] / 1e9:.1f} GB"
        lines.append(
            f"| {row['name']} | {row['hit_rate']:.2%} | {row['hit_rate_spread']:.2%} | {row['hbm_bytes'] / 1e9:.1f} | "
            f"{row['hbm_bytes'] / row['requested_bytes']:.1%} | {row['closed_form_hit_rate']:.2%} | "
            f"{row['closed_form_hbm_bytes'] / 1e9:.1f} | {row['tflops']:.0f} | {measured} |"
        )
    return lines
