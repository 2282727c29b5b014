"""Timelines as bars in colours, which text, pictures and pages draw; and as values of a page."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from plait.plan.schedule import Action, Kind, Timeline

COLORS = {Kind.F: "#3d6fd6", Kind.B: "#1e9e83", Kind.W: "#9bbf3b"}
WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weights' gradient"}
_DIGITS = 7  # of times: less than a pixel, and half the bytes of a page


@functools.cache
def shade(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the colour, as #rrggbb, of the `chunk`-th of a rank's `num_chunks` stages."""
    white = 0.6 * chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(255 * (part + (1 - part) * white)):02x}" for part in _rgb(COLORS[kind]))


def ink(color: str) -> str:
    """Return black or white, whichever contrasts with the colour."""
    red, green, blue = _rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def _rgb(color: str) -> tuple[float, float, float]:
    """Return the parts of #rrggbb, from 0 to 1."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


class Bar(NamedTuple):
    """An action of a rank. Times count from the first start of all; `chunk`: which of the rank's stages."""

    rank: int
    action: Action
    start: float
    end: float
    chunk: int
    color: str

    @property
    def length(self) -> float:
        return self.end - self.start


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Yield every action, rank by rank and in order of time."""
    first = min((span.start for spans in timeline.ranks for span in spans), default=0.0)
    for rank, spans in enumerate(timeline.ranks):
        stages = timeline.schedule.stages_of(rank)
        chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        for action, start, end in spans:
            chunk = chunks[action.stage]
            color = shade(action.kind, chunk, len(stages))
            yield Bar(rank, action, start - first, end - first, chunk, color)


def timeline_values(timeline: Timeline, title: str, unit: str = "") -> dict[str, Any]:
    """Return a timeline as `timeline.js` draws it. Times count from the first start.

    `types` are the stages' kinds of actions; a row's `spans` are type, micro-batch, start and end of one
    action after the other. `unit`: "s", or nothing.
    """
    total, bubble = timeline.total, timeline.bubble_fraction
    rows: list[dict[str, Any]] = [
        {"name": f"rank {rank}", "spans": [], "idle": total - timeline.busy(rank)}
        for rank in range(len(timeline.ranks))
    ]
    types: dict[tuple[Kind, int], int] = {}
    described: list[dict[str, Any]] = []
    for bar in bars_of(timeline):
        kind, stage, micro = bar.action
        if (kind, stage) not in types:
            types[kind, stage] = len(described)
            name, color = WORDS[kind], bar.color
            type_ = {"kind": kind.value, "stage": stage, "name": name, "label": f"{name} of stage {stage}"}
            described.append({**type_, "color": color, "ink": ink(color)})
        rows[bar.rank]["spans"] += (types[kind, stage], micro, _short(bar.start), _short(bar.end))
    return {"title": title, "unit": unit, "total": total, "bubble": bubble, "types": described, "rows": rows}


def _short(time: float) -> float:
    return float(f"{time:.{_DIGITS}g}")
