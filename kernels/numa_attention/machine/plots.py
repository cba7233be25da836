"""Figures of the machine model (needs the extra `model`: matplotlib)."""

from __future__ import annotations

from pathlib import Path

from . import ModelError
from .grid import MAPPINGS
from .seed_one import Sweep


def plot_sweep(points: tuple[Sweep, ...], path: Path) -> None:
    """Hit rate over length at batch 1, one panel per number of heads, one line per mapping.

    Raises ModelError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModelError("figures need matplotlib: pip install 'vllm-numa-backend[model]'.") from error
    chosen = [point for point in points if point.kind == "MHA" and point.batch == 1]
    heads = sorted({point.q_heads for point in chosen})
    figure = Figure(figsize=(3 * len(heads), 3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
    for panel, count in zip(panels, heads, strict=True):
        row = [point for point in chosen if point.q_heads == count]
        for mapping in MAPPINGS:
            style = "--" if mapping.startswith("swizzled") else "-"
            rates = [100 * point.hit_rate[mapping] for point in row]
            panel.plot([point.length for point in row], rates, style, label=mapping)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{count} heads")
        panel.set_xlabel("tokens")
    panels[0].set_ylabel("L2 hit rate, %")
    panels[-1].legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"the figure cannot be written to {path}: {error}.") from None
