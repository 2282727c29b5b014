"""Fit the constants of the time model to measured runs.

[Note: fit]
The residual of a run is the logarithm of predicted over measured time; the unknowns are the logarithms of
the constants, so that all stay positive. Every source weighs the same, however many rows it has. The sum of
absolute residuals is minimised by reweighted least squares (Gauss-Newton with a numerical Jacobian), which
outliers do not distort. A weak pull to physical first values, a factor of e weighing as much as an error of
`_PULL`, decides what the runs do not.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from plait.planner.constants import LIMITS, PRIOR, Constants
from plait.planner.runs import Run

_PULL = 0.04
_STEP = 0.05  # of the numerical derivative
_ITERATIONS = 5
_LARGEST = 0.5  # change of a logarithm per iteration
_ROWS = 48  # of a source; more say nothing new


def fit(runs: Sequence[Run], start: Constants = PRIOR) -> Constants:
    """Return the constants that price these runs best. See [Note: fit]."""
    chosen = _sample([run for run in runs if run.step_s])
    if not chosen:
        return start
    rows = Counter(run.source for run in chosen)
    shares = [1 / (len(rows) * rows[run.source]) for run in chosen]
    names = Constants.names()
    prior = [math.log(value) for value in asdict(start).values()]
    at = list(prior)
    best, best_loss = at, math.inf
    for _ in range(_ITERATIONS + 1):
        residuals = _residuals(chosen, at)
        loss = sum(share * abs(r) for share, r in zip(shares, residuals, strict=True))
        if loss < best_loss:
            best, best_loss = at, loss
        weights = [share / max(abs(r), 0.02) for share, r in zip(shares, residuals, strict=True)]
        columns = []
        for index in range(len(names)):
            moved = [value + (_STEP if i == index else 0.0) for i, value in enumerate(at)]
            columns.append(
                [(b - a) / _STEP for a, b in zip(residuals, _residuals(chosen, moved), strict=True)]
            )
        pull = _PULL**2 * sum(weights)
        matrix = [
            [
                sum(w * a * b for w, a, b in zip(weights, one, other, strict=True))
                + (pull if i == j else 0.0)
                for j, other in enumerate(columns)
            ]
            for i, one in enumerate(columns)
        ]
        right = [
            -sum(w * a * r for w, a, r in zip(weights, one, residuals, strict=True))
            - pull * (at[i] - prior[i])
            for i, one in enumerate(columns)
        ]
        step = _solve(matrix, right)
        at = [
            min(value + max(-_LARGEST, min(_LARGEST, change)), math.log(LIMITS.get(name, math.inf)))
            for name, value, change in zip(names, at, step, strict=True)
        ]
    return _constants(best)


def _constants(logarithms: Sequence[float]) -> Constants:
    return Constants(*(math.exp(value) for value in logarithms))


def _residuals(runs: Sequence[Run], logarithms: Sequence[float]) -> list[float]:
    constants = _constants(logarithms)
    return [math.log(run.price(constants).step_s / (run.step_s or 1.0)) for run in runs]


def _sample(runs: Sequence[Run]) -> list[Run]:
    """At most `_ROWS` of every source, evenly spread."""
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(run)
    chosen = []
    for members in by_source.values():
        stride = max(1.0, len(members) / _ROWS)
        chosen += [members[int(i * stride)] for i in range(int(len(members) / stride))]
    return chosen


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivoting."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for other in range(len(rows)):
            if other != column:
                factor = rows[other][column] / rows[column][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def fit_without(runs: Sequence[Run], sources: Iterable[str]) -> dict[str, Constants]:
    """Constants for each source, fitted to the runs of all others; under "" those of all runs. Sources that
    `runs` does not have share the latter."""
    own = {run.source for run in runs}
    everything = fit(runs)
    left_out = {
        source: fit([run for run in runs if run.source != source]) for source in sorted(own & set(sources))
    }
    return {**dict.fromkeys(sources, everything), **left_out, "": everything}
