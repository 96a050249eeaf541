"""Figures, drawn off screen and without pyplot's global state. Colours are Okabe and Ito's: safe for colour-blind readers."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlens.lens.mask import Mask

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LIGHT = ("#E69F00", "#56B4E9", "#F0E442", "#CC79A7")  # those of them that want black letters
MARKERS = "osD^vPX*"  # lines that cross are told apart in print too
SHOWN_CLIENTS = 100  # a heat map of more rows than pixels shows nothing
TICK = 0.28  # inches of a panel that a number below it takes
NAMED_SHARE = 0.07  # of a bar: smaller segments have no room for their number


def partition_figure(counts: Mapping[str, NDArray[np.int64]], size: tuple[float, float] | None = None) -> Figure:
    """One heat map a scheme: clients down, classes across, samples as shade. `size`: inches."""
    width, height = size or (3.1 * len(counts) + 0.6, 3.6)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(counts)))
    for ax, (title, table) in zip(axes, counts.items(), strict=True):
        image = ax.imshow(table[:SHOWN_CLIENTS], aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        ax.set(title=title, xlabel="class", ylabel="client" if ax is axes[0] else "")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=min(10, int(width / len(counts) / TICK)), steps=[1, 2, 5, 10], integer=True))
        figure.colorbar(image, ax=ax, shrink=0.8, label="samples" if ax is axes[-1] else "")
    return figure


def curves_figure(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    baseline: Mapping[str, float] | None = None,
    chosen: Mapping[str, float] | None = None,
) -> Figure:
    """Lines with points, and horizontal lines for what has no x. `chosen`: series -> the x of the point to put a ring round."""
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        color, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        ax.plot([p[0] for p in points], [p[1] for p in points], marker=marker, markersize=4, linewidth=1.6, color=color, label=name)
        ring = [p for p in points if p[0] == (chosen or {}).get(name)]
        ax.scatter([p[0] for p in ring], [p[1] for p in ring], s=130, facecolors="none", edgecolors=color, linewidths=1.8)
    for i, (name, level) in enumerate((baseline or {}).items()):
        ax.axhline(level, color="#666666", linestyle=("--", ":", "-.")[i % 3], linewidth=1.2, label=name)
    ax.set(xlabel=x, ylabel=y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return figure


def mask_figure(masks: Mapping[str, Mask]) -> Figure:
    """Where masks lie, a row a mask: the density of each layer from input to output, and of what kind the weights are that move."""
    figure = Figure(figsize=(8.8, 2.2 + 0.72 * len(masks)), layout=ConstrainedLayoutEngine(h_pad=0.1))
    FigureCanvasAgg(figure)
    grid, bars = figure.subplots(2, 1)
    layers = list(dict.fromkeys(label for mask in masks.values() for label, _, eligible in mask.by_layer() if eligible))
    density = np.zeros((len(masks), len(layers)))  # percent
    for row, mask in enumerate(masks.values()):
        for label, active, eligible in mask.by_layer():
            if eligible:
                density[row, layers.index(label)] = 100 * active / eligible
    grid.imshow(density, aspect="auto", cmap="cividis", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    for (row, column), value in np.ndenumerate(density):
        ink = "black" if value > 30 else "white"
        grid.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8.5, color=ink)
    grid.set_xticks(range(len(layers)), layers)
    grid.set_yticks(range(len(masks)), list(masks))
    grid.set_title("share of each layer's weights that moves (%)", fontsize=10)

    shares = {name: {kind: row["share"] for kind, row in mask.composition().items()} for name, mask in masks.items()}
    kinds = [kind for kind in next(iter(shares.values()), {}) if any(share[kind] for share in shares.values())]
    left = np.zeros(len(masks))
    for i, kind in enumerate(kinds):
        color, width = PALETTE[i % len(PALETTE)], np.array([100 * share[kind] for share in shares.values()])
        bars.barh(range(len(masks)), width, left=left, color=color, edgecolor="white", linewidth=0.8, label=kind)
        for row in np.flatnonzero(width >= 100 * NAMED_SHARE).tolist():
            ink = "black" if color in LIGHT else "white"
            bars.text(left[row] + width[row] / 2, row, f"{width[row]:.0f}", ha="center", va="center", fontsize=8.5, color=ink)
        left += width
    bars.set_yticks(range(len(masks)), list(masks))
    bars.invert_yaxis()
    bars.set(xlim=(0, 100))
    bars.set_title("what the mask is made of, by kind of weight (%)", fontsize=10)
    bars.spines[["top", "right"]].set_visible(False)
    bars.legend(frameon=False, fontsize=9, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element, to stand inside a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
