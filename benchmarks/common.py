"""Shared by the benchmarks: the command line, medians and ratios, a table and its JSON."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from markdown_table import cell
from plait.comm import launch_local

Times = dict[str, list[float]]  # contender -> seconds per step, in the order in which they were measured
Row = dict[str, Any]
WIDTH = 160  # of the printed tables, in characters


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help is the file's own words, with --json and --smallest."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write rows and machine facts to this file")
    made.add_argument(
        "--smallest", action="store_true", help="run everything once, on toys: a test of itself"
    )
    return made


def parse(made: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """The arguments; with --smallest, those that are not given are `smallest`."""
    if made.parse_args().smallest:
        made.set_defaults(**smallest)
    return made.parse_args()


def on_ranks(program: str, num_ranks: int, work: Callable[[], None]) -> None:
    """Does a rank's `work`; where this is no rank, starts `num_ranks` of `program` with our arguments."""
    if "RANK" in os.environ:
        work()
    else:
        command = [sys.executable, str(Path(program).resolve())]
        sys.exit(launch_local(num_ranks, sys.argv[1:], command=command))


def size_of(word: str) -> int:
    """Bytes of "4K" or "25M"."""
    return int(word[:-1]) << {"K": 10, "M": 20}[word[-1]]


def rows(case: str, times: Times, *, yardstick: str, peers: Collection[str]) -> list[Row]:
    """A row per contender: median, spread, and the median of its ratios to others of the same round.

    The others are the yardstick and the fastest of those of `peers` that took part, if any did.
    """
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    best = min((name for name in times if name in peers), key=medians.__getitem__, default=None)
    return [
        {
            "case": case,
            "contender": name,
            "median_ms": 1e3 * medians[name],
            "least_ms": 1e3 * min(seconds),
            "of_yardstick": ratio(seconds, times[yardstick]),
            "fastest_other": best,
            "faster_than_it": ratio(times[best], seconds) if best is not None else None,
        }
        for name, seconds in times.items()
    ]


def ratio(these: list[float], those: list[float]) -> float:
    """The median of ratios of the same round."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def report(title: str, found: list[Row], facts: dict[str, Any], json_path: Path | None) -> None:
    """Prints the table; writes rows and facts to `json_path` when there is one."""
    table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in facts.items()))
    for column in found[0]:
        words = column in ("case", "contender", "fastest_other")
        table.add_column(column.replace("_", " "), justify="left" if words else "right")
    for row in found:
        table.add_row(*map(cell, row.values()))
    Console(width=WIDTH).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps({"title": title, "machine": facts, "rows": found}, indent=1))
