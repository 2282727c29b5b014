"""Published best configurations are among the first ten degrees of a search, as far as measured."""

import csv
from contextlib import suppress
from pathlib import Path

import pytest

from plait.errors import PlanError
from plait.planner import ModelShape, Workload, cluster, search

ROWS = Path(__file__).parents[1] / "data" / "planner" / "published_best.csv"


@pytest.mark.sweep
def test_published_degrees_are_among_the_first_ten() -> None:
    """Prints the rank of each, and the first plan. Measured: 11 of 18."""
    found = 0
    with ROWS.open() as file:
        for row in csv.DictReader(file):
            degrees = tuple(int(row[key]) for key in ("tp", "pp", "cp", "ep"))
            model, machine = ModelShape.named(row["model"]), cluster(row["cluster"])
            work, best = Workload(int(row["sequence"]), int(row["batch"])), []
            with suppress(PlanError):
                best = [each.plan for each in search(model, machine, work, top=10).best]
            keys = [(plan.rows * plan.cols, plan.pp, plan.cp, plan.ep) for plan in best]
            rank = keys.index(degrees) + 1 if degrees in keys else None
            print(row["model"], row["cluster"], degrees, "rank", rank, "first", best[:1])
            found += rank is not None
    assert found >= 11
