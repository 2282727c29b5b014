"""Write the last section of docs/hybrid.md: the results of the last sweep of hybrid plans.

`make sweep`, or `pytest tests/ranks/test_hybrid.py -m sweep`, leaves its results in build/hybrid_sweep.jsonl;
`python tools/hybrid_table.py` turns them into tables.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "hybrid_sweep.jsonl"
PAGE = ROOT / "docs" / "hybrid.md"
TITLE = "## The last sweep\n"
TOLERANCE = 1e-9

HEAD = """
Under every plan, a small model is trained for three steps in float64, with AdamW, weight decay,
active clipping, unevenly masked labels, and stages that differ in depth. The loss and gradient norm
of every step, all gradients of every step, and the final weights are compared with those of the
one-process program. The reported difference is the largest of any element, relative to the largest
element of all gradients (or weights).

{date}, {machine}: **{passed} of {plans} plans within {tolerance:.0e}**, on 2 to {most} ranks,
largest difference {worst}.

`make test` runs {few} other plans, which cover every pair of options. `python tools/hybrid_table.py`
generates this section from the results of `make sweep`. The plans are drawn at random, with a fixed
seed, from the product of these options:

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    sweep, *lines = [json.loads(line) for line in options.results.read_text().splitlines()]
    before, title, _ = PAGE.read_text().partition(TITLE)
    assert title, f"{PAGE} has no section {TITLE.strip()!r}"
    PAGE.write_text(before + title + section_of(sweep, lines))


def section_of(sweep: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the section below its title. `sweep`: date, machine, and the number of plans of `make test`."""
    head = HEAD.format(
        **sweep,
        passed=sum(passes(line) for line in lines),
        plans=len(lines),
        tolerance=TOLERANCE,
        most=max(ranks_of(line["case"]) for line in lines),
        worst=worst(lines),
    )
    by_option: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    by_strands: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_strands[strands_of(line["case"])].append(line)
        for factor, option in line["case"].items():
            by_option[factor][option] += 1
    options = (
        (f"`{factor}`", ", ".join(f"{option} ({found[option]})" for option in sorted(found)))
        for factor, found in by_option.items()
    )
    strands = (
        (
            name,
            len(of),
            f"{min(r)}-{max(r)}" if min(r := [*map(ranks_of_line, of)]) < max(r) else r[0],
            worst(of),
        )
        for name, of in sorted(by_strands.items())
    )
    return (
        head
        + table(("factor", "options (number of plans)"), options)
        + "\n### By strands\n\n"
        + table(("strands", "plans", "ranks", "largest difference"), strands)
    )


def passes(line: Mapping[str, Any]) -> bool:
    return line["difference"] is not None and line["difference"] <= TOLERANCE


def worst(lines: Iterable[Mapping[str, Any]]) -> str:
    differences = [line["difference"] for line in lines]
    return "failed" if None in differences else f"{max(differences):.1e}"


def strands_of(case: Mapping[str, str]) -> str:
    """As in `pp x dp x tp sp zero=3`."""
    tp = "tp (rows)" if "x" in case["tp"] else "tp"
    axes = [
        name for name, degree in (("pp", case["pp"]), ("dp", case["dp"]), (tp, case["tp"])) if degree != "1"
    ]
    sp = " sp" if case.get("sp") == "true" else ""
    zero = f" zero={case['zero']}" if case["dp"] != "1" else ""
    return f"{' x '.join(axes)}{sp}{zero}"


def ranks_of_line(line: Mapping[str, Any]) -> int:
    return ranks_of(line["case"])


def ranks_of(case: Mapping[str, str]) -> int:
    rows, _, cols = case["tp"].rpartition("x")
    return int(case["pp"]) * int(case["dp"]) * int(rows or 1) * int(cols)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    main()
