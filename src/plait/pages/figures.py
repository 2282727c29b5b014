"""Figures: curves and tables that a command writes as JSON, as a page and as a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.pages import write_page
from plait.plan import format_bytes

_MOST_MARKED = 100  # points of a line in a picture
_STYLES: dict[str, dict[str, Any]] = {
    "line": {"marker": "."},
    "dashed": {"marker": ".", "linestyle": "--"},
    "dots": {"marker": "o", "linestyle": ""},
    "steps": {"drawstyle": "steps-post"},
}

Point = tuple[float, ...]  # x and y; or x, y, and the ends of an interval


@dataclass(frozen=True)
class Axis:
    """`unit`: how values are shown. `log`: the base of a logarithmic axis; 0: linear."""

    name: str
    unit: Literal["number", "seconds", "bytes", "percent"] = "number"
    log: int = 0


@dataclass(frozen=True)
class Curve:
    """`expected`: the name of the curve that this one is compared with."""

    name: str
    points: tuple[Point, ...]
    style: Literal["line", "dashed", "dots", "steps"] = "line"
    expected: str = ""


@dataclass(frozen=True)
class Figure:
    """Curves over an axis. `names`: of places on it."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    names: tuple[tuple[float, str], ...] = ()
    source: str = ""
    note: str = ""

    def errors(self) -> dict[str, float]:
        """Return by curve the mean of abs(y / expected y - 1)."""
        values = {curve.name: {point[0]: point[1] for point in curve.points} for curve in self.curves}
        ratios = {
            curve.name: [
                abs(y / values[curve.expected][x] - 1)
                for x, y in values[curve.name].items()
                if x in values[curve.expected]
            ]
            for curve in self.curves
            if curve.expected
        }
        return {name: statistics.mean(each) for name, each in ratios.items() if each}


@dataclass(frozen=True)
class Listing:
    """A table of texts and numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    source: str = ""
    note: str = ""


def figure_values(figures: Sequence[Figure | Listing]) -> dict[str, Any]:
    """Return the values of a page."""
    return {
        "figures": [
            asdict(each) | ({"errors": [*each.errors().items()]} if isinstance(each, Figure) else {})
            for each in figures
        ]
    }


def write_figures(path: Path, title: str, figures: Sequence[Figure | Listing]) -> None:
    """Write a page. Raises OSError."""
    write_page(path, "figures", title, figure_values(figures))


def draw_figures(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Plot figures into one picture, which is empty without any. Raises OSError."""
    from matplotlib.figure import Figure as Canvas

    columns = 2 if len(figures) > 1 else 1
    lines = -(-len(figures) // columns) or 1
    canvas = Canvas(figsize=(6.5 * columns, 5.5 * lines), layout="constrained")
    for axes, each in zip(canvas.subplots(lines, columns, squeeze=False).flat, figures, strict=False):
        for curve in each.curves:
            options = {"label": curve.name, **_STYLES[curve.style]}
            if len(curve.points) > _MOST_MARKED and curve.style != "dots":
                options["marker"] = ""
            axes.plot(*zip(*(point[:2] for point in curve.points), strict=True), **options)
        for name, axis in (("x", each.x), ("y", each.y)):
            if axis.log:
                axes.set(**{f"{name}scale": "log"})
        if each.x.unit == "bytes":
            axes.xaxis.set_major_formatter(lambda value, _: format_bytes(round(value)))
        axes.set(xlabel=each.x.name, title=f"{each.title}: {each.y.name}")
        axes.grid(alpha=0.3)
        if each.curves:
            axes.legend(fontsize="small")
    canvas.suptitle(title)
    canvas.savefig(path, dpi=120)
