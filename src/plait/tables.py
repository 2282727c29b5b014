"""Tables of reports, and their numbers."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

Cell = str | Text


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Iterable[Cell]] = (),
    *,
    left: Collection[str] = ("",),
    **options: Any,
) -> Table:
    """Return a table of numbers, aligned to the right except in the columns `left`. `options`: of `Table`."""
    made = Table(title=title, title_justify="left", caption_justify="left", **options)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def facts_table(title: str | Text, facts: Iterable[tuple[str, Cell]]) -> Table:
    """Return a table of names and values, without headings."""
    made = Table("", "", title=title, title_justify="left", show_header=False)
    for name, value in facts:
        made.add_row(name, value)
    return made


def counted(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
