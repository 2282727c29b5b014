"""Where a step of DistributedDataParallel spends its time, by the size of buckets and by what carries them.

The sixth figure of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv 2006.15704): forward, backward, communication that backward does not hide, optimizer.

[Note: how a step is taken apart]
Ranks begin each phase together, behind a barrier. A round visits every variant, in an order of its own, and
a visit is two passes: one whose gradients are summed, followed by the optimizer, and one under `no_sync()`.
The second one's backward is the computation alone, with all ranks computing at once as in the first; what the
first one's takes longer is communication that was not hidden, with the copies into buckets and out of them.
It is a difference of two measurements: where all is hidden, noise may make it negative. A phase's time is
that of the slowest rank, and a variant's the median over rounds.

[Note: what variants share]
The weights, and so the optimizer: parameters of all variants are views of the same storage, and each visit
hands its gradients to the one optimizer. Else every variant would have its own 16 bytes per parameter; so it
has its buckets.
"""

import contextlib
import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from plait.bench.collectives import num_hosts, slowest
from plait.bench.ddp_request import MODELS, ONE, PRECISIONS, Cap, DdpRequest, label_of
from plait.comm import World, all_reduce, barrier
from plait.errors import CommError
from plait.models import causal_lm_on_meta, initialize_weights
from plait.parallel.ddp import DistributedDataParallel

T = TypeVar("T")

_NEVER_FULL = 1 << 40  # bytes: more than any model's gradients have
_MOST_OFF = 1e-3  # of a gradient's norm: ranks add in another order
_WARM_UP = 1  # rounds


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step's parts. `communication_s` is a difference, and may be negative."""

    forward_s: float
    backward_s: float  # under no_sync()
    communication_s: float  # what the backward that sums gradients takes longer
    optimizer_s: float

    @classmethod
    def of(cls, forward_s: float, alone_s: float, backward_s: float, optimizer_s: float) -> "Phases":
        """Of what a visit measures: the backward alone, and the one that sums gradients."""
        return cls(forward_s, alone_s, backward_s - alone_s, optimizer_s)

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.communication_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A variant: `carrier` is host or group. `phases` are medians over rounds, and so are the step's time and
    its ratio to the step without overlap in the same round, where that was measured."""

    carrier: str
    cap: Cap
    num_buckets: int
    phases: Phases
    step_s: float
    of_no_overlap: float | None


@dataclass(frozen=True)
class Breakdown:
    """What was measured, on what."""

    bars: tuple[Bar, ...]
    request: DdpRequest
    num_params: int
    num_ranks: int
    num_hosts: int
    seconds: float


def wrapped(module: nn.Module, cap: Cap, carrier: str) -> DistributedDataParallel:
    """`module` with buckets that close at `cap` bytes, its gradients summed over the host transport or the
    process group."""
    cap_bytes = _NEVER_FULL if cap is ONE else cap
    return DistributedDataParallel(module, bucket_cap_mb=cap_bytes / (1 << 20), transport=carrier)


def measure_ddp(world: World, request: DdpRequest, tell: Callable[[str], None] = lambda _: None) -> Breakdown:
    """Every rank calls it, with the same request, and gets the same. `tell` hears what is going on.

    Raises CommError when a variant does not average the gradients.
    """
    begin = time.perf_counter()
    tell("building the model")
    trainee = Trainee(world, request)
    variants = [_made(trainee, carrier, cap, tell) for carrier, cap in request.variants]
    times: list[list[float]] = []
    for number in range(-_WARM_UP, request.rounds):
        tell(f"measuring: round {number + 1} of {request.rounds}" if number >= 0 else "warming up")
        times.append(_round(trainee, variants, seed=number))
    buckets = [_num_buckets(variant) for variant in variants]
    return Breakdown(
        bars=bars_of(request.variants, buckets, slowest(world, times[_WARM_UP:])),
        request=request,
        num_params=sum(parameter.numel() for parameter in trainee.model.parameters()),
        num_ranks=world.size,
        num_hosts=num_hosts(world),
        seconds=time.perf_counter() - begin,
    )


class Trainee:
    """A model, its optimizer, and a rank's batch."""

    def __init__(self, world: World, request: DdpRequest) -> None:
        self._world = world
        self._autocast = PRECISIONS[request.precision]
        self.model = _llama(request.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (request.sequences, request.length)
        of_rank = torch.Generator().manual_seed(world.rank)
        self._ids = torch.randint(MODELS[request.model]["vocab_size"], shape, generator=of_rank)

    def twin(self) -> nn.Module:
        """The model once more, its parameters others whose values are the model's. See [Note: what variants
        share]."""
        shared = {id(p): nn.Parameter(p.detach()) for p in self.model.parameters()}
        return copy.deepcopy(self.model, shared)

    def check(self, module: DistributedDataParallel, name: str) -> None:
        """Raises CommError where gradients are not the mean of those that ranks compute alone: with the
        buckets of the first step, and with those of all later ones."""
        self._pass(module, synced=False)
        expected = [_gradient(parameter).clone() for parameter in module.parameters()]
        _drop(module)
        for gradient in expected:
            all_reduce(gradient, self._world.group)
            gradient /= self._world.size
        for _ in range(2):
            self._pass(module, synced=True)
            off = [_off(_gradient(p), mean) for p, mean in zip(module.parameters(), expected, strict=True)]
            _drop(module)
            if self._world.any_flag(not all(part <= _MOST_OFF for part in off)):
                raise CommError(
                    "gradients are not averaged",
                    given=f"{name}: off by {max(off):.1e} of a gradient on rank {self._world.rank}",
                    hint="another --transport",
                )

    def visit(self, module: DistributedDataParallel, *, alone_first: bool) -> list[float]:
        """This rank's seconds of forward, backward alone, backward with its sums, and optimizer."""
        alone_s = [self._alone_s(module)] if alone_first else []
        forward_s, backward_s = self._pass(module, synced=True)
        for parameter, twin in zip(self.model.parameters(), module.parameters(), strict=True):
            parameter.grad = twin.grad
        optimizer_s, _ = self._timed(self._optimizer.step)
        _drop(self.model)
        _drop(module)
        [alone] = alone_s or [self._alone_s(module)]
        return [forward_s, alone, backward_s, optimizer_s]

    def _alone_s(self, module: DistributedDataParallel) -> float:
        _, backward_s = self._pass(module, synced=False)
        _drop(module)
        return backward_s

    def _pass(self, module: DistributedDataParallel, *, synced: bool) -> tuple[float, float]:
        """Seconds of forward and backward."""
        with contextlib.nullcontext() if synced else module.no_sync():
            forward_s, loss = self._timed(lambda: self._loss(module))
            backward_s, _ = self._timed(loss.backward)
        return forward_s, backward_s

    def _loss(self, module: nn.Module) -> Tensor:
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            loss: Tensor = module(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        return loss

    def _timed(self, work: Callable[[], T]) -> tuple[float, T]:
        barrier(self._world.group)
        begin = time.perf_counter()
        result = work()
        return time.perf_counter() - begin, result


def bars_of(
    variants: Sequence[tuple[str, Cap]], num_buckets: Sequence[int], rounds: Sequence[Sequence[float]]
) -> tuple[Bar, ...]:
    """`rounds`: of each round, the seconds of the visits to all variants, one after the other."""
    phases = {
        variant: [Phases.of(*found[4 * place : 4 * place + 4]) for found in rounds]
        for place, variant in enumerate(variants)
    }
    return tuple(
        Bar(*variant, buckets, _medians(found), *_steps(found, phases.get((variant[0], ONE))))
        for (variant, found), buckets in zip(phases.items(), num_buckets, strict=True)
    )


def _medians(found: Sequence[Phases]) -> Phases:
    return Phases(*map(statistics.median, zip(*map(astuple, found), strict=True)))


def _steps(found: Sequence[Phases], without: Sequence[Phases] | None) -> tuple[float, float | None]:
    step_s = statistics.median(phases.step_s for phases in found)
    if without is None:
        return step_s, None
    return step_s, statistics.median(a.step_s / b.step_s for a, b in zip(found, without, strict=True))


def _llama(name: str) -> nn.Module:
    model = causal_lm_on_meta(MODELS[name])
    values: dict[str, Tensor] = {}
    initialize_weights(
        model, 0, torch.device("cpu"), lambda name, value: values.update({name: value.clone()})
    )
    model.load_state_dict(values, assign=True)
    return model.train()


def _made(trainee: Trainee, carrier: str, cap: Cap, tell: Callable[[str], None]) -> DistributedDataParallel:
    """A variant, whose gradients were found right."""
    name = f"{label_of(cap)} over {carrier}"
    tell(f"checking gradients: {name}")
    module = wrapped(trainee.twin(), cap, carrier)
    trainee.check(module, name)
    return module


def _round(trainee: Trainee, variants: Sequence[DistributedDataParallel], *, seed: int) -> list[float]:
    """This rank's seconds, four of each variant. See [Note: how a step is taken apart]."""
    by_chance = random.Random(seed)
    order = by_chance.sample(range(len(variants)), len(variants))
    found = {
        number: trainee.visit(variants[number], alone_first=by_chance.random() < 0.5) for number in order
    }
    return [seconds for number in range(len(variants)) for seconds in found[number]]


def _num_buckets(module: DistributedDataParallel) -> int:
    facts = module._get_ddp_logging_data()  # the only way to the buckets of later steps
    return len((facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]).split(","))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter without a gradient"
    return parameter.grad


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def _drop(module: nn.Module) -> None:
    module.zero_grad(set_to_none=True)
