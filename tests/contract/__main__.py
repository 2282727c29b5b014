"""Run torch's cases from a shell: `python -m tests.contract --help`."""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # like pytest, so that `support.pool` is importable

from contract.ranks import Variant
from contract.runner import LIMIT_S, Result, run_all, start_runner

CLASSES_OF = {"torch": ("torch",), "plait": ("plait",), "both": ("torch", "plait")}
TRANSPORTS_OF = {"auto": ("auto",), "group": ("group",), "both": ("auto", "group")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description="torch's own DDP cases")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--which", choices=CLASSES_OF, default="plait")
    parser.add_argument("--transport", choices=TRANSPORTS_OF, default="auto")
    parser.add_argument("-k", default="", metavar="WORD", help="only cases with this in their name")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for a case")
    parser.add_argument("--quiet", action="store_true", help="the table, without the tracebacks")
    arguments = parser.parse_args(argv)
    variants = [
        variant
        for which in CLASSES_OF[arguments.which]
        for variant in (
            [Variant(which)]
            if which == "torch"
            else [Variant(which, transport) for transport in TRANSPORTS_OF[arguments.transport]]
        )
    ]
    results: dict[str, list[Result]] = {}
    with start_runner(arguments.world_size, arguments.limit) as runner:
        names = runner.names(arguments.k)
        for variant in variants:
            results[str(variant)] = run_all(runner, names, variant, report=_report)
    print(table(results))
    failures = [it for column in results.values() for it in column if it.status in ("failed", "hung")]
    if not arguments.quiet:
        print(*(f"\n==== {it.name}: {it.status}\n{it.text}" for it in failures), sep="\n")
    return 1 if failures else 0


def table(results: dict[str, list[Result]]) -> str:
    """Format a Markdown table: a row per case, a column per class, seconds; then the counts of outcomes."""
    lines = [f"| case | {' | '.join(results)} | on | seconds |", "|---" * (len(results) + 3) + "|"]
    for row in zip(*results.values(), strict=True):
        cells = [f"skipped: {it.text}" if it.status == "skipped" else it.status for it in row]
        seconds = ", ".join(f"{it.elapsed_s:.1f}" for it in row)
        lines.append(f"| {row[0].name} | {' | '.join(cells)} | {row[0].ran_on} | {seconds} |")
    for variant, column in results.items():
        counts = Counter(f"{it.status} {it.ran_on}".strip() for it in column)
        total_s = sum(it.elapsed_s for it in column)
        numbers = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        lines.append(f"\n{variant}: {len(column)} cases: {numbers}; {total_s:.0f} s")
    return "\n".join(lines)


def _report(result: Result) -> None:
    print(f"{result.elapsed_s:6.1f} s {result.status:8} {result.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
