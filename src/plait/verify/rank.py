"""Verifying on ranks: each trains under the plan, and the first one does the same in one process."""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.assembly import parallelize
from plait.comm import World, broadcast
from plait.engine import Engine
from plait.errors import ModelError, PlaitError
from plait.parallel import Precision
from plait.plan import Plan, Traffic, between
from plait.verify.oracle import ADAMW, CLIP_NORM, Course, Step, one_process
from plait.verify.places import places
from plait.verify.subject import Source, Subject, random_tokens
from plait.verify.verdict import MOST, Limits, Off, Outcome, Verdict, compare, noise_of
from plait.verify.wide import wide

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"}
LEAST = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Job:
    """One plan to verify. `samples`: of a step, over all ranks."""

    source: Source
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
    def from_values(cls, values: Mapping[str, Any]) -> "Job":
        return cls(**{**values, "source": Source(**values["source"])})

    def verdict(self, outcome: Outcome, **more: Any) -> Verdict:
        return Verdict(str(self.source), self.plan, self.dtype, self.num_ranks, outcome, **more)


class Verifier:
    """Of one rank. Keeps what one process computed: many plans of one source are held against the same."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[dict[str, Tensor], Course, Limits]] = {}

    def run(self, job: Job, world: World) -> Verdict | None:
        """The verdict, on the first rank. Every rank of the plan calls it."""
        with tempfile.TemporaryDirectory(prefix="plait-verify-") as folder, wide(_dtype(job)):
            subject = job.source.subject()
            try:
                engine = _engine(job, subject, world, folder)
            except PlaitError as error:  # which all ranks find
                return job.verdict(Outcome.REFUSED, letter=error.letter())
            weights = engine.whole_parameters()
            course, traffic = _train(job, subject, engine)
            verdict, expected = None, None
            if world.rank == 0:
                expected, limits = self._expected(job, subject, engine, weights)
                verdict = _judge(job, course, expected, limits, traffic)
            return _with_places(verdict, expected, engine)

    def _expected(
        self, job: Job, subject: Subject, engine: Engine, weights: dict[str, Tensor]
    ) -> tuple[Course, Limits]:
        """What one process comes to from these weights, which no plan may change."""
        micros = engine.plan.dp * engine.plan.micro
        key = (str(job.source), job.dtype, job.steps, job.samples, job.length, job.seed)
        if key not in self._known:
            self._known.clear()  # of one source at a time
            self._known[key] = (weights, *_one_process(job, subject, weights, micros))
        first, course, limits = self._known[key]
        for name, weight in weights.items():
            if not torch.equal(weight, first[name]):
                raise ModelError(
                    "initial weights depend on the plan",
                    given=f"{name}, {engine.plan}",
                    expected="the same weights whenever the model is built, or a model on meta",
                    hint="torch.manual_seed(0) in the function that builds the model",
                )
        return course, limits


def _dtype(job: Job) -> torch.dtype:
    return {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}[job.dtype]


def _engine(job: Job, subject: Subject, world: World, folder: str) -> Engine:
    plan = Plan.parse(job.plan)
    return parallelize(
        subject.build(),
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


def _train(job: Job, subject: Subject, engine: Engine) -> tuple[Course, Traffic]:
    course, said = Course(), engine.world.ledger.read()
    for step in range(job.steps):
        batch = _batch(job, subject, step, engine.model)
        before = engine.world.ledger.read()
        result = engine.step(
            {key: value.chunk(engine.data_ranks)[engine.data_rank] for key, value in batch.items()}
        )
        said = between(before, engine.world.ledger.read())
        course.steps.append(Step(result.loss, result.grad_norm))
        course.gradients.append(engine.whole_gradients())
    course.weights = engine.whole_parameters()
    return course, said


def _batch(job: Job, subject: Subject, step: int, model: Any) -> Mapping[str, Tensor]:
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
    job: Job, subject: Subject, weights: Mapping[str, Tensor], micros: int
) -> tuple[Course, Limits]:
    precision = Precision.of(Plan(precision=PRECISIONS[job.dtype]))
    model = subject.build_whole()
    data = []
    for step in range(job.steps):
        parts = {key: value.chunk(micros) for key, value in _batch(job, subject, step, model).items()}
        data.append([{key: chunks[n] for key, chunks in parts.items()} for n in range(micros)])
    run = functools.partial(one_process, weights=weights, loss=subject.loss)
    course = run(model, batches=data, compute=precision.compute, master=precision.master)
    least = LEAST[job.dtype] if job.tolerance is None else job.tolerance
    if job.dtype == "float64" or job.tolerance is not None:
        return course, Limits(least)
    with wide(torch.float64):
        exact = run(
            subject.build_whole(), batches=_in_float64(data), compute=torch.float64, master=torch.float64
        )
    noise, of_steps = noise_of(course, exact)
    return course, Limits(least, noise=noise, noise_of_steps=of_steps)


def _in_float64(data: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
    return [
        [
            {key: value.double() if value.is_floating_point() else value for key, value in micro.items()}
            for micro in micros
        ]
        for micros in data
    ]


def _judge(job: Job, mine: Course, theirs: Course, limits: Limits, traffic: Traffic) -> Verdict:
    is_same, found = compare(mine, theirs, limits)
    return job.verdict(
        Outcome.SAME if is_same else Outcome.DIFFERS,
        allowed=limits.of_steps,
        steps=tuple(mine.steps),
        expected=tuple(theirs.steps),
        worst=tuple(found[:MOST]),
        num_parameters=len(found),
        traffic=tuple((str(line), tally.count, tally.num_bytes) for line, tally in traffic.items()),
    )


def _with_places(verdict: Verdict | None, expected: Course | None, engine: Engine) -> Verdict | None:
    """Where numbers differ, of each parameter that is off the ranks whose pieces are. All ranks take part."""
    is_off = torch.zeros(1, device=engine.device)
    if verdict is not None:
        is_off += verdict.outcome is Outcome.DIFFERS
    broadcast(is_off, engine.world.group)
    if not is_off.item():
        return verdict
    last = {} if expected is None else expected.gradients[-1]
    found = places(last, [] if verdict is None else [off.name for off in verdict.worst], engine)
    if verdict is None:
        return None
    worst: list[Off] = [replace(off, where=found.get(off.name, "")) for off in verdict.worst]
    return replace(verdict, worst=tuple(worst))
