"""Verifying on ranks: each trains under the plan, and the first one does the same in one process."""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.api import check_shardable, parallelize
from plait.comm import World
from plait.engine.engine import Engine
from plait.errors import ModelError, PlaitError
from plait.parallel import Precision
from plait.plan import Plan, Traffic, subtract_traffic
from plait.verify.locate import places
from plait.verify.model_spec import ModelSource, ModelSpec, random_tokens
from plait.verify.reference import ADAMW, CLIP_NORM, Step, Trajectory, one_process
from plait.verify.result import MOST, Limits, Outcome, Verdict, compare, farthest, noise_of

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"}
LEAST = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2}

_EXPECTED = "plait: verify expects"


@dataclass(frozen=True)
class Case:
    """One plan to verify. `samples`: of a step, over all ranks."""

    source: ModelSource
    plan: str
    dtype: str
    steps: int
    samples: int
    length: int
    seed: int
    tolerance: float | None = None

    @property
    def num_ranks(self) -> int:
        return Plan.parse(self.plan).num_ranks

    def to_values(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Case":
        return cls(**{**values, "source": ModelSource(**values["source"])})

    def verdict(self, outcome: Outcome, **more: Any) -> Verdict:
        return Verdict(str(self.source), self.plan, self.dtype, self.num_ranks, outcome, **more)


def least_of(job: Case) -> float:
    """The relative difference that is allowed whatever rounding does."""
    return LEAST[job.dtype] if job.tolerance is None else job.tolerance


def check(subject: ModelSpec, plan: Plan) -> None:
    """Raises PlanError or ModelError where the model cannot be cut as the plan says; needs no rank."""
    check_shardable(subject.build(torch.float32), plan, subject.tensor_plan, blocks=subject.blocks)


class Verifier:
    """Of one rank. Keeps what one process computed: many plans of one source are held against the same."""

    def __init__(self) -> None:
        self._of: object = None
        self._first: Mapping[str, Tensor] = {}
        self._known: dict[object, tuple[Trajectory, Limits]] = {}

    def run(self, job: Case, world: World, folder: Path) -> Verdict | None:
        """The verdict, on the first rank. Every rank of the plan calls it. `folder`: of offload=disk."""
        subject = job.source.subject()
        try:
            check(subject, Plan.parse(job.plan))
        except PlaitError as error:  # all ranks find it; what one of them finds later, ends all
            return job.verdict(Outcome.REFUSED, message=error.message())
        engine = _engine(job, subject, world, folder)
        weights = engine.full_parameters()
        if world.rank:
            world.wait_for(_EXPECTED)  # however long one process takes: a step has a time limit
            _train(job, subject, engine, None)
            return None
        expected, limits = self._expected(job, subject, engine, weights)
        world.announce(_EXPECTED)
        verdict = _train(job, subject, engine, Comparator(job, expected, limits))
        assert verdict is not None, "a judge without a verdict"
        return verdict

    def _expected(
        self, job: Case, subject: ModelSpec, engine: Engine, weights: dict[str, Tensor]
    ) -> tuple[Trajectory, Limits]:
        """What one process comes to from these weights, which no plan may change."""
        micros = engine.plan.dp * engine.plan.micro
        key = (job.source, job.dtype, job.seed)
        if self._of != key:  # what is known is of one source at a time
            self._of, self._first, self._known = key, weights, {}
        of_data = (micros, job.steps, job.samples, job.length, job.tolerance)
        for name, weight in weights.items():
            if not torch.equal(weight, self._first[name]):
                raise ModelError(
                    "initial weights depend on the plan",
                    given=f"{name}, {engine.plan}",
                    expected="the same weights whenever the model is built, or a model on meta",
                    hint="torch.manual_seed(0) in the function that builds the model",
                )
        if of_data not in self._known:
            self._known[of_data] = _one_process(job, subject, weights, micros)
        return self._known[of_data]


@dataclass
class Comparator:
    """Of the first rank: knows what is expected, and is shown what the ranks come to, step by step."""

    job: Case
    expected: Trajectory
    limits: Limits
    mine: Trajectory = field(default_factory=Trajectory)

    def is_right(self, step: Step, gradients: dict[str, Tensor]) -> bool:
        """Of the next step."""
        self.mine.steps.append(step)
        self.mine.gradients.append(gradients)
        number = len(self.mine.steps) - 1
        return self.limits.hold(step, self.expected.steps[number]) and all(
            apart <= self.limits.of(name)
            for name, apart in farthest([gradients], [self.expected.gradients[number]]).items()
        )

    def verdict(self, weights: dict[str, Tensor], traffic: Traffic, where: Mapping[str, str]) -> Verdict:
        """`weights`: none, where a step was wrong and ended it."""
        self.mine.weights = weights
        is_same, found = compare(self.mine, self.expected, self.limits)
        return self.job.verdict(
            Outcome.SAME if is_same else Outcome.DIFFERS,
            allowed=self.limits.of_steps,
            steps=tuple(self.mine.steps),
            expected=tuple(self.expected.steps[: len(self.mine.steps)]),
            worst=tuple(replace(off, where=where.get(off.name, "")) for off in found[:MOST]),
            num_parameters=len(found),
            traffic=tuple((str(line), tally.count, tally.num_bytes) for line, tally in traffic.items()),
        )

    def farthest_of_last(self) -> list[str]:
        return [off.name for off in compare(self.mine, self.expected, self.limits)[1][:MOST]]


def _precision(job: Case) -> Precision:
    return Precision.of(Plan(precision=PRECISIONS[job.dtype]))


def _engine(job: Case, subject: ModelSpec, world: World, folder: Path) -> Engine:
    plan = Plan.parse(job.plan)
    return parallelize(
        subject.build(_precision(job).compute),
        plan,
        optimizer=torch.optim.AdamW,
        optimizer_args=ADAMW,
        clip_norm=CLIP_NORM,
        loss=subject.loss,
        blocks=subject.blocks,
        tensor_plan=subject.tensor_plan,
        offload_dir=folder if plan.offload == "disk" else None,
        seed=job.seed,
        world=world,
    )


def _train(job: Case, subject: ModelSpec, engine: Engine, judge: Comparator | None) -> Verdict | None:
    """Up to the first step that is wrong: what comes after it is wrong too, whatever the ranks do."""
    said: Traffic = {}
    for step in range(job.steps):
        batch = _batch(job, subject, step, engine.model)
        before = engine.world.ledger.read()
        share = {key: value.chunk(engine.data_ranks)[engine.data_rank] for key, value in batch.items()}
        result = engine.step(share)
        said = subtract_traffic(before, engine.world.ledger.read())
        done = Step(result.loss, result.grad_norm)
        gradients = {name: g.cpu() / done.clip_factor for name, g in engine.full_gradients().items()}
        is_right = judge is None or judge.is_right(done, gradients)
        if engine.world.any_flag(not is_right):
            names = judge.farthest_of_last() if judge is not None else []
            right = {} if judge is None else judge.expected.gradients[step]
            clipped = {name: right[name] * done.clip_factor for name in names}  # as those in the engine are
            where = places(clipped, names, engine, off=least_of(job))
            return None if judge is None else judge.verdict({}, said, where)
    weights = {name: weight.cpu() for name, weight in engine.full_parameters().items()}
    return None if judge is None else judge.verdict(weights, said, {})


def _batch(job: Case, subject: ModelSpec, step: int, model: Any) -> Mapping[str, Tensor]:
    if subject.batch is not None:
        return subject.batch(step, job.samples)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ModelError(
            "this model does not say what it takes",
            given=type(model).__name__,
            hint="a function that returns plait.verify.Subject(model=..., batch=..., loss=...)",
        )
    return random_tokens(vocabulary, job.seed, step, job.samples, job.length)


def _one_process(
    job: Case, subject: ModelSpec, weights: Mapping[str, Tensor], micros: int
) -> tuple[Trajectory, Limits]:
    precision = _precision(job)
    model = subject.build_whole(precision.compute)
    data = []
    for step in range(job.steps):
        parts = {key: value.chunk(micros) for key, value in _batch(job, subject, step, model).items()}
        data.append([{key: chunks[n] for key, chunks in parts.items()} for n in range(micros)])
    run = functools.partial(one_process, weights=weights, loss=subject.loss, batches=data)
    course = run(model, compute=precision.compute, master=precision.master)
    least = least_of(job)
    if job.dtype == "float64" or job.tolerance is not None:
        return course, Limits(least)
    whole = subject.build_whole(torch.float64)
    exact = run(whole, compute=torch.float64, master=torch.float64)
    noise, of_steps = noise_of(course, exact)
    if not math.isfinite(of_steps + sum(noise.values())):
        raise ModelError(
            f"in {job.dtype} the model does not get through {job.steps} steps in one process either",
            given="a loss or gradient that is not finite",
            hint="--dtype float64",
        )
    return course, Limits(least, noise=noise, noise_of_steps=of_steps)
