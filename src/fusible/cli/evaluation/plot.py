"""The picture of what formats cost: ``quality.png``."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fusible.models.evaluation import Quality

__all__ = ["draw_qualities"]

_MARKERS = "os^Dv*P"


def draw_qualities(found: Mapping[str, Quality]) -> bytes:
    """Of each format its bytes and its divergence from the model as it is, as PNG; that of the model itself is 0, and has no place on the scale."""
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, quality), marker in zip(found.items(), itertools.cycle(_MARKERS)):
        if quality.divergence > 0:
            axes.scatter([quality.nbytes / 1e6], [quality.divergence], marker=marker, s=64, alpha=0.8, zorder=2, label=name)
            axes.set_yscale("log")
        else:
            axes.axvline(quality.nbytes / 1e6, color="#868e96", linewidth=1, linestyle=(0, (6, 4)), label=f"{name}: as it is")
    axes.set_xlabel("bytes of the parameters, MB")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title("What a number format costs", loc="left")
    axes.grid(alpha=0.25)
    axes.margins(0.15)
    axes.legend(framealpha=0.9, edgecolor="none")  # names beside the points would lie on one another: formats of 8 bits are near
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
