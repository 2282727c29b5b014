"""What a breakdown of DistributedDataParallel's step becomes: a table, JSON, and stacked bars."""

import datetime
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from plait.bench.ddp import Bar, Breakdown
from plait.bench.ddp_request import cap_label
from plait.bench.report import machine

_TITLES = {"group": "process group (Gloo)", "host": "shared memory"}
_PARTS = {  # fields of Phases: what they are called, and drawn in
    "forward_s": ("forward", "#3d6fd6"),
    "backward_s": ("backward", "#1e9e83"),
    "communication_s": ("exposed", "#d1495b"),
    "optimizer_s": ("optimizer", "#9a9a9a"),
}


def displayed_s(bar: Bar) -> dict[str, float]:
    """Seconds by phase, as they are shown: communication that noise has made negative is none."""
    return {part: max(0.0, getattr(bar.phases, part)) for part in _PARTS}


def breakdown_tables(found: Breakdown) -> list[Table]:
    """Of each carrier, a line for every bar, in milliseconds. They fit on a terminal of 80 columns."""
    parts = [word for word, _ in _PARTS.values()]
    made = []
    for carrier, bars in _by_carrier(found).items():
        words = f"{_what(found)}, over {carrier}, ms"
        table = Table(title=words, title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("bucket cap", no_wrap=True)
        for heading in ("count", *parts, "step", "of"):
            table.add_column(heading, justify="right")
        for bar in bars:
            times = map(_milliseconds, (*displayed_s(bar).values(), bar.step_s))
            ratio = "" if bar.of_no_overlap is None else f"{bar.of_no_overlap:.2f}"
            table.add_row(cap_label(bar.cap), str(bar.num_buckets), *times, ratio)
        made.append(table)
    made[-1].caption = "exposed: what backward does not hide; of: of the step without overlap"
    return made


def breakdown_json(found: Breakdown) -> dict[str, Any]:
    """Facts, and a row per bar. `communication_s` is what was measured, also where that is negative; the
    `cap_bytes` of one bucket that is never full are null."""
    rows = [
        {
            "carrier": bar.carrier,
            "buckets": cap_label(bar.cap),
            "cap_bytes": bar.cap,
            "num_buckets": bar.num_buckets,
            **asdict(bar.phases),
            "step_s": bar.step_s,
            "of_no_overlap": bar.of_no_overlap,
        }
        for bar in found.bars
    ]
    asked = {key: value for key, value in asdict(found.request).items() if key not in ("caps", "transport")}
    facts = {key: value for key, value in asdict(found).items() if key not in ("bars", "request")}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    host = {"host": socket.gethostname(), **machine()}
    return {"title": "ddp", "date": now, "machine": host, **asked, **facts, "rows": rows}


def draw_breakdown(found: Breakdown, picture: Path) -> None:
    """Writes `breakdown_figure`."""
    breakdown_figure(found).savefig(picture, dpi=120)


def breakdown_figure(found: Breakdown) -> Figure:
    """A bar for every variant, its phases on top of each other; what carries gradients, side by side."""
    bars = _by_carrier(found)
    num_bars = max(map(len, bars.values()))
    figure = Figure(figsize=(1.5 + len(bars) * (0.9 + 0.8 * num_bars), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(1, len(bars), sharey=True, squeeze=False)[0]
    for axes, carrier in zip(plots, bars, strict=True):
        _draw_stacks(axes, bars[carrier])
        axes.set_title(_TITLES[carrier])
    plots[0].set_ylabel("ms per step")
    handles, words = plots[0].get_legend_handles_labels()
    words[words.index("exposed")] = "communication that backward does not hide"
    figure.legend(handles, words, loc="outside lower center", ncols=len(_PARTS), fontsize="small")
    figure.suptitle(f"{_what(found)}\n{machine()['cpu']}", fontsize="medium")
    return figure


def _draw_stacks(axes: Axes, bars: list[Bar]) -> None:
    places = range(len(bars))
    tops = [0.0] * len(bars)
    for part, (word, color) in _PARTS.items():
        heights = [1e3 * displayed_s(bar)[part] for bar in bars]
        axes.bar(places, heights, bottom=tops, label=word, color=color, width=0.7)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    axes.set_xticks(places, [cap_label(bar.cap) for bar in bars], rotation=35, ha="right")
    axes.set_xlabel("bucket cap")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _by_carrier(found: Breakdown) -> dict[str, list[Bar]]:
    carriers = dict.fromkeys(bar.carrier for bar in found.bars)
    return {carrier: [bar for bar in found.bars if bar.carrier == carrier] for carrier in carriers}


def _what(found: Breakdown) -> str:
    asked = found.request
    model = f"Llama of {found.num_params / 1e6:.3g} M"
    batch = f"{asked.sequences} x {asked.length} tokens"
    return f"DDP: {model}, {batch}, {asked.precision}, {found.num_ranks} ranks"
