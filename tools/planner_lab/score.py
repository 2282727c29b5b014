"""Score predictions against published runs: errors by publisher, ranking within groups, memory."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlanError
from plait.plan import Plan
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

    @property
    def is_inside(self) -> bool:
        """True if the measured step is inside the printed interval."""
        return self.estimate.low_s <= (self.run.step_s or 0.0) <= self.estimate.high_s

    @property
    def fits(self) -> bool:
        return self.estimate.memory_high_bytes <= self.run.cluster.device.memory_bytes


def estimate_all(
    runs: Iterable[Run | Refused], constants_of: Callable[[str], Constants] = lambda _: DEFAULT
) -> tuple[list[ScoredRun], list[Refused]]:
    """Price every run, with the constants for its publisher."""
    priced, refused = [], []
    for run in runs:
        if isinstance(run, Refused):
            refused.append(run)
            continue
        try:
            priced.append(ScoredRun(run, run.estimate(constants_of(run.publisher))))
        except (PlanError, ArithmeticError) as error:
            refused.append(Refused(run.row, run.source, str(error).split("\n")[0]))
    return priced, refused


def score_runs(priced: Sequence[ScoredRun], refused: Sequence[Refused]) -> dict[str, Any]:
    """Return the figures that `score --json` prints. Every publisher weighs the same, except in quantiles."""
    timed = [one for one in priced if one.run.step_s]
    by_publisher: dict[str, list[ScoredRun]] = defaultdict(list)
    for one in timed:
        by_publisher[one.run.publisher].append(one)
    constant = _constant_efficiency(by_publisher)
    publishers = {
        name: _errors(members) | {"constant_efficiency": constant[name]}
        for name, members in by_publisher.items()
    }
    kinds = {name: [one for one in timed if has(one.estimate.plan)] for name, has in _KINDS.items()}
    measured = [one.memory_error for one in priced if one.run.memory_bytes]
    ran, ran_out = ([one for one in priced if one.run.ran_out is out] for out in (False, True))
    means = {key: _mean(each[key] for each in publishers.values()) for key in _MEANS}
    return {
        **means,
        "p90_error": _quantile([abs(one.error) for one in timed], 0.9),
        "rows_inside": _mean(float(one.is_inside) for one in timed),
        "publishers": publishers,
        "kinds": {name: _errors(members) for name, members in kinds.items() if members},
        "groups": _groups(timed),
        "memory": {
            "error_mean": _mean(map(abs, measured)),
            "error_max": max(map(abs, measured), default=None),
            "rows": len(measured),
        },
        "false_fits": sum(one.fits for one in ran_out),
        "rows_ran_out": len(ran_out),
        "false_refusals": sum(not one.fits for one in ran),
        "rows_ran": len(ran),
        "rows_priced": len(priced),
        "rows_refused": len(refused),
    }


def _errors(members: Sequence[ScoredRun]) -> dict[str, float | None]:
    return {
        "error": statistics.fmean(abs(one.error) for one in members),
        "bias": statistics.fmean(one.error for one in members),
        "p90": _quantile([abs(one.error) for one in members], 0.9),
        "inside": statistics.fmean(one.is_inside for one in members),
        "rows": len(members),
    }


_KINDS: dict[str, Callable[[Plan], bool]] = {  # of plans, scored apart
    "cp > 1": lambda plan: plan.cp > 1,
    "ep > 1": lambda plan: plan.ep > 1,
    "fp8": lambda plan: plan.is_float8,
    "256 data ranks and more": lambda plan: plan.data_ranks >= 256,
}
_MEANS = ("error", "bias", "inside", "constant_efficiency")  # over publishers


def _constant_efficiency(by_publisher: Mapping[str, Sequence[ScoredRun]]) -> dict[str, float | None]:
    """Return the base line's error of each publisher: FLOPs over a constant share of the peak, the median of
    the other publishers' runs. Recompute and the bubble of the pipeline add to the FLOPs."""
    shares = {name: [_share_of_peak(one) for one in members] for name, members in by_publisher.items()}
    found: dict[str, float | None] = {}
    for name, own in shares.items():
        others = [share for other, of in shares.items() if other != name for share in of]
        # A step of the base line by the measured one: measured share by the constant one.
        found[name] = _mean(abs(share / statistics.median(others) - 1) for share in own) if others else None
    return found


def _share_of_peak(one: ScoredRun) -> float:
    run, plan = one.run, one.estimate.plan
    again = 4 / 3 if plan.recompute == "full" else 1.0
    bubble = 1 + (plan.pp - 1) / (plan.micro * max(1, plan.num_chunks))
    flops = run.model.training_flops_per_token(run.work.sequence) * run.work.tokens / plan.num_ranks
    peak = run.cluster.device.peak_flops[run.precision]
    return flops * again * bubble / peak / (run.step_s or 1.0)


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


def fit_without(runs: Sequence[Run], publishers: Iterable[str]) -> dict[str, Constants]:
    """Constants for each publisher, fitted to the runs of all others; under "" the constants of all runs,
    which publishers that `runs` does not have share."""
    own = {run.publisher for run in runs}
    everything = fit(runs)
    left_out = {
        name: fit([run for run in runs if run.publisher != name]) for name in sorted(own & set(publishers))
    }
    return {**dict.fromkeys(publishers, everything), **left_out, "": everything}


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


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
