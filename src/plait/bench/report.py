"""What a measurement becomes: tables, JSON, a picture, and the lines of the host's profile.

What a figure depends on and a reader cannot see.
"""

import datetime
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from plait.bench.collectives import Measurement, Row
from plait.plan.cost_model import COLLECTIVES, LatencyFit, algorithm_bandwidth, bus_bandwidth, fit
from plait.plan.host_profile import HostProfile, ProfileEntry


def machine() -> dict[str, Any]:
    """Processor, number of cores, versions."""
    python = platform.python_version()
    return {"cpu": _cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__, "python": python}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


Lines = Mapping[ProfileEntry, LatencyFit]


def lines_of(measurement: Measurement) -> Lines:
    """The line of each verb and storage, where several sizes were measured."""
    points: dict[ProfileEntry, list[tuple[int, float]]] = {}
    for row in measurement.rows:
        points.setdefault(_what(measurement, row), []).append((row.num_bytes, row.median_s))
    return {what: line for what, found in points.items() if (line := fit(found)) is not None}


def profile_of(measurement: Measurement) -> HostProfile:
    return HostProfile(lines_of(measurement))


def tables(measurement: Measurement) -> list[Table]:
    """The times and bandwidths of every case; the lines through them."""
    num_ranks = measurement.num_ranks
    times = Table(title=f"collectives over {measurement.transport}, {num_ranks} ranks", title_justify="left")
    for heading in ("verb", "storage", "size", "time", "algorithm GB/s", "bus GB/s"):
        times.add_column(heading, justify="left" if heading in ("verb", "storage") else "right")
    before = None
    for row in measurement.rows:
        if before not in (None, (row.verb, row.storage)):
            times.add_section()
        before = row.verb, row.storage
        speeds = [f"{speed / 1e9:.3g}" if row.num_bytes else "" for speed in _bandwidths(measurement, row)]
        size = _size(row.num_bytes) if row.num_bytes else ""
        times.add_row(row.verb, row.storage, size, _time(row.median_s), *speeds)
    lines = Table(title="time = latency + size / bandwidth", title_justify="left")
    for heading in ("verb", "storage", "latency", "GB/s", "off by"):
        lines.add_column(heading, justify="left" if heading in ("verb", "storage") else "right")
    for what, line in lines_of(measurement).items():
        speed = "" if what.verb == "barrier" else f"{line.bytes_per_s / 1e9:.3g}"
        lines.add_row(what.verb, what.storage, _time(line.latency_s), speed, f"{line.error:.0%}")
    return [times, lines]


def to_json(measurement: Measurement) -> dict[str, Any]:
    """Facts, a row per case, and the lines. A bandwidth is null where size plays no part."""
    rows = []
    for row in measurement.rows:
        algorithm, bus = _bandwidths(measurement, row) if row.num_bytes else (None, None)
        speeds = {"algorithm_bytes_per_s": algorithm, "bus_bytes_per_s": bus}
        rows.append({**asdict(row), **speeds})
    lines = [
        {**asdict(what), **asdict(line), "bytes_per_s": _finite(line.bytes_per_s)}
        for what, line in lines_of(measurement).items()
    ]
    facts = {key: value for key, value in asdict(measurement).items() if key != "rows"}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    host = {"host": socket.gethostname(), **machine()}
    return {"title": "collectives", "date": now, "machine": host, **facts, "rows": rows, "lines": lines}


def draw(measurement: Measurement, picture: Path) -> None:
    """Time and bus bandwidth over size, both axes logarithmic; foreign storage is dashed."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colors = colormaps["tab10"]
    kinds = dict.fromkeys((row.verb, row.storage) for row in measurement.rows)
    for verb, storage in kinds:
        rows = [row for row in measurement.rows if (row.verb, row.storage) == (verb, storage)]
        color = colors(COLLECTIVES.index(verb))
        style: dict[str, Any] = {"color": color, "linestyle": "-" if storage == "owned" else "--"}
        label = verb if storage == "owned" else f"{verb} ({storage})"
        if verb == "barrier":
            left.axhline(rows[0].median_s, label=label, color=color, linestyle=":")
            continue
        sizes = [row.num_bytes for row in rows]
        left.plot(sizes, [row.median_s for row in rows], ".", label=label, **style)
        right.plot(sizes, [_bandwidths(measurement, row)[1] / 1e9 for row in rows], ".", label=label, **style)
    ticks = sorted({row.num_bytes for row in measurement.rows if row.num_bytes})
    for axes, title in ((left, "time, s"), (right, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [_size(tick) for tick in ticks], rotation=45)
        axes.set_xlabel("size of the whole tensor")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.suptitle(
        f"{measurement.num_ranks} ranks over {measurement.transport}, {measurement.dtype}, {machine()['cpu']}"
    )
    figure.savefig(picture, dpi=120)


def _what(measurement: Measurement, row: Row) -> ProfileEntry:
    return ProfileEntry(
        measurement.transport, row.verb, measurement.num_ranks, row.storage, measurement.dtype
    )


def _bandwidths(measurement: Measurement, row: Row) -> tuple[float, float]:
    """Algorithm bandwidth and bus bandwidth."""
    return (
        algorithm_bandwidth(row.num_bytes, row.median_s),
        bus_bandwidth(row.verb, row.num_bytes, measurement.num_ranks, row.median_s),
    )


def _finite(number: float) -> float | None:
    return None if number == float("inf") else number


def _size(num_bytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):,.4g} {unit}"
    return f"{num_bytes} B"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"
