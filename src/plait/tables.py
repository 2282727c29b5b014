"""Tables of reports, and their numbers.

Text may come from a file's names and keys: it is shown as it is, without rich's markup, and with control
characters escaped.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from plait.errors import printable

Cell = str | Text


def plain(text: str, style: str = "") -> Text:
    """Return text for a rich console."""
    return Text(printable(text), style=style)


def cells(row: Iterable[Cell]) -> Iterator[Text]:
    """Return a row's cells. A `Text` has a style of ours."""
    return (plain(cell) if isinstance(cell, str) else cell for cell in row)


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Iterable[Cell]] = (),
    *,
    left: Collection[str] = ("",),
    caption: str = "",
    **options: Any,
) -> Table:
    """Return a table of numbers, aligned to the right except in the columns `left`. `options`: of `Table`."""
    made = Table(title=_title(title), title_justify="left", caption_justify="left", **options)
    made.caption = _title(caption) or None
    for heading in headings:
        made.add_column(plain(heading), justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*cells(row))
    return made


def facts_table(title: str, facts: Iterable[tuple[str, Cell]]) -> Table:
    """Return a table of names and values, without headings."""
    made = Table("", "", title=_title(title), title_justify="left", show_header=False)
    for fact in facts:
        made.add_row(*cells(fact))
    return made


def _title(text: str) -> str:
    return escape(printable(text))  # a `Text` would lose the style of titles


def counted(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
