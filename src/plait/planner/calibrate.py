"""Fit the constants of the time model to measured runs.

[Note: fit]
The residual of a run is the logarithm of predicted over measured time; the unknowns are the logarithms of
the constants, so that all stay positive. Every publisher weighs the same, however many rows it has. The sum
of absolute residuals is minimised by reweighted least squares (Gauss-Newton with a numerical Jacobian), which
outliers do not distort. A weak pull to physical first values, a factor of e weighing as much as an error of
`_PULL`, decides what the runs do not.

[Note: determined constants]
A few runs of one host cannot tell most constants apart. A constant is fitted to them only if a plausible
error of it (`_PLAUSIBLE`, of the logarithm) changes their times by more than steps vary (`_NOISE`), beyond
what the constants chosen before it can change likewise: columns of the Jacobian, orthogonalised with
pivoting, so that there are at most as many as runs. The others keep their values.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.plan import Plan
from plait.planner.cluster import Cluster
from plait.planner.constants import DEFAULT, LIMITS, MEASURED, PRIOR, Constants
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import StepEstimate, estimate_step
from plait.planner.workload import Software, Workload

_PULL = 0.04
_STEP = 0.05  # of the numerical derivative
_ITERATIONS = 5
_LARGEST = 0.5  # change of a logarithm per iteration
_ROWS = 48  # of a source; more say nothing new
_FITTED = tuple(name for name in Constants.names() if name not in MEASURED)


@dataclass(frozen=True)
class Run:
    """A measured run, on this machine or published. `row`: its number in the source. `plans`: more than one
    if the source leaves something open. `step_s`, `memory_bytes`: measured, None if it does not say.
    `ran_out`: it ran out of memory. `counts_tensors`: its memory counts tensors only, not all of the
    device's. `publisher`: of the source; documents of one publisher are of similar programs."""

    row: int
    source: str
    model: ModelShape
    plans: tuple[Plan, ...]
    cluster: Cluster
    work: Workload
    software: Software
    step_s: float | None
    memory_bytes: float | None = None
    ran_out: bool = False
    counts_tensors: bool = False
    publisher: str = ""

    @property
    def group(self) -> tuple[object, ...]:
        """Runs that are alternatives: same source, model, devices and batch."""
        return self.source, self.model, self.cluster.device.name, self.plans[0].num_ranks, self.work

    @property
    def precision(self) -> str:
        """The precision of its products."""
        return self.plans[0].precision

    def estimate(self, constants: Constants = DEFAULT) -> StepEstimate:
        on = replace(self.cluster, constants=constants)
        estimates = [estimate_step(self.model, plan, on, self.work, self.software) for plan in self.plans]
        fitting = [p for p in estimates if p.memory_high_bytes <= self.cluster.device.memory_bytes]
        return min(fitting or estimates, key=lambda p: p.step_s)


def fit(
    runs: Sequence[Run],
    start: Constants = PRIOR,
    names: Sequence[str] = _FITTED,
    limits: Mapping[str, float] = LIMITS,
) -> Constants:
    """Return the constants that price these runs best; constants that `names` lacks stay. See [Note: fit]."""
    chosen = _sample([run for run in runs if run.step_s])
    if not chosen:
        return start
    rows = Counter(run.publisher for run in chosen)
    shares = [1 / (len(rows) * rows[run.publisher]) for run in chosen]
    prior = [math.log(getattr(start, name)) for name in names]
    at = list(prior)
    best, best_loss = at, math.inf
    for _ in range(_ITERATIONS + 1):
        constants = _constants(start, names, at)
        # The plans of open rows that are the best ones at these constants.
        decided = [replace(run, plans=(run.estimate(constants).plan,)) for run in chosen]
        residuals = _residuals(decided, constants)
        loss = sum(share * abs(r) for share, r in zip(shares, residuals, strict=True))
        if loss < best_loss:
            best, best_loss = at, loss
        weights = [share / max(abs(r), 0.02) for share, r in zip(shares, residuals, strict=True)]
        columns = _jacobian(decided, constants, names, residuals)
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
            min(value + max(-_LARGEST, min(_LARGEST, change)), math.log(limits.get(name, math.inf)))
            for name, value, change in zip(names, at, step, strict=True)
        ]
    return _constants(start, names, best)


def determined(runs: Sequence[Run], start: Constants) -> tuple[str, ...]:
    """Return the names of the constants that these runs determine. See [Note: determined constants]."""
    names = Constants.names()
    columns = dict(zip(names, _jacobian(runs, start, names, _residuals(runs, start)), strict=True))
    chosen: list[str] = []
    while len(chosen) < len(runs):
        sizes = {name: math.sqrt(_dot(column, column)) for name, column in columns.items()}
        largest = max(sizes, key=sizes.__getitem__)
        if _PLAUSIBLE * sizes[largest] < _NOISE * math.sqrt(len(runs)):
            break
        chosen.append(largest)
        unit = [value / sizes[largest] for value in columns.pop(largest)]
        columns = {
            name: [value - _dot(column, unit) * each for value, each in zip(column, unit, strict=True)]
            for name, column in columns.items()
        }
    return tuple(chosen)


_PLAUSIBLE, _NOISE = 0.5, 0.03


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _constants(start: Constants, names: Sequence[str], logarithms: Sequence[float]) -> Constants:
    return replace(start, **{name: math.exp(at) for name, at in zip(names, logarithms, strict=True)})


def _jacobian(
    runs: Sequence[Run], at: Constants, names: Sequence[str], residuals: Sequence[float]
) -> list[list[float]]:
    """Change of the residuals per change of each constant's logarithm."""
    columns = []
    for name in names:
        moved = replace(at, **{name: getattr(at, name) * math.exp(_STEP)})
        columns.append([(b - a) / _STEP for a, b in zip(residuals, _residuals(runs, moved), strict=True)])
    return columns


def _residuals(runs: Sequence[Run], constants: Constants) -> list[float]:
    return [math.log(run.estimate(constants).step_s / (run.step_s or 1.0)) for run in runs]


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
