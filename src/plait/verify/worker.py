"""Verify on ranks: all ranks train under the plan, and rank 0 also trains the reference in one process."""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.api import parallelize
from plait.comm import World, all_gather, broadcast
from plait.engine.engine import Engine
from plait.engine.inputs import divide
from plait.engine.reference import Tolerances, relative_errors
from plait.engine.spec import Arguments, TrainingSpec, validate
from plait.errors import ModelError, PlaitError, PlanError
from plait.models import vocabulary_size
from plait.models.experts import experts_of
from plait.models.routers import router_loss
from plait.parallel.experts.capacity import Capacity
from plait.parallel.float8 import LayerProducts
from plait.parallel.zero.rank_context import Precision
from plait.plan import AXES, Grid, Plan, Traffic, subtract_traffic
from plait.plan.context import TokenOrder
from plait.plan.local_steps import LocalSteps
from plait.plan.plan import FLOAT8
from plait.verify.model_spec import ModelSource, ModelSpec, random_numbers, random_tokens
from plait.verify.packed import PackedBatches, check_packed, documents_alone, measured_leak
from plait.verify.result import (
    DEPENDS_ON_DIVISION,
    MAX_SHOWN,
    Outcome,
    Verdict,
    compare,
    rounding_noise,
    step_error,
)
from plait.verify.tiny_config import inputs_of
from plait.verify.trajectory import ADAMW, CLIP_NORM, TrainedStep, Trajectory, train_reference

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"} | {name: name for name in FLOAT8}
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2} | dict.fromkeys(FLOAT8, 2e-2)

_REFERENCE_READY = "plait: verify reference ready"


@dataclass(frozen=True)
class Case:
    """One plan to verify. `samples`: per step, over all ranks. `packed`: see packed.py."""

    source: ModelSource
    plan: str
    dtype: str
    steps: int
    samples: int
    length: int
    seed: int
    tolerance: float | None = None
    packed: bool = False

    @property
    def num_ranks(self) -> int:
        return Plan.parse(self.plan).num_ranks

    @property
    def local(self) -> tuple[LocalSteps, int]:
        """The plan's local steps, and the number of islands."""
        plan = Plan.parse(self.plan)
        return plan.local, plan.num_islands

    @property
    def num_steps(self) -> int:
        """Steps to train: with local steps, those of two exchanges or more."""
        between = Plan.parse(self.plan).local_steps
        return max(2, -(-self.steps // between)) * between if between else self.steps

    @property
    def precision(self) -> Precision:
        return Precision.from_plan(Plan(precision=PRECISIONS[self.dtype]))

    @property
    def base_tolerance(self) -> float:
        """The relative error that is allowed in addition to rounding."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance

    def example(self, spec: ModelSpec, model: nn.Module) -> Mapping[str, Tensor] | None:
        """A batch to trace the model with; None: trace with token ids."""
        has_others = (spec.batch is not None and not self.packed) or inputs_of(model)
        return _batch(self, spec, 0, model) if has_others else None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Case":
        return cls(**{**values, "source": ModelSource(**values["source"])})

    def verdict(self, outcome: Outcome, **more: Any) -> Verdict:
        return Verdict(str(self.source), self.plan, self.dtype, self.num_ranks, outcome, **more)


@dataclass(frozen=True)
class Dropped:
    """How a plan with `capacity` drops choices of experts. `order`: of a row's tokens over cp."""

    capacities: tuple[tuple[str, Capacity], ...]
    order: TokenOrder

    @classmethod
    def of_plan(cls, spec: TrainingSpec, case: Case) -> "Dropped | None":
        """None for a plan that drops none. Raises PlanError for a plan without a reference."""
        if not spec.routers.capacities:
            return None
        order = TokenOrder.of_method(spec.plan.cp_method, case.length, spec.plan.cp)
        if case.packed or order.num_filled:
            raise PlanError(
                "the choices that this plan drops have no reference in one process",
                given=f"{case.plan}, {'packed rows' if case.packed else f'--sequence {case.length}'}",
                expected="rows that are not packed, and whose tokens divide over cp",
                hint=str(replace(spec.plan, capacity="none")),
            )
        return cls(tuple(spec.routers.capacities.items()), order)

    def install(self, model: nn.Module, samples: int) -> None:
        """Let a model drop these in its forward. `samples`: of a rank's micro-batch; a batch has several."""
        for name, capacity in self.capacities:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._weights_kept, capacity, samples), with_kwargs=True)

    def _weights_kept(
        self, capacity: Capacity, samples: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x, experts_Tk, weights_Tk = [*args, *kwargs.values()]
        rows = torch.arange(len(experts_Tk)).view(-1, samples, self.order.num_tokens)
        kept_Tk, length = torch.empty_like(experts_Tk, dtype=torch.bool), self.order.run_length
        for rows_BS in rows:
            for rank in range(self.order.num_ranks):
                runs = [rows_BS[:, start : start + length] for start in self.order.starts(rank)]
                own = torch.cat(runs, 1).flatten()
                kept_Tk[own] = capacity.kept(experts_Tk[own], module.num_experts)
        return (x, experts_Tk, weights_Tk * kept_Tk), {}


def common_experts(source: ModelSource) -> int:
    """Return the greatest number that divides those of experts; 1 for a model that `ep` does not divide."""
    try:
        return math.gcd(*(experts.number for experts in experts_of(source.spec().build(torch.float32), 1)))
    except ModelError:
        return 1


def check(case: Case) -> tuple[ModelSpec, LayerProducts, Dropped | None]:
    """Return the model to verify, the products of its layers, and what the plan drops. Raises PlanError or
    ModelError if the plan cannot shard it. Needs no ranks."""
    spec, plan = case.source.spec(), Plan.parse(case.plan)
    if (plan.exchange, plan.exchange_parts) != ("fp32", 1):
        raise PlanError(
            "this exchange of local steps has no reference: it rounds, or depends on the layout of ranks",
            given=f"exchange={plan.exchange} exchange_parts={plan.exchange_parts}",
            expected="exchange=fp32 exchange_parts=1",
            hint=str(replace(plan, exchange="fp32", exchange_parts=1)),
        )
    if plan.num_servers and plan.sync != "all":
        raise PlanError(
            "the results of these parameter servers depend on which worker is faster",
            given=case.plan,
            expected="sync=all, whose results are those of zero=1",
            hint=f"dp={plan.dp} zero=1",
        )
    plan.check_no_servers("plait verify")
    model = spec.build(torch.float32)
    valid = validate(
        Arguments(
            model,
            plan,
            loss=spec.loss,
            blocks=spec.blocks,
            tensor_plan=spec.tensor_plan,
            example_batch=case.example(spec, model),
        )
    )
    if case.packed:
        first = check_packed(model, spec, case.dtype)
        spec = replace(spec, batch=PackedBatches(vocabulary_size(model) or 0, first, case.length, case.seed))
    return spec, LayerProducts.build(valid.plan, valid.float8), Dropped.of_plan(valid, case)


class Verifier:
    """Verifies cases on one rank. Caches reference runs, which many plans of one source share."""

    def __init__(self) -> None:
        self._key: object = None
        self._weights: Mapping[str, Tensor] = {}
        self._references: dict[object, tuple[Trajectory, Tolerances]] = {}

    def run(self, case: Case, world: World, folder: Path) -> Verdict | None:
        """Return the verdict on rank 0. Collective over the plan's ranks. `folder`: for offload=disk."""
        try:
            spec, products, dropped = check(case)
        except PlaitError as error:  # raised on all ranks; an error on one rank later ends all of them
            return case.verdict(Outcome.REFUSED, message=error.message())
        with warnings.catch_warnings():
            # The verdict reports it.
            warnings.filterwarnings("ignore", ".*BatchNorm computes with the statistics")
            warnings.filterwarnings("ignore", ".*CPUs have no float8 products")
            engine = _engine(case, spec, world, folder)
        weights = engine.full_parameters()
        leak = measured_leak(engine, spec, case.samples) if case.packed else None
        if world.rank:
            world.store.wait_for(_REFERENCE_READY)  # may take longer than a step's timeout
            _train(case, spec, engine, None)
            return None
        division = (engine.plan.dp, engine.plan.micro)
        of_tokens = dropped is None and (spec.loss is not None or router_loss(engine.model) is None)
        first = (engine.plan.num_islands, 1) if of_tokens else division
        of_layers = products, dropped
        expected, tolerances = self._reference(case, spec, of_layers, weights, first)
        world.store.set(_REFERENCE_READY)
        comparator = Comparator(case, expected, tolerances)
        verdict = _train(case, spec, engine, comparator)
        assert verdict is not None, "rank 0 has no verdict"
        if leak is not None:
            verdict = replace(verdict, leak=leak.largest)
            if problem := leak.problem(case.dtype):
                return replace(verdict, outcome=Outcome.DIFFERS, message=problem)
            return verdict
        if verdict.outcome is Outcome.SAME or division == first:
            return verdict
        is_divided = comparator.matches(*self._reference(case, spec, of_layers, weights, division))
        return replace(verdict, message=DEPENDS_ON_DIVISION) if is_divided else verdict

    def _reference(
        self,
        case: Case,
        spec: ModelSpec,
        of_layers: tuple[LayerProducts, Dropped | None],
        weights: dict[str, Tensor],
        division: tuple[int, int],
    ) -> tuple[Trajectory, Tolerances]:
        """Return the reference run from these weights, which must not depend on the plan. `division`: of the
        batch, into shares of data ranks, and of these into micro-batches."""
        key = (case.source, case.dtype, case.seed)
        if self._key != key:  # the cache is for one source at a time
            self._key, self._weights, self._references = key, weights, {}
        products, dropped = of_layers
        balance = Plan.parse(case.plan).router_balance
        data = (case.num_steps, case.samples, case.length, case.packed, balance)
        data_key = (division, products.layers.names, dropped, data, case.tolerance, case.local)
        for name, weight in weights.items():
            if not torch.equal(weight, self._weights[name]):
                raise ModelError(
                    "initial weights depend on the plan",
                    given=f"{name}, {case.plan}",
                    expected="the same weights whenever the model is built, or a model on meta",
                    hint="torch.manual_seed(0) in the function that builds the model",
                )
        if data_key not in self._references:
            self._references[data_key] = _run_reference(case, spec, of_layers, weights, division)
        return self._references[data_key]


@dataclass
class Comparator:
    """Compares the ranks' run with the reference, step by step. On rank 0."""

    case: Case
    expected: Trajectory
    tolerances: Tolerances
    actual: Trajectory = field(default_factory=Trajectory)

    def check_step(self, step: TrainedStep, gradients: dict[str, Tensor]) -> bool:
        """Add the next step, and return whether it matches."""
        self.actual.steps.append(step)
        self.actual.gradients.append(gradients)
        number = len(self.actual.steps) - 1
        return step_error(step, self.expected.steps[number]) <= self.tolerances.of_steps and all(
            error <= self.tolerances.of(name)
            for name, error in relative_errors([gradients], [self.expected.gradients[number]]).items()
        )

    def matches(self, expected: Trajectory, tolerances: Tolerances) -> bool:
        """Return whether the ranks' run, as far as it went, matches another reference."""
        return compare(self.actual, expected, tolerances)[0]

    def verdict(self, traffic: Traffic, where: Mapping[str, str]) -> Verdict:
        """Return the verdict."""
        is_same, mismatches = compare(self.actual, self.expected, self.tolerances)
        return self.case.verdict(
            Outcome.SAME if is_same and self.actual.weights else Outcome.DIFFERS,
            tolerance=self.tolerances.of_steps,
            steps=tuple(self.actual.steps),
            reference_steps=tuple(self.expected.steps[: len(self.actual.steps)]),
            evaluation=(self.actual.evaluation, self.expected.evaluation) if self.actual.weights else None,
            worst_parameters=tuple(
                replace(worst, ranks=where.get(worst.name, "")) for worst in mismatches[:MAX_SHOWN]
            ),
            num_parameters=len(mismatches),
            traffic=tuple((str(key), count.count, count.num_bytes) for key, count in traffic.items()),
        )

    def worst_gradients(self) -> dict[str, Tensor]:
        """The reference gradients of the parameters that differ most in the last step, clipped as there."""
        worst = compare(self.actual, self.expected, self.tolerances)[1][:MAX_SHOWN]
        expected = self.expected.gradients[len(self.actual.steps) - 1]
        return {one.name: expected[one.name] * self.actual.steps[-1].clip_factor for one in worst}


def _engine(case: Case, spec: ModelSpec, world: World, folder: Path) -> Engine:
    plan, model = Plan.parse(case.plan), spec.build(case.precision.compute)
    return parallelize(
        model,
        plan,
        optimizer=torch.optim.AdamW,
        optimizer_args=ADAMW,
        clip_norm=CLIP_NORM,
        loss=spec.loss,
        blocks=spec.blocks,
        tensor_plan=spec.tensor_plan,
        example_batch=case.example(spec, model),
        offload_dir=folder if plan.offload == "disk" else None,
        seed=case.seed,
        world=world,
    )


def _train(case: Case, spec: ModelSpec, engine: Engine, comparator: Comparator | None) -> Verdict | None:
    """Train until the first mismatch: later steps would be wrong because of it."""
    traffic: Traffic = {}
    for step in range(case.num_steps):
        batch = _batch(case, spec, step, engine.model)
        before = engine.world.comm_log.read()
        share, micro = divide(batch, engine.data_ranks)[engine.data_rank], engine.plan.micro
        has_rows = len({len(value) for value in share.values()}) == 1
        result = engine.step(share if has_rows else divide(share, micro))
        traffic = subtract_traffic(before, engine.world.comm_log.read())
        done = TrainedStep(result.loss, result.grad_norm)
        gradients = {name: g.cpu() / done.clip_factor for name, g in engine.full_gradients().items()}
        is_same = comparator is None or comparator.check_step(done, gradients)
        if engine.world.any_flag(not is_same):
            # The gradients of other islands are others.
            expected = {} if comparator is None or case.local[1] > 1 else comparator.worst_gradients()
            where = locate_mismatches(expected, engine, tolerance=case.base_tolerance)
            return None if comparator is None else comparator.verdict(traffic, where)
    weights = {name: weight.cpu() for name, weight in engine.full_parameters().items()}
    buffers = {name: buffer.cpu() for name, buffer in engine.full_buffers().items()}
    share = divide(_batch(case, spec, case.num_steps, engine.model), engine.data_ranks)[engine.data_rank]
    evaluated = engine.evaluate(share)
    if comparator is None:
        return None
    actual = comparator.actual
    actual.weights, actual.buffers = weights, buffers
    actual.evaluation = evaluated.loss_sum / max(evaluated.num_tokens, 1)
    return comparator.verdict(traffic, {})


def _batch(case: Case, spec: ModelSpec, step: int, model: Any) -> Mapping[str, Tensor]:
    if spec.batch is not None:
        return spec.make_batch(step, case.samples)
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise ModelError(
            "the inputs of this model are unknown",
            given=f"{type(model).__name__}, which has no config.vocab_size",
            expected="config.vocab_size, for random tokens",
            hint="a function that returns plait.verify.ModelSpec(model=..., batch=..., loss=...)",
        )
    tokens = random_tokens(vocabulary, case.seed, step, case.samples, case.length)
    return tokens | random_numbers(inputs_of(model), case.seed, step, case.samples)


def _run_reference(
    case: Case,
    spec: ModelSpec,
    of_layers: tuple[LayerProducts, Dropped | None],
    weights: Mapping[str, Tensor],
    division: tuple[int, int],
) -> tuple[Trajectory, Tolerances]:
    precision, (shares, micros), (products, dropped) = case.precision, division, of_layers
    model = spec.build_reference(precision.compute)
    products.convert(model)
    *batches, evaluated = [_batch(case, spec, step, model) for step in range(case.num_steps + 1)]
    parts = documents_alone if case.packed else partial(divide, num_parts=micros)
    data = [[parts(share) for share in divide(batch, shares)] for batch in batches]
    last = documents_alone(evaluated) if case.packed else [evaluated]
    has_router_loss = spec.loss is None and router_loss(model) is not None
    # Of the tokens of all ranks of an island
    size = shares // case.local[1] if has_router_loss else 1
    if has_router_loss or dropped is not None:
        data = [[joined(of[at : at + size]) for at in range(0, shares, size)] for of in data]
        if Plan.parse(case.plan).router_balance == "step":
            data = [[joined([[micro] for micro in of]) for of in each] for each in data]
        of_ranks = [divide(share, micros) for share in divide(evaluated, shares)]
        last = [micro for at in range(0, shares, size) for micro in joined(of_ranks[at : at + size])]
    samples = case.samples // (shares * micros)
    if dropped is not None:
        dropped.install(model, samples)
    trajectory = train_reference(model, weights, data, last, precision, spec.loss, case.local)
    if case.dtype == "float64" or case.tolerance is not None:
        return trajectory, Tolerances(case.base_tolerance)
    float64 = Precision(torch.float64, torch.float64)
    in_float64 = spec.build_reference(torch.float64)
    if dropped is not None:
        dropped.install(in_float64, samples)
    exact = train_reference(in_float64, weights, data, last, float64, spec.loss, case.local)
    noise, step_noise = rounding_noise(trajectory, exact)
    if not math.isfinite(step_noise + sum(noise.values())):
        raise ModelError(
            f"in {case.dtype} the model cannot train for {case.num_steps} steps in one process either",
            given="a non-finite loss or gradient",
            expected="finite losses and gradients",
            hint="--dtype float64",
        )
    return trajectory, Tolerances(case.base_tolerance, noise=noise, step_noise=step_noise)


def joined(shares: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """The micro-batches that data ranks have at the same time, each as one."""
    of_all = ([micro for micro in micros if micro] for micros in zip_longest(*shares))
    return [{key: torch.cat([micro[key] for micro in micros]) for key in micros[0]} for micros in of_all]


def locate_mismatches(expected: Mapping[str, Tensor], engine: Engine, *, tolerance: float) -> dict[str, str]:
    """Map each parameter to the ranks whose gradient shards, in the last step, differ from `expected`.

    `expected` and the result, descriptions as in `describe_ranks`, are rank 0's; {} on the others.
    `tolerance`: relative to the norm of a shard. Collective.
    """
    world, shapes = engine.world, engine.weight_shapes()
    order = list(shapes)
    indices = torch.full((len(shapes),), -1, device=engine.device)
    for position, name in enumerate(expected):
        indices[position] = order.index(f"weights/{name}")
    broadcast(indices, world.group)
    descriptions: dict[str, str] = {}
    for index in indices[indices >= 0].tolist():
        name = order[index].removeprefix("weights/")
        reference = torch.empty(shapes[order[index]], dtype=torch.float64, device=engine.device)
        if world.rank == 0:
            reference.copy_(expected[name])
        broadcast(reference, world.group)
        own = engine.gradient_distance(name, reference)
        row = torch.tensor(own or (-1.0, -1.0), dtype=torch.float64, device=engine.device)
        rows = row.new_empty(2 * world.size)
        all_gather(rows, row, world.group)
        if world.rank == 0:
            errors = rows.view(-1, 2).tolist()
            descriptions[name] = _description(errors, tolerance, Grid.from_plan(engine.plan))
    return descriptions


def _description(errors: Sequence[Sequence[float]], tolerance: float, grid: Grid) -> str:
    """`errors`: per rank the squared norms of its shard's error and of the reference; negative: no shard."""
    holders = [rank for rank, (_, square) in enumerate(errors) if square >= 0]
    largest = max((square for _, square in errors), default=0.0)
    allowed = {rank: tolerance * math.sqrt(max(errors[rank][1], 1e-6 * largest, 1e-60)) for rank in holders}
    wrong = [rank for rank in holders if not math.sqrt(errors[rank][0]) <= allowed[rank]]  # or it is NaN
    return describe_ranks(wrong, holders, grid) if wrong else ""


def describe_ranks(wrong: Collection[int], holders: Collection[int], grid: Grid) -> str:
    """Describe the wrong ranks by their coordinates on the axes where not all holders are wrong.

    Such as `col=1` or `replicate=0,1 col=1`; `all ranks` if all holders of the parameter are wrong; rank
    numbers if they are not a block of the grid.
    """
    if set(wrong) == set(holders):
        return "all ranks"
    coords = {rank: grid.coord(rank) for rank in holders}
    parts, block = [], set(holders)
    for axis in AXES:
        values = {coords[rank][axis] for rank in wrong}
        if values != {coords[rank][axis] for rank in holders}:
            parts.append(f"{axis}={','.join(map(str, sorted(values)))}")
            block = {rank for rank in block if coords[rank][axis] in values}
    return " ".join(parts) if block == set(wrong) else f"ranks {', '.join(map(str, sorted(wrong)))}"
