"""Timelines of pipelines as pictures: a row for every rank, a bar for every action, as papers draw them.

Several timelines (predicted and measured, say) are drawn below each other on one time axis. The colour shows
the kind of action; the shade shows the stage of the rank: later stages are lighter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from plait.pages.timeline import COLORS, WORDS, ink, shade
from plait.plan.schedule import Kind, Span, Timeline

_DPI = 120
_HEIGHT = 0.92  # of a bar, of its row
_INCHES_PER_ACTION, _LEAST_WIDTH, _MOST_WIDTH = 0.2, 8.0, 40.0
_INCHES_PER_RANK, _INCHES_AROUND = 0.32, 0.75
_FONT_POINTS, _POINTS_PER_DIGIT, _LEAST_POINTS = 7.0, 4.6, 3.5


@dataclass(frozen=True)
class _Bar:
    rank: int
    span: Span  # from the timeline's first start on
    chunk: int  # of the rank's stages, the how manieth
    color: str

    @property
    def length(self) -> float:
        return self.span.end - self.span.start


def _bars(timeline: Timeline) -> Iterator[_Bar]:
    schedule = timeline.schedule
    first = min((span.start for spans in timeline.ranks for span in spans), default=0.0)
    for rank, spans in enumerate(timeline.ranks):
        stages = schedule.stages_of(rank)
        chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        for span in spans:
            chunk = chunk_of[span.action.stage]
            moved = Span(span.action, span.start - first, span.end - first)
            yield _Bar(rank, moved, chunk, shade(span.action.kind, chunk, len(stages)))


def draw_png(timelines: Sequence[Timeline], path: Path, titles: Sequence[str], *, unit: str = "") -> None:
    """Draws into the file: .png, .pdf or .svg. `unit` of time: "s", or nothing. Raises OSError."""
    figure_of(timelines, titles, unit=unit).savefig(path, dpi=_DPI)


def figure_of(timelines: Sequence[Timeline], titles: Sequence[str], *, unit: str = "") -> Figure:
    """The picture, not yet in a file: as wide as its usual action needs for its number, within bounds."""
    bars = [list(_bars(timeline)) for timeline in timelines]
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
    kinds = [kind for kind in Kind if any(bar.span.action.kind is kind for found in bars for bar in found)]
    handles = [Patch(color=COLORS[kind], label=WORDS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds) or 1, frameon=False)
    return figure


def _draw_rows(axes: Axes, bars: list[_Bar], *, points_per_time: float) -> None:
    """The bars, and the micro-batch's number in those that have room for it."""
    ranks: dict[int, list[_Bar]] = {}
    for bar in bars:
        ranks.setdefault(bar.rank, []).append(bar)
    for rank, row in ranks.items():  # one artist for a row: a patch for every bar takes seconds
        axes.broken_barh(
            [(bar.span.start, bar.length) for bar in row],
            (rank - _HEIGHT / 2, _HEIGHT),
            facecolors=[bar.color for bar in row],
            edgecolor="white",
            linewidth=0.4,
        )
    for bar in bars:
        number = str(bar.span.action.micro)
        points = min(
            _FONT_POINTS, _FONT_POINTS * bar.length * points_per_time / (_POINTS_PER_DIGIT * len(number))
        )
        if points >= _LEAST_POINTS:
            middle = (bar.span.start + bar.span.end) / 2
            axes.text(
                middle, bar.rank, number, ha="center", va="center", fontsize=points, color=ink(bar.color)
            )
