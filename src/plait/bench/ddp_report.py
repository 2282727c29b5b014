"""Reports of a DistributedDataParallel breakdown: a table, JSON, and stacked bars."""

from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from plait.bench.ddp import Bar, Breakdown
from plait.bench.ddp_request import cap_label
from plait.bench.report import machine, report_json
from plait.tables import table

_TITLES = {"group": "process group (Gloo)", "host": "shared memory"}
_PHASES = {  # fields of Phases: label and color
    "forward_s": ("forward", "#3d6fd6"),
    "backward_s": ("backward", "#1e9e83"),
    "communication_s": ("exposed", "#d1495b"),
    "optimizer_s": ("optimizer", "#9a9a9a"),
}


def displayed_s(bar: Bar) -> dict[str, float]:
    """Return seconds by phase as displayed: communication made negative by noise is shown as 0."""
    return {phase: max(0.0, getattr(bar.phases, phase)) for phase in _PHASES}


def breakdown_tables(breakdown: Breakdown) -> list[Table]:
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


def breakdown_json(breakdown: Breakdown) -> dict[str, Any]:
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


def breakdown_figure(breakdown: Breakdown) -> Figure:
    """Return a stacked bar of phases for every variant, with the transports side by side."""
    bars = _by_transport(breakdown)
    num_bars = max(map(len, bars.values()))
    figure = Figure(figsize=(1.5 + len(bars) * (0.9 + 0.8 * num_bars), 5.0), layout="constrained")
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


def _draw_stacks(axes: Axes, bars: list[Bar]) -> None:
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


def _by_transport(breakdown: Breakdown) -> dict[str, list[Bar]]:
    transports = dict.fromkeys(bar.transport for bar in breakdown.bars)
    return {
        transport: [bar for bar in breakdown.bars if bar.transport == transport] for transport in transports
    }


def _title(breakdown: Breakdown) -> str:
    request = breakdown.request
    model = f"Llama of {breakdown.num_params / 1e6:.3g} M"
    batch = f"{request.sequences} x {request.length} tokens"
    return f"DDP: {model}, {batch}, {request.precision}, {breakdown.num_ranks} ranks"
