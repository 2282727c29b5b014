"""Weak and strong scaling of a family of plans, measured on local ranks and predicted beyond them.

A family is a plan's text with `{n}`, such as `dp={n} zero=1`. Weak scaling keeps the sequences per rank,
strong scaling those of a step. Efficiency is tokens per second and rank, by those of the fewest ranks.

[Note: threads of a rank]
Local ranks divide the host's cores between them. If one rank had all cores and each of n ranks a part, the
efficiency would compare threads, not plans. All plans of a family run with the threads of the most ranks:
fewer ranks leave cores idle, as they leave devices. An efficiency far above 100 % is an error of measurement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch
from rich.table import Table

from plait.bench.plans import MeasuredStep, run_steps, typical_step
from plait.bench.report import report_json
from plait.bench.request import MODELS, check_positions
from plait.comm.launch import num_cpus
from plait.errors import ConfigError, PlanError, ProfileError
from plait.pages.figures import Axis, Curve, Figure, figure_values
from plait.plan import Plan
from plait.planner.cluster import cluster
from plait.planner.model_shape import ModelShape
from plait.planner.plan_families import format_seconds
from plait.planner.step_estimate import estimate_step
from plait.planner.workload import Workload
from plait.tables import counted, table

Kind = Literal["weak", "strong"]
_HIGHEST = 1.10  # efficiency that caches and noise explain


@dataclass(frozen=True)
class ScalingRequest:
    """A family of plans, the numbers that take the place of `{n}`, and the work.

    measured   numbers whose plans run here
    beyond     numbers whose plans are priced only, on `machines`: a preset or a device of the planner
    sequences  per rank; strong scaling has those of the most measured ranks in every step
    """

    family: str
    measured: tuple[int, ...]
    kinds: tuple[Kind, ...] = ("weak", "strong")
    beyond: tuple[int, ...] = ()
    machines: str | None = None
    model: str = "small"
    sequences: int = 2
    length: int = 256
    steps: int = 5
    rounds: int = 2

    def __post_init__(self) -> None:
        if "{n}" not in self.family:
            raise ConfigError(
                "the family of plans has no number to vary",
                given=f"--plan {self.family!r}",
                expected="a plan with {n} for a degree",
                hint='--plan "dp={n}"',
            )
        if self.beyond and self.machines is None:
            raise ConfigError(
                "numbers beyond this machine need machines to predict",
                given=f"--beyond {','.join(map(str, self.beyond))}",
                expected="--cluster with a preset or a device",
                hint="--cluster h100",
            )
        check_positions(self.length)
        for kind in self.kinds:
            for number in self.measured:
                self.plan(number).check_batch(self.batch(kind, self.plan(number)))

    def plan(self, number: int) -> Plan:
        """The family's plan. Raises PlanError."""
        return Plan.parse(self.family.replace("{n}", str(number)))

    @property
    def most(self) -> int:
        """Ranks of the largest plan that runs here."""
        return max(self.plan(number).num_ranks for number in self.measured)

    @property
    def threads(self) -> int:
        """Threads of every rank; at most OMP_NUM_THREADS. See [Note: threads of a rank]."""
        return min(max(1, num_cpus() // self.most), torch.get_num_threads())

    def batch(self, kind: Kind, plan: Plan) -> int:
        """Sequences of a step."""
        return self.sequences * (plan.num_ranks if kind == "weak" else self.most)


@dataclass(frozen=True)
class Point:
    """A plan of the family. `step_s`: measured here, None beyond; `predicted_s`: None if it has no price."""

    kind: Kind
    plan: str
    ranks: int
    batch: int
    step_s: float | None
    predicted_s: float | None

    def tokens_per_s(self, length: int, *, predicted: bool = False) -> float | None:
        seconds = self.predicted_s if predicted else self.step_s
        return None if seconds is None else self.batch * length / seconds


def measure_scaling(request: ScalingRequest, report: Callable[[str], None]) -> list[Point]:
    """Run the plans in turn, some steps in each round, and price them. Raises PlaitError.

    The most ranks have the same batch in both kinds, and run once for both.
    """
    config, runs = MODELS[request.model], dict[tuple[Plan, int], list[MeasuredStep]]()
    plans = [request.plan(number) for number in request.measured]
    cases = dict.fromkeys((plan, request.batch(kind, plan)) for kind in request.kinds for plan in plans)
    for number_of_round, (plan, batch) in product(range(request.rounds), cases):
        report(f"round {number_of_round + 1} of {request.rounds}: {plan}, {batch} sequences")
        steps = run_steps(
            config,
            plan,
            sequence=request.length,
            batch=batch,
            steps=request.steps,
            threads=request.threads,
        )
        runs.setdefault((plan, batch), []).extend(steps)
    return list(_points(request, {case: typical_step(steps).seconds for case, steps in runs.items()}))


def _points(request: ScalingRequest, measured: dict[tuple[Plan, int], float]) -> Iterator[Point]:
    for kind in request.kinds:
        for number in dict.fromkeys((*request.measured, *request.beyond)):
            plan = request.plan(number)
            batch = request.batch(kind, plan)
            found, predicted = measured.get((plan, batch)), _predicted(request, plan, batch)
            if found is not None or predicted is not None:
                yield Point(kind, str(plan), plan.num_ranks, batch, found, predicted)


def _predicted(request: ScalingRequest, plan: Plan, batch: int) -> float | None:
    """Seconds of a step on the machines, or on this host as it was measured with the most ranks at work; None
    if either has no price."""
    name = f"{request.machines}:{plan.num_ranks}gpus" if request.machines else f"this:{request.most}"
    model = ModelShape.from_config(MODELS[request.model])
    try:
        return estimate_step(model, plan, cluster(name), Workload(request.length, batch)).step_s
    except (PlanError, ProfileError):
        return None


def efficiencies(points: Sequence[Point], *, predicted: bool) -> dict[Point, float]:
    """Tokens per second and rank, by those of the kind's point with the fewest ranks."""
    found: dict[Point, float] = {}
    for kind in dict.fromkeys(point.kind for point in points):
        per_rank = {
            point: rate / point.ranks
            for point in points
            if point.kind == kind and (rate := point.tokens_per_s(1, predicted=predicted)) is not None
        }
        fewest = min(per_rank, key=lambda point: point.ranks, default=None)
        found |= {point: rate / per_rank[fewest] for point, rate in per_rank.items() if fewest is not None}
    return found


def scaling_tables(request: ScalingRequest, points: Sequence[Point]) -> list[Table]:
    """Return a table of measured and one of predicted steps."""
    work = f"{request.model} Llama, {request.length:,} tokens a sequence"
    threads = f"{counted(request.threads, 'thread')} per rank"
    titles = {
        False: f"{request.family}, {work}: measured, {threads}",
        True: f"predicted on {request.machines or 'this machine'}",
    }
    return [
        _table(request, points, title, predicted=flag)
        for flag, title in titles.items()
        if efficiencies(points, predicted=flag)
    ]


def _table(request: ScalingRequest, points: Sequence[Point], title: str, *, predicted: bool) -> Table:
    rows = [
        (
            point.kind,
            f"{point.ranks:,}",
            f"{point.batch:,}",
            format_seconds((point.predicted_s if predicted else point.step_s) or 0.0),
            f"{point.tokens_per_s(request.length, predicted=predicted) or 0.0:,.0f}",
            f"{share:.0%}" + (" (!)" if not predicted and share > _HIGHEST else ""),
        )
        for point, share in efficiencies(points, predicted=predicted).items()
    ]
    headings = ("", "ranks", "batch", "step", "tokens/s", "efficiency")
    caption = "efficiency: tokens/s per rank, by those of the fewest ranks"
    if any(row[-1].endswith("(!)") for row in rows):
        caption += f"\n(!): above {_HIGHEST:.0%}, an error of measurement: try more --steps and --rounds"
    return table(title, headings, rows, caption=caption)


def scaling_json(request: ScalingRequest, points: Sequence[Point]) -> dict[str, Any]:
    """Return the request, and the points with their efficiencies."""
    shares = {flag: efficiencies(points, predicted=flag) for flag in (False, True)}
    rows = [
        asdict(point)
        | {"efficiency": shares[False].get(point), "predicted_efficiency": shares[True].get(point)}
        | {"is_error": shares[False].get(point, 0.0) > _HIGHEST}
        for point in points
    ]
    figures = figure_values(scaling_figures(request, points))
    return report_json("scaling", asdict(request) | {"threads": request.threads, "points": rows} | figures)


def scaling_figures(request: ScalingRequest, points: Sequence[Point]) -> list[Figure]:
    """Return efficiency and tokens per second over ranks, measured and predicted."""
    shares: list[Curve] = []
    rates: list[Curve] = []
    for kind, predicted in product(request.kinds, (False, True)):
        on = f"predicted on {request.machines or 'this machine'}" if predicted else "measured"
        style: Literal["line", "dashed"] = "dashed" if predicted else "line"
        found = efficiencies(points, predicted=predicted)
        own = [point for point in found if point.kind == kind]
        tokens = [(p.ranks, p.tokens_per_s(request.length, predicted=predicted) or 0.0) for p in own]
        if own:
            shares.append(Curve(f"{kind}, {on}", tuple((point.ranks, found[point]) for point in own), style))
            rates.append(Curve(f"{kind}, {on}", tuple(tokens), style))
    ranks = Axis("ranks", log=2)
    return [
        Figure("Efficiency", ranks, Axis("efficiency", "percent"), tuple(shares)),
        Figure("Throughput", ranks, Axis("tokens/s", log=10), tuple(rates)),
    ]
