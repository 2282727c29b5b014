"""Figures of a page: curves and tables that a command prints, writes as JSON and draws."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.pages.page import write_page

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
    style: Literal["line", "dashed", "dots"] = "line"
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
