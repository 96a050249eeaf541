"""Figures, drawn without pyplot's global state. Okabe and Ito's colours are safe for colour-blind readers."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlens.files import write_atomic
from fedlens.lens.mask import Mask

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LIGHT = ("#E69F00", "#56B4E9", "#F0E442", "#CC79A7")  # colours that need black text
MARKERS = "osD^vPX*"  # distinguish lines in black-and-white print
SHOWN_CLIENTS = 100  # more rows than pixels would be invisible
TICK = 0.28  # width of a tick label in inches
NAMED_SHARE = 0.07  # smaller segments of a bar have no room for their number
XI_NUMBERS = 12  # largest size of a map of ξ whose cells show their numbers


def _figure(width: float, height: float, layout: str | ConstrainedLayoutEngine = "constrained") -> Figure:
    figure = Figure(figsize=(width, height), layout=layout)  # type: ignore[arg-type]
    FigureCanvasAgg(figure)
    return figure


def _finish_curves(ax: Axes, x: str, y: str, levels: Mapping[str, float]) -> None:
    """Draw `levels` as horizontal lines; add labels, grid and legend."""
    for i, (name, level) in enumerate(levels.items()):
        ax.axhline(level, color="#666666", linestyle=("--", ":", "-.")[i % 3], linewidth=1.2, label=name)
    ax.set(xlabel=x, ylabel=y)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)


def partition_figure(counts: Mapping[str, NDArray[np.int64]], size: tuple[float, float] | None = None) -> Figure:
    """Draw one heat map per scheme: samples by client (rows) and class (columns). `size`: inches."""
    width, height = size or (3.1 * len(counts) + 0.6, 3.6)
    figure = _figure(width, height)
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
    """Draw lines with points, and horizontal lines for the baselines. `chosen`: series -> x of the point to mark with a ring."""
    figure = _figure(6.2, 3.6)
    ax = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        color, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        ax.plot([p[0] for p in points], [p[1] for p in points], marker=marker, markersize=4, linewidth=1.6, color=color, label=name)
        ring = [p for p in points if p[0] == (chosen or {}).get(name)]
        ax.scatter([p[0] for p in ring], [p[1] for p in ring], s=130, facecolors="none", edgecolors=color, linewidths=1.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish_curves(ax, x, y, baseline or {})
    return figure


def mask_figure(masks: Mapping[str, Mask]) -> Figure:
    """Draw the density of each mask (row) per layer, from input to output, and its composition by kind of weight."""
    figure = _figure(8.8, 2.2 + 0.72 * len(masks), ConstrainedLayoutEngine(h_pad=0.1))
    grid, bars = figure.subplots(2, 1)
    _draw_densities(grid, masks)
    _draw_composition(bars, masks)
    return figure


def _draw_densities(ax: Axes, masks: Mapping[str, Mask]) -> None:
    layers = list(dict.fromkeys(label for mask in masks.values() for label, _, eligible in mask.by_layer() if eligible))
    density = np.zeros((len(masks), len(layers)))  # percent
    for row, mask in enumerate(masks.values()):
        for label, active, eligible in mask.by_layer():
            if eligible:
                density[row, layers.index(label)] = 100 * active / eligible
    ax.imshow(density, aspect="auto", cmap="cividis", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    for (row, column), value in np.ndenumerate(density):
        ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8.5, color="black" if value > 30 else "white")
    ax.set_xticks(range(len(layers)), layers)
    ax.set_yticks(range(len(masks)), list(masks))
    ax.set_title("trainable weights by layer (%)", fontsize=10)


def _draw_composition(ax: Axes, masks: Mapping[str, Mask]) -> None:
    shares = {name: {kind: row["share"] for kind, row in mask.composition().items()} for name, mask in masks.items()}
    kinds = [kind for kind in next(iter(shares.values()), {}) if any(share[kind] for share in shares.values())]
    left = np.zeros(len(masks))
    for i, kind in enumerate(kinds):
        color, width = PALETTE[i % len(PALETTE)], np.array([100 * share[kind] for share in shares.values()])
        ax.barh(range(len(masks)), width, left=left, color=color, edgecolor="white", linewidth=0.8, label=kind)
        for row in np.flatnonzero(width >= 100 * NAMED_SHARE).tolist():
            ink = "black" if color in LIGHT else "white"
            ax.text(left[row] + width[row] / 2, row, f"{width[row]:.0f}", ha="center", va="center", fontsize=8.5, color=ink)
        left += width
    ax.set_yticks(range(len(masks)), list(masks))
    ax.invert_yaxis()
    ax.set(xlim=(0, 100))
    ax.set_title("composition of the mask by kind of weight (%)", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))


def alpha_figure(
    series: Mapping[str, Sequence[tuple[float, float]]], chosen: float, levels: Mapping[str, float], x: str = "α", y: str = "accuracy (%)"
) -> Figure:
    """Draw one curve over α per series, the chosen α as a vertical line and `levels` as horizontal ones."""
    figure = _figure(6.2, 3.6)
    ax = figure.subplots()
    for color, (name, points) in zip(PALETTE, series.items(), strict=False):
        ordered = sorted(points)
        ax.plot([p[0] for p in ordered], [p[1] for p in ordered], marker="o", markersize=3.5, linewidth=1.6, color=color, label=name)
    ax.axvline(chosen, color=PALETTE[3], linewidth=1.4, label=f"chosen on validation: α = {chosen:g}")
    _finish_curves(ax, x, y, levels)
    return figure


def xi_figure(xi: Sequence[Sequence[float]], alphas: Sequence[float], names: Sequence[str]) -> Figure:
    """Draw ξ as a heat map over α of the first vector (up) and of the second (across); dark is disentangled."""
    figure = _figure(5.2, 4.4)
    ax = figure.subplots()
    percent = [[100 * value for value in row] for row in xi]
    image = ax.imshow(percent, origin="lower", cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
    every = -(-len(alphas) // XI_NUMBERS)
    ticks = range(0, len(alphas), every)
    ax.set_xticks(ticks, [f"{alphas[i]:g}" for i in ticks])
    ax.set_yticks(ticks, [f"{alphas[i]:g}" for i in ticks])
    ax.set(xlabel=f"α of {names[1]}", ylabel=f"α of {names[0]}")
    for i, row in enumerate(percent if len(alphas) <= XI_NUMBERS else []):
        for j, value in enumerate(row):
            ax.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=8, color="black" if value > 55 else "white")
    figure.colorbar(image, ax=ax, shrink=0.85, label="disentanglement error ξ (%)")
    return figure


def as_svg(figure: Figure) -> str:
    """Return the figure as an <svg> element for an HTML page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write PATH.svg and PATH.png; return their paths."""
    files = []
    for suffix in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=150, metadata={"Date": None, "Creator": None} if suffix == "svg" else None)
        files.append(path.with_name(f"{path.name}.{suffix}"))
        write_atomic(files[-1], buffer.getvalue())
    return files
