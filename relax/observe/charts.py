"""Charts of the report as inline SVG. The home of matplotlib; it computes nothing but the drawing.

Colours are names of CSS variables, so that one drawing serves the light and the dark page: each name stands in for
one colour that occurs nowhere else, and is put in its place once the SVG is text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_SERIES_COLOURS = 6
_STAND_INS = {
    "#010203": "var(--ink)",
    "#010204": "var(--muted)",
    "#010205": "var(--grid)",
    "#010206": "var(--on-series)",
} | {f"#0101{index:02x}": f"var(--series-{index})" for index in range(1, NUM_SERIES_COLOURS + 1)}
_COLOURS = {variable: colour for colour, variable in _STAND_INS.items()}
INK, MUTED, GRID, ON_SERIES = (_COLOURS[f"var(--{name})"] for name in ("ink", "muted", "grid", "on-series"))
SERIES = tuple(_COLOURS[f"var(--series-{index})"] for index in range(1, NUM_SERIES_COLOURS + 1))
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "axes.axisbelow": True,
}


class ChartMaker:
    """Draws the charts of one page; the ids inside each SVG are the chart's own."""

    def __init__(self) -> None:
        self._num_charts = 0

    def reward_curve(
        self, title: str, train: tuple[np.ndarray, np.ndarray], held_out: tuple[np.ndarray, np.ndarray]
    ) -> Markup:
        """Draw mean reward over policy versions: train as points with their moving mean, held-out as a line.

        Shapes: each pair is (policy versions [N], mean rewards [N]).
        """
        with _figure(3.5, 2.4) as (figure, axes):
            versions, rewards = train
            if len(versions):
                axes.plot(
                    versions, rewards, ".", color=SERIES[0], alpha=0.4, markersize=3.5, markeredgewidth=0
                )
                axes.plot(
                    versions, moving_mean(rewards), color=SERIES[0], linewidth=1.6, label="train, moving mean"
                )
            versions, rewards = held_out
            if len(versions):
                axes.plot(
                    versions, rewards, "o-", color=SERIES[1], linewidth=1.4, markersize=4, label="held-out"
                )
            values = np.concatenate([train[1], held_out[1], [0.0, 1.0]])
            low, high = float(values.min()), float(values.max())
            axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
            axes.set_xlabel("policy version")
            axes.set_ylabel("mean reward")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, loc="lower right", fontsize=8)
            return self._svg(figure, title)

    def bars(
        self, title: str, counts: Mapping[int, int], axis_title: str, *, bound: int | None = None
    ) -> Markup:
        """Draw a histogram of whole numbers; `bound` is marked by a vertical line."""
        with _figure(4.4, 2.5) as (figure, axes):
            axes.bar(list(counts), list(counts.values()), width=0.8, color=SERIES[0])
            last = max([*counts, bound or 0])
            axes.set_xticks(range(0, last + 1, max(1, (last + 9) // 10)))
            axes.set_xlim(-0.7, last + 1)
            if bound is not None:
                axes.axvline(bound + 0.5, color=SERIES[3], linewidth=1.2, linestyle="--")
                axes.annotate(
                    f"bound {bound}", (bound + 0.5, 0.97), xycoords=("data", "axes fraction"), color=SERIES[3],
                    xytext=(4, 0), textcoords="offset points", va="top", fontsize=8, annotation_clip=False,
                )  # fmt: skip
            axes.grid(axis="x", visible=False)
            axes.set_xlabel(axis_title)
            axes.set_ylabel("rollouts")
            return self._svg(figure, title)

    def line(self, title: str, x: np.ndarray, y: np.ndarray, axis_titles: tuple[str, str]) -> Markup:
        """Draw one filled line from zero. Shapes: x and y [N]."""
        with _figure(4.4, 2.5) as (figure, axes):
            axes.fill_between(x, y, color=SERIES[0], alpha=0.15, linewidth=0)
            axes.plot(x, y, color=SERIES[0], linewidth=1.6)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(axis_titles[0])
            axes.set_ylabel(axis_titles[1])
            return self._svg(figure, title)

    def shares(self, title: str, parts: Mapping[str, Sequence[tuple[str, float]]]) -> Markup:
        """Draw one bar for each role, cut into its parts by seconds (at most six parts, largest first)."""
        with _figure(9.2, 0.75 + 0.42 * len(parts)) as (figure, axes):
            for row, pieces in enumerate(parts.values()):
                total, left = sum(seconds for _, seconds in pieces), 0.0
                for index, (part, seconds) in enumerate(pieces):
                    share = seconds / total
                    axes.barh(row, share, left=left, height=0.62, color=SERIES[index % len(SERIES)])
                    if share > 0.02 + 0.011 * len(part):
                        axes.text(
                            left + share / 2,
                            row,
                            f"{part} {share:.0%}",
                            ha="center",
                            va="center",
                            fontsize=8,
                            color=ON_SERIES,
                        )
                    left += share
            axes.set_yticks(range(len(parts)), list(parts))
            axes.invert_yaxis()
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.grid(visible=False)
            axes.spines[["left", "bottom"]].set_visible(False)
            return self._svg(figure, title)

    def _svg(self, figure: Figure, title: str) -> Markup:
        self._num_charts += 1
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return Markup(_inline(text.getvalue(), f"chart{self._num_charts}", title))


@contextmanager
def _figure(width_in: float, height_in: float):
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Axes = figure.add_subplot()
        yield figure, axes


def _inline(svg: str, prefix: str, title: str) -> str:
    """Return the svg element alone, with ids of its own, a name for screen readers and the page's colours."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}-', body)
    for colour, variable in _STAND_INS.items():
        body = body.replace(colour, variable)
    body = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r'<svg ([^>]*?)width="[^"]*" ?', r"<svg \1", body, count=1)
    body = re.sub(r'<svg ([^>]*?)height="[^"]*" ?', r"<svg \1", body, count=1)
    opening = f'<svg role="img" aria-labelledby="{prefix}-title" '
    body = body.replace("<svg ", opening, 1)
    end = body.index(">") + 1
    return f'{body[:end]}<title id="{prefix}-title">{escape(title)}</title>{body[end:]}'


def moving_mean(values: np.ndarray, window: int = 10) -> np.ndarray:
    """Return the mean of each value and up to `window - 1` before it. Shapes: [N] to [N]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)
