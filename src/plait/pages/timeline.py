"""Colours of actions, and timelines as values of a page."""

from typing import Any

from plait.plan.schedule import Kind, Timeline

COLORS = {Kind.F: "#3d6fd6", Kind.B: "#1e9e83", Kind.W: "#9bbf3b"}
WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weights' gradient"}
_DIGITS = 7  # of times: less than a pixel, and half the bytes of a page


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


def timeline_values(timeline: Timeline, title: str, unit: str = "") -> dict[str, Any]:
    """Return a timeline as `timeline.js` draws it. Times count from the first start.

    `types` are the stages' kinds of actions; a row's `spans` are type, micro-batch, start and end of one
    action after the other. `unit`: "s", or nothing.
    """
    schedule = timeline.schedule
    first = min((span.start for spans in timeline.ranks for span in spans), default=0.0)
    types: dict[tuple[Kind, int], int] = {}
    described: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    total = timeline.total
    for rank, spans in enumerate(timeline.ranks):
        stages = schedule.stages_of(rank)
        flat: list[float] = []
        for (kind, stage, micro), start, end in spans:
            if (kind, stage) not in types:
                types[kind, stage] = len(described)
                color = shade(kind, stages.index(stage), len(stages))
                label = f"{WORDS[kind]} of stage {stage}"
                described.append(
                    {
                        "kind": kind.value,
                        "stage": stage,
                        "name": WORDS[kind],
                        "label": label,
                        "color": color,
                        "ink": ink(color),
                    }
                )
            flat += (types[kind, stage], micro, _short(start - first), _short(end - first))
        rows.append({"name": f"rank {rank}", "spans": flat, "idle": total - timeline.busy(rank)})
    bubble = timeline.bubble_fraction
    return {"title": title, "unit": unit, "total": total, "bubble": bubble, "types": described, "rows": rows}


def _short(time: float) -> float:
    return float(f"{time:.{_DIGITS}g}")
