"""The letter for a schedule that cannot be: with its grid, and the cell where it goes wrong marked."""

from plait.errors import ScheduleError
from plait.plan.schedule.action import Schedule

_COLUMNS = 5  # shown on either side of the marked cell
_ROWS = 4


def refusal(
    schedule: Schedule,
    rank: int,
    position: int,
    fact: str,
    *,
    given: str = "",
    expected: str | None = None,
    hint: str | None = None,
) -> ScheduleError:
    """An error that marks one cell. `given` says more about it than where it is."""
    actions = schedule.ranks[rank]
    what = f"{actions[position]} " if position < len(actions) else ""
    where = f"{what}at position {position} of rank {rank}, counted from 0"
    grid = marked_grid(schedule, rank, position)
    return ScheduleError(
        fact,
        given="\n".join((f"{where}: {given}" if given else where, *(f"    {line}" for line in grid))),
        expected=expected,
        hint=hint,
    )


def marked_grid(schedule: Schedule, rank: int, position: int) -> list[str]:
    """A line for every rank around a cell, a column for every position around it; the cell as `>F1.2<`."""
    first, stop = max(0, position - _COLUMNS), position + _COLUMNS + 1
    rows = range(max(0, rank - _ROWS), min(schedule.num_ranks, rank + _ROWS + 1))
    cells = [[str(action) for action in schedule.ranks[row][first:stop]] for row in rows]
    if position >= len(schedule.ranks[rank]):
        cells[rank - rows[0]].append("")
    width = max((len(cell) for row in cells for cell in row), default=0) + 2
    label = len(str(rows[-1]))
    lines = []
    for row, texts in zip(rows, cells, strict=True):
        marks = [row == rank and first + i == position for i in range(len(texts))]
        shown = [(f">{t}<" if mark else f" {t} ").ljust(width) for t, mark in zip(texts, marks, strict=True)]
        more = ("... " if first else "", "..." if len(schedule.ranks[row]) > stop else "")
        lines.append(f"rank {row:>{label}}: {more[0]}{''.join(shown)}{more[1]}".rstrip())
    above, below = ["..."] * (rows[0] > 0), ["..."] * (rows[-1] < schedule.num_ranks - 1)
    return [*above, *lines, *below]
