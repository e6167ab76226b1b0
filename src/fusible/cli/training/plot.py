"""The picture of a comparison: ``loss.png``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw_losses", "smooth"]

_STYLES = {
    "bf16": ("#1f2933", "-"),
    "fp32": ("#7b8794", "-"),
    "delayed": ("#d9480f", "--"),
    "current": ("#1971c2", ":"),
    "mxfp8": ("#2b8a3e", "-."),
    "block": ("#862e9c", (0, (3, 1, 1, 1, 1, 1))),
    "nvfp4": ("#c2255c", (0, (5, 1))),
}


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """The mean over ``width`` (odd) neighbours of each value, over fewer at the ends: ``[n] -> [n]``."""
    kernel = np.ones(min(width, 2 * len(values) - 1))
    total = np.convolve(values, kernel, "full")
    count = np.convolve(np.ones(len(values)), kernel, "full")
    start = len(kernel) // 2
    return (total / count)[start : start + len(values)]


def draw_losses(runs: Sequence[Mapping[str, Any]], unigram_loss: float) -> bytes:
    """The losses of all runs in one plot, as PNG; with several runs also their smoothed distance from the first one."""
    several = len(runs) > 1
    figure = Figure(figsize=(9, 6.4 if several else 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if several else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if several else None)[:, 0]
    width = _width(runs)
    _draw(axes[0], runs, unigram_loss, width)
    if several:
        _draw_distances(axes[1], runs, width)
    axes[-1].set_xlabel(f"step (thick: mean of {width} steps)")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _width(runs: Sequence[Mapping[str, Any]]) -> int:
    return max(len(run["loss"]) for run in runs) // 30 * 2 + 1


def _draw(axes: Axes, runs: Sequence[Mapping[str, Any]], unigram_loss: float, width: int) -> None:
    for run in runs:
        color, line = _STYLES[run["recipe"]]
        steps = np.arange(1, len(run["loss"]) + 1)
        axes.plot(steps, run["loss"], color=color, alpha=0.15, linewidth=0.8)
        label = f"{run['recipe']}: held-out {run['held_out_loss']:.4f}"
        axes.plot(steps, smooth(run["loss"], width), color=color, linestyle=line, linewidth=1.8, label=label)
    axes.axhline(unigram_loss, color="#868e96", linewidth=1, linestyle=(0, (6, 4)), label=f"unigram bytes: held-out {unigram_loss:.4f}")
    last = [loss for run in runs for loss in run["loss"][len(run["loss"]) // 10 :]]
    axes.set_ylim(min(last) - 0.1, max(max(last), unigram_loss) + 0.3)
    axes.set_ylabel("training loss, nats per byte")
    axes.set_title("Byte-level GPT trained with Fusible", loc="left")
    axes.grid(alpha=0.25)
    axes.legend(framealpha=0.9, edgecolor="none")


def _draw_distances(axes: Axes, runs: Sequence[Mapping[str, Any]], width: int) -> None:
    first = smooth(runs[0]["loss"], width)
    for run in runs:
        color, line = _STYLES[run["recipe"]]
        common = min(len(first), len(run["loss"]))
        percent = 100 * (smooth(run["loss"], width)[:common] / first[:common] - 1)
        axes.plot(np.arange(1, common + 1), percent, color=color, linestyle=line, linewidth=1.5)
    bound = max(1.5, 1.1 * max(abs(limit) for limit in axes.get_ylim()))
    axes.set_ylim(-min(bound, 10), min(bound, 10))
    axes.axhspan(-1, 1, color="#868e96", alpha=0.12, linewidth=0)
    axes.set_ylabel(f"% off {runs[0]['recipe']}\n(band: 1 %)")
    axes.grid(alpha=0.25)
