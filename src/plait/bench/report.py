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
from rich.table import Table

from plait.bench.collectives import Measurement, Row
from plait.bench.figures import case_name, collectives_figures
from plait.bench.request import format_bytes
from plait.pages.figures import figure_values
from plait.plan.cost_model import LatencyFit, algorithm_bandwidth, bus_bandwidth, fit
from plait.plan.host_profile import OPERATORS, DeviceSpeed, ProfileEntry
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
