"""Reports of measurements: tables, figures, JSON, and the fits for the host profile.

[Note: link of the formulas]
The formulas need the latency and the bandwidth of a message between two ranks: those that are fitted to the
measured send-receive. Additions are not counted, and all ranks are assumed to send at the same time without
sharing anything. Ranks of one host share its cores and its memory, so that measured times are longer.
"""

import datetime
import math
import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from rich.table import Table

from plait.bench.collectives import Measurement, Row
from plait.bench.request import cap_label, format_bytes, split_algorithm
from plait.pages.figures import Axis, Curve, Figure, figure_values
from plait.plan.cost_model import (
    FIGURE_PARAMETERS,
    LatencyFit,
    Link,
    algorithm_bandwidth,
    algorithm_s,
    bus_bandwidth,
    fit,
)
from plait.plan.host_profile import OPERATORS, DeviceSpeed, ProfileEntry
from plait.tables import counted, table

if TYPE_CHECKING:
    from plait.bench.ddp import Bar, Breakdown

_num_bytes = attrgetter("num_bytes")
_SIZE, _TIME = Axis("size of the full tensor", "bytes", 2), Axis("time", "seconds", 10)
_TITLES = {"group": "process group (Gloo)", "host": "shared memory"}
_PHASES = {  # fields of Phases: label and color
    "forward_s": ("forward", "#3d6fd6"),
    "backward_s": ("backward", "#1e9e83"),
    "communication_s": ("exposed", "#d1495b"),
    "optimizer_s": ("optimizer", "#9a9a9a"),
}


def machine() -> dict[str, Any]:
    """Return the processor, number of cores and versions."""
    python = platform.python_version()
    return {"cpu": _cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__, "python": python}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def latency_fits(measurement: Measurement) -> dict[ProfileEntry, LatencyFit]:
    """Return the latency and bandwidth fit of each collective and storage with several sizes."""
    points: dict[ProfileEntry, list[tuple[int, float]]] = {}
    for row in measurement.rows:
        if row.algorithm != "auto":  # profiles are of transports
            continue
        entry = ProfileEntry(
            measurement.transport, row.collective, measurement.num_ranks, row.storage, measurement.dtype
        )
        points.setdefault(entry, []).append((row.num_bytes, row.median_s))
    return {
        entry: fit_ for entry, sizes_and_times in points.items() if (fit_ := fit(sizes_and_times)) is not None
    }


def tables(measurement: Measurement) -> list[Table]:
    """Return tables of the times and bandwidths of every case, and of the fits."""
    by = ("collective", "storage")
    title = f"collectives over {measurement.transport}, {measurement.num_ranks} ranks"
    times = table(title, (*by, "size", "time", "algorithm GB/s", "bus GB/s"), left=by)
    for _, rows in groupby(measurement.rows, key=lambda row: (case_name(row), row.storage)):
        for row in rows:
            sized = [format_bytes(row.num_bytes), *(f"{b / 1e9:.3g}" for b in _bandwidths(measurement, row))]
            size, *bandwidths = sized if row.num_bytes else [""] * 3
            times.add_row(case_name(row), row.storage, size, _format_time(row.median_s), *bandwidths)
        times.add_section()
    fits = table("time = latency + size / bandwidth", (*by, "latency", "GB/s", "off by"), left=by)
    for entry, fit_ in latency_fits(measurement).items():
        bandwidth = "" if entry.verb == "barrier" else f"{fit_.bytes_per_s / 1e9:.3g}"
        fits.add_row(entry.verb, entry.storage, _format_time(fit_.latency_s), bandwidth, f"{fit_.error:.0%}")
    errors = [
        (figure.title, curve, f"{error:.0%}")
        for figure in collectives_figures(measurement)
        for curve, error in figure.errors().items()
    ]
    formulas = table("formulas of algorithms", ("", "curve", "mean error"), errors, left=("", "curve"))
    return [each for each in (times, fits, formulas) if each.row_count]


def to_json(measurement: Measurement) -> dict[str, Any]:
    """Return the setup, a row per case, and the fits. A bandwidth is null if size plays no part, infinite if
    the time does not depend on it."""
    rows = []
    for row in measurement.rows:
        algorithm, bus = _bandwidths(measurement, row) if row.num_bytes else (None, None)
        rows.append(
            {
                "verb": row.collective,
                "algorithm": row.algorithm,
                "storage": row.storage,
                "num_bytes": row.num_bytes,
                "median_s": row.median_s,
                "least_s": row.min_s,
                "visits": row.visits,
                "repeats": row.repeats,
                "algorithm_bytes_per_s": algorithm,
                "bus_bytes_per_s": bus,
            }
        )
    fits = [asdict(entry) | asdict(fit_) for entry, fit_ in latency_fits(measurement).items()]
    figures = figure_values(collectives_figures(measurement))
    return report_json("collectives", asdict(measurement) | {"rows": rows, "lines": fits} | figures)


def report_json(title: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values after the title, the date and the machine of the benchmark."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    host = {"host": socket.gethostname(), **machine()}
    return {"title": title, "date": now, "machine": host, **values}


def _bandwidths(measurement: Measurement, row: Row) -> tuple[float, float]:
    """Return algorithm bandwidth and bus bandwidth."""
    return (
        algorithm_bandwidth(row.num_bytes, row.median_s),
        bus_bandwidth(row.collective, row.num_bytes, measurement.num_ranks, row.median_s),
    )


def device_tables(speed: DeviceSpeed) -> list[Table]:
    """Return FLOP/s by size and precision and the memory's bytes per second, of one rank; rates of operators;
    lines of collectives."""
    title = f"{speed.name}: one of {counted(speed.num_ranks, 'rank')} that work at the same time"
    sizes = [round((flops / 2) ** (1 / 3)) for flops, _ in next(iter(speed.product_rates.values()))]
    rows = [
        [str(size), *(f"{points[number][1] / 1e9:,.1f}" for points in speed.product_rates.values())]
        for number, size in enumerate(sizes)
    ]
    copied = f"copies {speed.memory_bytes_per_s / 1e9:,.1f} GB/s, an operator {1e6 * speed.launch_s:,.1f} us"
    columns = ["size", *(f"{name} GFLOP/s" for name in speed.product_rates)]
    tables = [table(title, columns, rows, caption=copied)]
    if speed.operator_rates:
        rates = [
            [
                name,
                *(
                    f"{by_name[name][i][1] / 1e9:,.2f}"
                    for by_name in speed.operator_rates.values()
                    for i in (0, -1)
                ),
            ]
            for name in OPERATORS
        ]
        columns = [
            "",
            *(f"{name}, {size}" for name in speed.operator_rates for size in ("smallest", "largest")),
        ]
        tables.append(table("10^9 elements (linear: FLOP) per second", columns, rates, left=("",)))
    lines = [
        [kind, on, _format_time(start_s), f"{1e-9 / byte_s:,.2f}" if byte_s else ""]
        for kind, on, start_s, byte_s in (
            *((row[0], str(row[1]), *row[2:]) for row in speed.collectives),
            *((row[0], f"{row[2]} x {row[1]}", *row[3:]) for row in speed.network),
        )
    ]
    return [*tables, table("collectives", ["", "ranks", "latency", "GB/s"], lines, left=("",))]


def _format_time(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


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


def displayed_s(bar: "Bar") -> dict[str, float]:
    """Return seconds by phase as displayed: communication made negative by noise is shown as 0."""
    return {phase: max(0.0, getattr(bar.phases, phase)) for phase in _PHASES}


def breakdown_tables(breakdown: "Breakdown") -> list[Table]:
    """Return a table per transport, with a row per bar, in milliseconds, for a terminal of 80 columns."""
    tables = []
    for transport, bars in _by_transport(breakdown).items():
        made = table(
            f"{_title(breakdown)}, over {transport}, ms",
            ("bucket cap", "count", *(label for label, _ in _PHASES.values()), "step", "of"),
            left=("bucket cap",),
            show_edge=False,
            pad_edge=False,
        )
        made.columns[0].no_wrap = True
        for bar in bars:
            times = map(_milliseconds, (*displayed_s(bar).values(), bar.step_s))
            ratio = "" if bar.ratio_to_no_overlap is None else f"{bar.ratio_to_no_overlap:.2f}"
            made.add_row(cap_label(bar.cap), str(bar.num_buckets), *times, ratio)
        tables.append(made)
    tables[-1].caption = "exposed: not hidden by backward; of: ratio to the step without overlap"
    return tables


def breakdown_json(breakdown: "Breakdown") -> dict[str, Any]:
    """Return the setup, and a row per bar. `communication_s` is as measured, even if negative; `cap_bytes` is
    null for one bucket that never fills."""
    rows = [
        {
            "carrier": bar.transport,
            "buckets": cap_label(bar.cap),
            "cap_bytes": bar.cap,
            "num_buckets": bar.num_buckets,
            **asdict(bar.phases),
            "step_s": bar.step_s,
            "of_no_overlap": bar.ratio_to_no_overlap,
        }
        for bar in breakdown.bars
    ]
    facts = asdict(breakdown) | asdict(breakdown.request) | {"rows": rows}
    for key in ("bars", "request", "caps", "transport"):
        del facts[key]
    return report_json("ddp", facts)


def breakdown_figure(breakdown: "Breakdown") -> Canvas:
    """Return a stacked bar of phases for every variant, with the transports side by side."""
    bars = _by_transport(breakdown)
    num_bars = max(map(len, bars.values()))
    figure = Canvas(figsize=(1.5 + len(bars) * (0.9 + 0.8 * num_bars), 5.0), layout="constrained")
    plots = figure.subplots(1, len(bars), sharey=True, squeeze=False)[0]
    for axes, transport in zip(plots, bars, strict=True):
        _draw_stacks(axes, bars[transport])
        axes.set_title(_TITLES[transport])
    plots[0].set_ylabel("ms per step")
    handles, labels = plots[0].get_legend_handles_labels()
    labels[labels.index("exposed")] = "communication not hidden by backward"
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_PHASES), fontsize="small")
    figure.suptitle(f"{_title(breakdown)}\n{machine()['cpu']}", fontsize="medium")
    return figure


def _draw_stacks(axes: Axes, bars: "list[Bar]") -> None:
    positions = range(len(bars))
    tops = [0.0] * len(bars)
    for phase, (label, color) in _PHASES.items():
        heights = [1e3 * displayed_s(bar)[phase] for bar in bars]
        axes.bar(positions, heights, bottom=tops, label=label, color=color, width=0.7)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    axes.set_xticks(positions, [cap_label(bar.cap) for bar in bars], rotation=35, ha="right")
    axes.set_xlabel("bucket cap")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _by_transport(breakdown: "Breakdown") -> "dict[str, list[Bar]]":
    transports = dict.fromkeys(bar.transport for bar in breakdown.bars)
    return {
        transport: [bar for bar in breakdown.bars if bar.transport == transport] for transport in transports
    }


def _title(breakdown: "Breakdown") -> str:
    request = breakdown.request
    model = f"Llama of {breakdown.num_params / 1e6:.3g} M"
    batch = f"{request.sequences} x {request.length} tokens"
    return f"DDP: {model}, {batch}, {request.precision}, {breakdown.num_ranks} ranks"
