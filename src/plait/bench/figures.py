"""Figures of measurements: collectives by size and algorithm, next to the formulas of the algorithms.

[Note: link of the formulas]
The formulas need the latency and the bandwidth of a message between two ranks: those that are fitted to the
measured send-receive. Additions are not counted, and all ranks are assumed to send at the same time without
sharing anything. Ranks of one host share its cores and its memory, so that measured times are longer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import torch
from matplotlib.figure import Figure as Canvas

from plait.bench.collectives import Measurement, Row
from plait.bench.request import format_bytes, split_algorithm
from plait.pages.figures import Axis, Curve, Figure
from plait.plan.cost_model import FIGURE_PARAMETERS, Link, algorithm_s, bus_bandwidth, fit

_num_bytes = attrgetter("num_bytes")
_SIZE, _TIME = Axis("size of the full tensor", "bytes", 2), Axis("time", "seconds", 10)


def collectives_figures(found: Measurement) -> list[Figure]:
    """Return time and bus bandwidth by size; for collectives with named algorithms their times, formulas
    and segments; for an all-reduce the total of 60 M parameters by parameters per call."""
    rows = [row for row in found.rows if row.num_bytes]
    own = [row for row in rows if row.algorithm == "auto"]
    numel = {row: row.num_bytes // getattr(torch, found.dtype).itemsize for row in rows}
    sums = [row for row in rows if row.collective == "all-reduce" and numel[row] <= FIGURE_PARAMETERS]

    def bus_gb_per_s(row: Row) -> float:
        return bus_bandwidth(row.collective, row.num_bytes, found.num_ranks, row.median_s) / 1e9

    def total_s(row: Row) -> float:
        return math.ceil(FIGURE_PARAMETERS / numel[row]) * row.median_s

    figures = [
        Figure("Collectives", _SIZE, _TIME, _curves(own)),
        Figure("Bus bandwidth", _SIZE, Axis("GB/s", log=10), _curves(own, bus_gb_per_s)),
        *(
            figure
            for collective in dict.fromkeys(row.collective for row in rows if row.algorithm != "auto")
            for figure in _algorithms(found, [row for row in rows if row.collective == collective])
        ),
        Figure(
            f"All-reduces of {FIGURE_PARAMETERS // 10**6} M parameters",
            Axis("parameters per call", log=10),
            Axis("total time", "seconds", 10),
            _curves(sums, total_s, numel.__getitem__),
            note="Calls one after the other, at the measured time of one.",
        ),
    ]
    return [figure for figure in figures if figure.curves]


def _algorithms(found: Measurement, rows: Sequence[Row]) -> Iterator[Figure]:
    """A collective's times by size and, of a chain, by segments. See [Note: link of the formulas]."""
    messages = [row for row in found.rows if row.collective == "send-receive"]
    line = fit((row.num_bytes, row.median_s) for row in messages if row.storage == messages[0].storage)
    note = "Formulas: latency and bandwidth of send-receive, without additions." if line else ""

    def segments(row: Row) -> int:
        return split_algorithm(row.algorithm, row.num_bytes, found.num_ranks)[1]

    def formula_s(row: Row) -> float | None:
        if line is None or row.algorithm == "auto":
            return None
        link, name = Link(line.latency_s, line.bytes_per_s), row.algorithm.partition(":")[0]
        return algorithm_s(row.collective, name, found.num_ranks, row.num_bytes, link, segments(row))

    def formulas(own: Sequence[Row], name: str, x: Callable[[Row], float]) -> tuple[Curve, ...]:
        points = tuple((x(row), seconds) for row in own if (seconds := formula_s(row)) is not None)
        return (Curve(f"{name}, formula", points, "dashed", name),) if points else ()

    curves: list[Curve] = []
    for name, own in _series(rows):
        curves += *_curves(own), *formulas(own, name, _num_bytes)
    yield Figure(f"{rows[0].collective} by algorithm", _SIZE, _TIME, tuple(curves), note=note)
    largest = max(row.num_bytes for row in rows)
    chains = [row for row in rows if row.algorithm.startswith("chain:") and row.num_bytes == largest]
    chains.sort(key=segments)
    if len(chains) > 1:
        measured = Curve("chain", tuple((segments(row), row.median_s) for row in chains))
        title = f"{rows[0].collective} of {format_bytes(largest)} along a chain of {found.num_ranks} ranks"
        both = measured, *formulas(chains, "chain", segments)
        yield Figure(title, Axis("segments", log=2), _TIME, both, note=note)


def _curves(
    rows: Sequence[Row],
    y: Callable[[Row], float] = attrgetter("median_s"),
    x: Callable[[Row], float] = _num_bytes,
) -> tuple[Curve, ...]:
    return tuple(
        Curve(name, tuple((x(row), y(row)) for row in own), "line" if own[0].storage == "owned" else "dashed")
        for name, own in _series(rows)
    )


def _series(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ only in size."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        storage = "" if row.storage == "owned" else f" ({row.storage})"
        found.setdefault(case_name(row) + storage, []).append(row)
    return [*found.items()]


def case_name(row: Row) -> str:
    """Return the collective, and its algorithm if one was named."""
    return row.collective if row.algorithm == "auto" else f"{row.collective}, {row.algorithm}"


def draw_figures(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Plot figures into one picture, which is empty without any."""
    columns = 2 if len(figures) > 1 else 1
    lines = -(-len(figures) // columns) or 1
    canvas = Canvas(figsize=(6.5 * columns, 5.5 * lines), layout="constrained")
    for axes, each in zip(canvas.subplots(lines, columns, squeeze=False).flat, figures, strict=False):
        for curve in each.curves:
            marks = {"line": ".-", "dashed": ".--", "dots": "o"}[curve.style]
            axes.plot(*zip(*(point[:2] for point in curve.points), strict=True), marks, label=curve.name)
        for name, axis in (("x", each.x), ("y", each.y)):
            if axis.log:
                axes.set(**{f"{name}scale": "log"})
        if each.x.unit == "bytes":
            axes.xaxis.set_major_formatter(lambda value, _: format_bytes(round(value)))
        axes.set(xlabel=each.x.name, title=f"{each.title}: {each.y.name}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    canvas.suptitle(title)
    canvas.savefig(path, dpi=120)
