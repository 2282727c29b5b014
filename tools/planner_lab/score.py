"""Score predictions against published runs: errors by source, ranking within groups, memory."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlanError
from plait.planner.calibrate import Run, fit
from plait.planner.constants import DEFAULT, Constants
from plait.planner.step_estimate import StepEstimate
from planner_lab.runs import Refused


@dataclass(frozen=True)
class ScoredRun:
    run: Run
    estimate: StepEstimate

    @property
    def error(self) -> float:
        """Signed relative error of the step's time."""
        assert self.run.step_s is not None
        return self.estimate.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float:
        """Signed relative error of the memory, of what the report counts."""
        assert self.run.memory_bytes is not None
        use = self.estimate.memory
        return (use.tensors if self.run.counts_tensors else use.total) / self.run.memory_bytes - 1


def estimate_all(
    runs: Iterable[Run | Refused], constants_of: Callable[[str], Constants] = lambda _: DEFAULT
) -> tuple[list[ScoredRun], list[Refused]]:
    """Price every run, with the constants for its source."""
    priced, refused = [], []
    for run in runs:
        if isinstance(run, Refused):
            refused.append(run)
            continue
        try:
            priced.append(ScoredRun(run, run.estimate(constants_of(run.source))))
        except (PlanError, ArithmeticError) as error:
            refused.append(Refused(run.row, run.source, str(error).split("\n")[0]))
    return priced, refused


def score_runs(priced: Sequence[ScoredRun], refused: Sequence[Refused]) -> dict[str, Any]:
    """Return the figures that `score --json` prints."""
    timed = [one for one in priced if one.run.step_s]
    by_source: dict[str, list[float]] = defaultdict(list)
    for one in timed:
        by_source[one.run.source].append(one.error)
    sources = {
        name: {"error": statistics.fmean(map(abs, errors)), "rows": len(errors)}
        for name, errors in by_source.items()
    }
    measured = [one.memory_error for one in priced if one.run.memory_bytes]
    return {
        "source_averaged_error": _mean([each["error"] for each in sources.values()]),
        "p90_error": _quantile([abs(one.error) for one in timed], 0.9),
        "bias": _mean([statistics.fmean(errors) for errors in by_source.values()]),
        "sources": sources,
        "groups": _groups(timed),
        "memory": {
            "error_mean": _mean(list(map(abs, measured))),
            "error_max": max(map(abs, measured), default=None),
            "rows": len(measured),
        },
        "false_fits": sum(
            one.run.ran_out and one.estimate.memory_high_bytes <= one.run.cluster.device.memory_bytes
            for one in priced
        ),
        "rows_priced": len(priced),
        "rows_refused": len(refused),
    }


def _groups(timed: Sequence[ScoredRun]) -> dict[str, Any]:
    """Ranking of the alternatives of a group of at least two different plans."""
    groups: dict[tuple[object, ...], list[ScoredRun]] = defaultdict(list)
    for one in timed:
        groups[one.run.group].append(one)
    spearmans, regrets = [], []
    for members in groups.values():
        if len({one.run.plans for one in members}) < 2:
            continue
        actual = [one.run.step_s or 0.0 for one in members]
        predicted = [one.estimate.step_s for one in members]
        regrets.append(actual[predicted.index(min(predicted))] / min(actual) - 1)
        if len(members) > 2:
            spearmans.append(spearman(actual, predicted))
    return {
        "spearman_mean": _mean(spearmans),
        "regret_mean": _mean(regrets),
        "regret_max": max(regrets, default=None),
        "count": len(regrets),
    }


def fit_without(runs: Sequence[Run], sources: Iterable[str]) -> dict[str, Constants]:
    """Constants for each source, fitted to the runs of all others; under "" the constants of all runs, which
    sources that `runs` does not have share."""
    own = {run.source for run in runs}
    everything = fit(runs)
    left_out = {
        source: fit([run for run in runs if run.source != source]) for source in sorted(own & set(sources))
    }
    return {**dict.fromkeys(sources, everything), **left_out, "": everything}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    first, second = _ranks(one), _ranks(other)
    center = (len(one) - 1) / 2
    covariance = math.fsum((a - center) * (b - center) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(
        math.fsum((a - center) ** 2 for a in first) * math.fsum((b - center) ** 2 for b in second)
    )
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    positions: dict[float, list[int]] = defaultdict(list)
    for position, value in enumerate(sorted(values)):
        positions[value].append(position)
    return [statistics.fmean(positions[value]) for value in values]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
