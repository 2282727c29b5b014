"""Reports of a collectives measurement: tables, JSON, a plot, and latency fits for the host profile."""

import datetime
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.table import Table

from plait.bench.collectives import Measurement, Row
from plait.bench.request import format_bytes
from plait.plan.cost_model import COLLECTIVES, LatencyFit, algorithm_bandwidth, bus_bandwidth, fit
from plait.plan.device_speed import OPERATORS, DeviceSpeed
from plait.plan.host_profile import ProfileEntry
from plait.tables import counted, table


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


LatencyFits = Mapping[ProfileEntry, LatencyFit]


def latency_fits(measurement: Measurement) -> LatencyFits:
    """Return the latency and bandwidth fit of each collective and storage with several sizes."""
    points: dict[ProfileEntry, list[tuple[int, float]]] = {}
    for row in measurement.rows:
        if row.algorithm != "auto":  # profiles are of transports
            continue
        points.setdefault(_profile_entry(measurement, row), []).append((row.num_bytes, row.median_s))
    return {
        entry: fit_ for entry, sizes_and_times in points.items() if (fit_ := fit(sizes_and_times)) is not None
    }


def tables(measurement: Measurement) -> list[Table]:
    """Return tables of the times and bandwidths of every case, and of the fits."""
    by = ("collective", "storage")
    title = f"collectives over {measurement.transport}, {measurement.num_ranks} ranks"
    times = table(title, (*by, "size", "time", "algorithm GB/s", "bus GB/s"), left=by)
    for _, rows in groupby(measurement.rows, key=_series):
        for row in rows:
            sized = [format_bytes(row.num_bytes), *(f"{b / 1e9:.3g}" for b in _bandwidths(measurement, row))]
            size, *bandwidths = sized if row.num_bytes else [""] * 3
            times.add_row(_name(row), row.storage, size, _format_time(row.median_s), *bandwidths)
        times.add_section()
    fits = table("time = latency + size / bandwidth", (*by, "latency", "GB/s", "off by"), left=by)
    for entry, fit_ in latency_fits(measurement).items():
        bandwidth = "" if entry.verb == "barrier" else f"{fit_.bytes_per_s / 1e9:.3g}"
        fits.add_row(entry.verb, entry.storage, _format_time(fit_.latency_s), bandwidth, f"{fit_.error:.0%}")
    return [times, fits]


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
    return report_json("collectives", asdict(measurement) | {"rows": rows, "lines": fits})


def report_json(title: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values after the title, the date and the machine of the benchmark."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    host = {"host": socket.gethostname(), **machine()}
    return {"title": title, "date": now, "machine": host, **values}


def draw(measurement: Measurement, path: Path) -> None:
    """Plot time and bus bandwidth over size, on logarithmic axes; foreign storage is dashed."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = colormaps["tab10"]
    series = dict.fromkeys(map(_series, measurement.rows))
    names = dict.fromkeys(name for name, _ in series)
    has_algorithms = any(row.algorithm != "auto" for row in measurement.rows)
    for name, storage in series:
        rows = [row for row in measurement.rows if _series(row) == (name, storage)]
        color = colors([*(names if has_algorithms else COLLECTIVES)].index(name) % colors.N)
        style: dict[str, Any] = {"color": color, "linestyle": "-" if storage == "owned" else "--"}
        label = name if storage == "owned" else f"{name} ({storage})"
        if name == "barrier":
            left.axhline(rows[0].median_s, label=label, color=color, linestyle=":")
            continue
        sizes = [row.num_bytes for row in rows]
        left.plot(sizes, [row.median_s for row in rows], ".", label=label, **style)
        right.plot(sizes, [_bandwidths(measurement, row)[1] / 1e9 for row in rows], ".", label=label, **style)
    ticks = sorted({row.num_bytes for row in measurement.rows if row.num_bytes})
    for axes, title in ((left, "time, s"), (right, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks], rotation=45)
        axes.set_xlabel("size of the full tensor")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.suptitle(
        f"{measurement.num_ranks} ranks over {measurement.transport}, {measurement.dtype}, {machine()['cpu']}"
    )
    figure.savefig(path, dpi=120)


def _name(row: Row) -> str:
    return row.collective if row.algorithm == "auto" else f"{row.collective}, {row.algorithm}"


def _series(row: Row) -> tuple[str, str]:
    """The key of a row's series: equal for rows that differ only in size."""
    return _name(row), row.storage


def _profile_entry(measurement: Measurement, row: Row) -> ProfileEntry:
    return ProfileEntry(
        measurement.transport, row.collective, measurement.num_ranks, row.storage, measurement.dtype
    )


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
        [kind, str(ranks), _format_time(start_s), f"{1e-9 / byte_s:,.2f}" if byte_s else ""]
        for kind, ranks, start_s, byte_s in speed.collectives
    ]
    return [*tables, table("collectives", ["", "ranks", "latency", "GB/s"], lines, left=("",))]


def _format_time(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"
