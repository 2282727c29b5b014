"""The tables of `plait schedule`: a schedule's figures, and its timeline as a grid of text."""

import math
from collections.abc import Mapping
from fractions import Fraction

from rich.table import Table
from rich.text import Text

from plait.pages.timeline import COLORS, WORDS, ink, shade
from plait.plan.schedule import Durations, Kind, Schedule, ScheduleNeeds, Timeline
from plait.tables import table


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
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        stages = timeline.schedule.stages_of(rank)
        line = Text(f"rank {rank} ".ljust(label))
        for span in spans:
            kind, stage, micro = span.action
            start, end = (label + width * round(time / column) for time in (span.start, span.end))
            chunk = stages.index(stage)
            color = shade(kind, chunk, len(stages))
            letter = kind.value.lower() if chunk else kind.value
            line.append(" " * (start - len(line)))
            line.append(
                f"{letter}{micro}".ljust(width)[:width].ljust(end - start), f"{ink(color)} on {color}"
            )
        lines.append(line)
    return Text("\n").join([*lines, _legend(timeline.schedule)])


def _legend(schedule: Schedule) -> Text:
    kinds = [kind for kind in Kind if any(action.kind is kind for _, action in schedule)]
    legend = Text("")
    for kind in kinds:
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
