"""Figures of task arithmetic: accuracy along α, and the disentanglement map ξ(α₁, α₂)."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedlens.runs.store import write_atomic
from fedlens.study.figures import PALETTE

MARKED = 12  # cells a side up to which each shows its number


def alpha_figure(
    series: Mapping[str, Sequence[tuple[float, float]]], chosen: float, levels: Mapping[str, float], x: str = "α", y: str = "accuracy (%)"
) -> Figure:
    """A curve a series over α, the chosen α as a vertical line, what it is compared with as horizontal ones."""
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for color, (name, points) in zip(PALETTE, series.items(), strict=False):
        ordered = sorted(points)
        ax.plot([p[0] for p in ordered], [p[1] for p in ordered], marker="o", markersize=3.5, linewidth=1.6, color=color, label=name)
    ax.axvline(chosen, color=PALETTE[3], linewidth=1.4, label=f"chosen on validation: α = {chosen:g}")
    for i, (name, level) in enumerate(levels.items()):
        ax.axhline(level, color="#666666", linestyle=("--", ":", "-.")[i % 3], linewidth=1.2, label=name)
    ax.set(xlabel=x, ylabel=y)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return figure


def xi_figure(xi: Sequence[Sequence[float]], alphas: Sequence[float], names: Sequence[str]) -> Figure:
    """ξ as a heat map: α of the first vector up, of the second across; dark is disentangled."""
    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    percent = [[100 * value for value in row] for row in xi]
    image = ax.imshow(percent, origin="lower", cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
    every = -(-len(alphas) // MARKED)
    ticks = range(0, len(alphas), every)
    ax.set_xticks(ticks, [f"{alphas[i]:g}" for i in ticks])
    ax.set_yticks(ticks, [f"{alphas[i]:g}" for i in ticks])
    ax.set(xlabel=f"α of {names[1]}", ylabel=f"α of {names[0]}")
    for i, row in enumerate(percent if len(alphas) <= MARKED else []):
        for j, value in enumerate(row):
            ax.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=8, color="black" if value > 55 else "white")
    figure.colorbar(image, ax=ax, shrink=0.85, label="disentanglement error ξ (%)")
    return figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """PATH.svg and PATH.png."""
    done = []
    for suffix in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=150, metadata={"Date": None, "Creator": None} if suffix == "svg" else None)
        done.append(path.with_name(f"{path.name}.{suffix}"))
        write_atomic(done[-1], buffer.getvalue())
    return done
