"""Figures, drawn off screen and without pyplot's global state. Colours are Okabe and Ito's: safe for colour-blind readers."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
SHOWN_CLIENTS = 100  # a heat map of more rows than pixels shows nothing


def partition_figure(counts: Mapping[str, NDArray[np.int64]]) -> Figure:
    """One heat map a scheme: clients down, classes across, samples as shade."""
    figure = Figure(figsize=(3.1 * len(counts) + 0.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(counts)))
    for ax, (title, table) in zip(axes, counts.items(), strict=True):
        image = ax.imshow(table[:SHOWN_CLIENTS], aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        ax.set(title=title, xlabel="class", ylabel="client" if ax is axes[0] else "")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=ax, shrink=0.8, label="samples" if ax is axes[-1] else "")
    return figure


def curves_figure(
    series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, baseline: Mapping[str, float] | None = None
) -> Figure:
    """Lines with points, and horizontal lines for what has no x."""
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for color, (name, points) in zip(PALETTE * (1 + len(series) // len(PALETTE)), series.items(), strict=False):
        ax.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=3.5, linewidth=1.6, color=color, label=name)
    for i, (name, level) in enumerate((baseline or {}).items()):
        ax.axhline(level, color="#666666", linestyle=("--", ":", "-.")[i % 3], linewidth=1.2, label=name)
    ax.set(xlabel=x, ylabel=y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return figure


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element, to stand inside a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
