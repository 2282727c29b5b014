"""Tables of results in Markdown, without any library."""

from collections.abc import Iterable
from typing import Any


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of a table with a row per dict; its columns are the keys of all rows, in order."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(column)).replace("|", "\\|") for column in columns] for row in rows]
    titles = [column.replace("_", " ") for column in columns]
    return [f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(columns), *cells)]


def cell(value: object) -> str:
    """A value of a row as text."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
