"""A schedule's figures as tables, and its timelines as grids of text and as pictures.

A picture has a row for every rank and a bar for every action, as papers draw them. Several timelines
(predicted and measured, say) are drawn below each other on one time axis. The colour shows the kind of
action; the shade shows the stage of the rank: later stages are lighter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from plait.pages.timeline import COLORS, WORDS, Bar, bars_of, ink
from plait.plan.schedule import Durations, Kind, Schedule, ScheduleNeeds, Timeline
from plait.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120
_HEIGHT = 0.92  # of a bar, of its row
_INCHES_PER_ACTION, _LEAST_WIDTH, _MOST_WIDTH = 0.2, 8.0, 40.0
_INCHES_PER_RANK, _INCHES_AROUND = 0.32, 0.75
_FONT_POINTS, _POINTS_PER_DIGIT, _LEAST_POINTS = 7.0, 4.6, 3.5


def figures_table(schedule: Schedule, timelines: Mapping[str, Timeline], *, unit: str = "") -> Table:
    """Return a table of the pipeline's size and, for each timeline by its title, the total and the bubble.

    One timeline, or two: then how far the first, a prediction, is off the second. `unit`: "s", or nothing.
    """
    facts = (
        ("ranks", schedule.num_ranks),
        ("stages", schedule.num_stages),
        ("micro-batches", schedule.num_micros),
    )
    totals = ["total", *(_time(timeline.total, unit) for timeline in timelines.values())]
    bubbles = ["bubble", *(f"{timeline.bubble_fraction:.2%}" for timeline in timelines.values())]
    if len(timelines) > 1:
        predicted, measured = timelines.values()
        off = predicted.total / measured.total - 1 if measured.total else 0.0
        totals.append(f"{off:+.1%}")
        bubbles.append(f"{100 * (predicted.bubble_fraction - measured.bubble_fraction):+.1f} points")
    headings = ("", *timelines, *["off by"] * (len(timelines) > 1))
    rows = [*((name, str(number)) for name, number in facts), totals, bubbles]
    return table(f"schedule {schedule.name}", headings, rows)


def ranks_table(
    schedule: Schedule, checked: ScheduleNeeds, timelines: Mapping[str, Timeline], *, unit: str = ""
) -> Table:
    """A line for every rank: its stages, what it holds at most, and how long it idles."""
    idles = [f"idle, {title}" if len(timelines) > 1 else "idle" for title in timelines]
    totals = [(timeline, timeline.total) for timeline in timelines.values()]  # each total reads all actions
    rows = (
        (
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            str(checked.in_flight[rank]),
            str(checked.buffers[rank]),
            *(_idle(total, timeline.busy(rank), unit) for timeline, total in totals),
        )
        for rank in range(schedule.num_ranks)
    )
    return table(
        "by rank",
        ("rank", "stages", "in flight", "buffers", *idles),
        rows,
        left=("stages",),
        caption="in flight: (stage, micro-batch) held\nbuffers: messages ahead of their use",
    )


def _idle(total: float, busy: float, unit: str) -> str:
    idle = total - busy
    return f"{_time(idle, unit)} ({abs(idle / total) if total else 0.0:.1%})"


def _time(time: float, unit: str) -> str:
    return f"{1e3 * time:,.2f} m{unit}" if unit else f"{round(time, 9):,.6g}"


def grid(timeline: Timeline, durations: Durations, *, most: int) -> Text | None:
    """The timeline in columns of equal time, a line for every rank; None if it needs over `most` characters.

    A cell says what is computed of which micro-batch; what is of the rank's later stages is in lower case,
    and lighter. `durations` are those of the timeline: a column is the longest time that divides them all.
    """
    column = _column(durations)
    num_columns = round(timeline.total / column) if column else 0
    width = len(str(max(timeline.schedule.num_micros - 1, 0))) + 1
    label = len(f"rank {len(timeline.ranks) - 1} ")
    if not num_columns or label + num_columns * width > most:
        return None
    lines = [Text(f"rank {rank} ".ljust(label)) for rank in range(len(timeline.ranks))]
    for bar in bars_of(timeline):
        line, kind = lines[bar.rank], bar.action.kind.value
        start, end = (label + width * round(time / column) for time in (bar.start, bar.end))
        text = f"{kind.lower() if bar.chunk else kind}{bar.action.micro}".ljust(width)[:width]
        line.append(" " * (start - len(line)))
        line.append(text.ljust(end - start), f"{ink(bar.color)} on {bar.color}")
    return Text("\n").join([*lines, _legend(timeline.schedule)])


def _kinds(schedules: Iterable[Schedule]) -> list[Kind]:
    used = {action.kind for schedule in schedules for _, action in schedule}
    return [kind for kind in Kind if kind in used]


def _legend(schedule: Schedule) -> Text:
    legend = Text("")
    for kind in _kinds([schedule]):
        legend.append(f" {kind.value} ", f"{ink(COLORS[kind])} on {COLORS[kind]}")
        legend.append(f" {WORDS[kind]}  ")
    if schedule.num_stages > schedule.num_ranks:
        legend.append("in lower case: of a rank's later stages")
    return legend


def _column(durations: Durations) -> Fraction:
    """The longest time that all durations are multiples of, as they are written; 0 if nothing takes time."""
    times = {*durations.forward, *durations.backward, *durations.weight, *durations.transfer}
    fractions = [Fraction(str(time)) for time in times if time]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return Fraction(math.gcd(*(int(fraction * denominator) for fraction in fractions)), denominator)


def draw_png(timelines: Sequence[Timeline], path: Path, titles: Sequence[str], *, unit: str = "") -> None:
    """Draw into the file: .png, .pdf or .svg. `unit` of time: "s", or nothing. Raises OSError."""
    figure_of(timelines, titles, unit=unit).savefig(path, dpi=_DPI)


def figure_of(timelines: Sequence[Timeline], titles: Sequence[str], *, unit: str = "") -> "Figure":
    """Return the picture, as wide as its usual action needs for its number, within bounds."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    bars = [[*bars_of(timeline)] for timeline in timelines]
    total = max((timeline.total for timeline in timelines), default=0.0) or 1.0
    usual = median([bar.length for found in bars for bar in found if bar.length] or [total])
    width = min(max(total / usual * _INCHES_PER_ACTION, _LEAST_WIDTH), _MOST_WIDTH)
    num_ranks = [len(timeline.ranks) for timeline in timelines]
    height = sum(_INCHES_AROUND + _INCHES_PER_RANK * number for number in num_ranks)
    figure = Figure(figsize=(width, height), layout="constrained")
    rows = figure.subplots(len(bars), 1, sharex=True, squeeze=False, height_ratios=num_ranks)[:, 0]
    for axes, found, ranks, title in zip(rows, bars, num_ranks, titles, strict=True):
        _draw_rows(axes, found, points_per_time=72 * width / total)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    rows[-1].set_xlim(0, total)
    rows[-1].set_xlabel("time")
    if unit:
        rows[-1].xaxis.set_major_formatter(EngFormatter(unit=unit))
    kinds = _kinds(timeline.schedule for timeline in timelines)
    handles = [Patch(color=COLORS[kind], label=WORDS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds) or 1, frameon=False)
    return figure


def _draw_rows(axes: "Axes", bars: Sequence[Bar], *, points_per_time: float) -> None:
    """Draw the bars. Those that are wide enough have the number of their micro-batch."""
    for rank, of_rank in groupby(bars, key=attrgetter("rank")):
        row = [*of_rank]
        axes.broken_barh(  # one artist for a row: a patch for every bar takes seconds
            [(bar.start, bar.length) for bar in row],
            (rank - _HEIGHT / 2, _HEIGHT),
            facecolors=[bar.color for bar in row],
            edgecolor="white",
            linewidth=0.4,
        )
    for bar in bars:
        number = str(bar.action.micro)
        points = min(
            _FONT_POINTS, _FONT_POINTS * bar.length * points_per_time / (_POINTS_PER_DIGIT * len(number))
        )
        if points >= _LEAST_POINTS:
            middle = (bar.start + bar.end) / 2
            center: dict[str, Any] = {"ha": "center", "va": "center"}
            axes.text(middle, bar.rank, number, fontsize=points, color=ink(bar.color), **center)
