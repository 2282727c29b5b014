"""Breakdown of a DistributedDataParallel step's time, by bucket size and transport.

The sixth figure of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv 2006.15704): forward, backward, communication that backward does not hide, optimizer.

[Note: breakdown of a step]
Ranks start each phase together, after a barrier. A round visits every variant, in a new order, and a visit is
two passes: one whose gradients are reduced, followed by the optimizer, and one under `no_sync()`. The second
one's backward is the computation alone, with all ranks computing at once as in the first; the extra time of
the first one's is exposed communication, with the copies into buckets and out of them. It is a difference of
two measurements: where all is hidden, noise may make it negative. A phase's time is that of the slowest rank,
and a variant's the median over rounds.

[Note: state shared by variants]
The weights, and so the optimizer: parameters of all variants are views of the same storage, and each visit
passes its gradients to the one optimizer. Otherwise every variant would need its own 16 bytes per parameter;
only its buckets are its own.
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

from plait.bench.collectives import slowest
from plait.bench.request import MODELS, ONE_BUCKET, PRECISIONS, Cap, DdpRequest, cap_label, format_bytes
from plait.comm import World, all_reduce, barrier, ranks_by_host
from plait.errors import CommError, ConfigError
from plait.models import causal_lm_on_meta, initialize_weights
from plait.parallel.ddp import DistributedDataParallel

T = TypeVar("T")

_UNLIMITED_BYTES = 1 << 40  # bytes: more than any model's gradients
_MAX_ERROR = 1e-3  # relative to a gradient's norm: the order of addition differs
_WARM_UP = 1  # rounds


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step's phases. `communication_s` is a difference, and may be negative."""

    forward_s: float
    backward_s: float  # under no_sync()
    communication_s: float  # extra time of the backward that reduces gradients
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.communication_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A variant: `transport` is host or group. `phases` are medians over rounds, as are the step's time and
    its ratio to the step without overlap in the same round, if that was measured."""

    transport: str
    cap: Cap
    num_buckets: int
    phases: Phases
    step_s: float
    ratio_to_no_overlap: float | None


@dataclass(frozen=True)
class Breakdown:
    """Times, and the setup they were measured on."""

    bars: tuple[Bar, ...]
    request: DdpRequest
    num_params: int
    num_ranks: int
    num_hosts: int
    seconds: float


def wrap_ddp(module: nn.Module, cap: Cap, transport: str) -> DistributedDataParallel:
    """Wrap `module`: buckets close at `cap` bytes and are reduced over `transport` (host or group)."""
    cap_bytes = _UNLIMITED_BYTES if cap is ONE_BUCKET else cap
    return DistributedDataParallel(module, bucket_cap_mb=cap_bytes / (1 << 20), transport=transport)


def measure_ddp(
    world: World, request: DdpRequest, report_progress: Callable[[str], None] = lambda _: None
) -> Breakdown:
    """Measure all variants. Collective: every rank passes the same request and gets the same result.
    `report_progress` is called with a status line.

    Raises CommError when a variant does not average the gradients.
    """
    start = time.perf_counter()
    report_progress("building the model")
    bench_model = BenchModel(world, request)
    variants = [
        _build_variant(bench_model, transport, cap, report_progress) for transport, cap in request.variants
    ]
    times: list[list[float]] = []
    for index in range(-_WARM_UP, request.rounds):
        report_progress(f"measuring: round {index + 1} of {request.rounds}" if index >= 0 else "warming up")
        times.append(_round(bench_model, variants, seed=index))
    # The only API for the buckets of later steps.
    facts = [variant._get_ddp_logging_data() for variant in variants]
    buckets = [len((of.get("rebuilt_bucket_sizes") or of["bucket_sizes"]).split(",")) for of in facts]
    return Breakdown(
        bars=make_bars(request.variants, buckets, slowest(world, times[_WARM_UP:])),
        request=request,
        num_params=sum(parameter.numel() for parameter in bench_model.model.parameters()),
        num_ranks=world.size,
        num_hosts=len(ranks_by_host(world.group, world.device)),
        seconds=time.perf_counter() - start,
    )


class BenchModel:
    """A model, its optimizer, and this rank's batch."""

    def __init__(self, world: World, request: DdpRequest) -> None:
        self._world = world
        autocast = PRECISIONS[request.precision]
        self._autocast: torch.dtype | None = None if autocast is None else getattr(torch, autocast)
        self.model = _llama(request.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (request.sequences, request.length)
        generator = torch.Generator().manual_seed(world.rank)
        self._ids = torch.randint(MODELS[request.model]["vocab_size"], shape, generator=generator)

    def view_model(self) -> nn.Module:
        """Return a copy of the model that shares its storage. See [Note: state shared by variants]."""
        shared = {id(p): nn.Parameter(p.detach()) for p in self.model.parameters()}
        return copy.deepcopy(self.model, shared)

    def check(self, module: DistributedDataParallel, name: str) -> None:
        """Raise CommError unless gradients are the mean of those that ranks compute alone: with the buckets
        of the first step, and with those of all later ones."""
        self._forward_backward(module, sync=False)
        expected = [_gradient(parameter).clone() for parameter in module.parameters()]
        module.zero_grad()
        for gradient in expected:
            all_reduce(gradient, self._world.group)
            gradient /= self._world.size
        for _ in range(2):
            self._forward_backward(module, sync=True)
            errors = [
                float((_gradient(p) - mean).norm() / mean.norm().clamp(min=1e-12))
                for p, mean in zip(module.parameters(), expected, strict=True)
            ]
            module.zero_grad()
            if self._world.any_flag(not all(error <= _MAX_ERROR for error in errors)):
                raise CommError(
                    "gradients are not averaged",
                    given=f"{name}: off by {max(errors):.1e} of a gradient on rank {self._world.rank}",
                    expected=f"an error of at most {_MAX_ERROR:.0e}",
                    hint="another --transport",
                )

    def visit(self, module: DistributedDataParallel, *, compute_first: bool) -> list[float]:
        """Return this rank's seconds of forward, backward alone, backward with reductions, and optimizer."""
        compute_s = [self._compute_only_s(module)] if compute_first else []
        forward_s, backward_s = self._forward_backward(module, sync=True)
        for parameter, view in zip(self.model.parameters(), module.parameters(), strict=True):
            parameter.grad = view.grad
        optimizer_s, _ = self._timed(self._optimizer.step)
        self.model.zero_grad()
        module.zero_grad()
        [compute] = compute_s or [self._compute_only_s(module)]
        return [forward_s, compute, backward_s, optimizer_s]

    def _compute_only_s(self, module: DistributedDataParallel) -> float:
        _, backward_s = self._forward_backward(module, sync=False)
        module.zero_grad()
        return backward_s

    def _forward_backward(self, module: DistributedDataParallel, *, sync: bool) -> tuple[float, float]:
        """Return seconds of forward and backward."""
        with contextlib.nullcontext() if sync else module.no_sync():
            forward_s, loss = self._timed(lambda: self._loss(module))
            backward_s, _ = self._timed(loss.backward)
        return forward_s, backward_s

    def _loss(self, module: nn.Module) -> Tensor:
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            loss: Tensor = module(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        return loss

    def _timed(self, run: Callable[[], T]) -> tuple[float, T]:
        barrier(self._world.group)
        start = time.perf_counter()
        result = run()
        return time.perf_counter() - start, result


def make_bars(
    variants: Sequence[tuple[str, Cap]], num_buckets: Sequence[int], rounds: Sequence[Sequence[float]]
) -> tuple[Bar, ...]:
    """Return a bar per variant. `rounds`: the seconds of the visits to all variants, by round."""
    phases: dict[tuple[str, Cap], list[Phases]] = {}
    for index, variant in enumerate(variants):
        visits = [round_s[4 * index : 4 * index + 4] for round_s in rounds]
        phases[variant] = [
            Phases(forward_s, compute_s, backward_s - compute_s, optimizer_s)
            for forward_s, compute_s, backward_s, optimizer_s in visits
        ]
    return tuple(
        Bar(
            *variant,
            buckets,
            Phases(*map(statistics.median, zip(*map(astuple, phases_of_rounds), strict=True))),
            *_step_times(phases_of_rounds, phases.get((variant[0], ONE_BUCKET))),
        )
        for (variant, phases_of_rounds), buckets in zip(phases.items(), num_buckets, strict=True)
    )


def _step_times(
    phases_of_rounds: Sequence[Phases], no_overlap: Sequence[Phases] | None
) -> tuple[float, float | None]:
    step_s = statistics.median(phases.step_s for phases in phases_of_rounds)
    if no_overlap is None:
        return step_s, None
    return step_s, statistics.median(
        a.step_s / b.step_s for a, b in zip(phases_of_rounds, no_overlap, strict=True)
    )


def _llama(name: str) -> nn.Module:
    model = causal_lm_on_meta(MODELS[name])
    values: dict[str, Tensor] = {}
    initialize_weights(
        model, 0, torch.device("cpu"), lambda name, value: values.update({name: value.clone()})
    )
    model.load_state_dict(values, assign=True)
    return model.train()


def _build_variant(
    bench_model: BenchModel, transport: str, cap: Cap, report_progress: Callable[[str], None]
) -> DistributedDataParallel:
    """Build a variant and check its gradients."""
    name = f"{cap_label(cap)} over {transport}"
    report_progress(f"checking gradients: {name}")
    module = wrap_ddp(bench_model.view_model(), cap, transport)
    bench_model.check(module, name)
    return module


def _round(bench_model: BenchModel, variants: Sequence[DistributedDataParallel], *, seed: int) -> list[float]:
    """Return this rank's seconds, four per variant. See [Note: breakdown of a step]."""
    rng = random.Random(seed)
    order = rng.sample(range(len(variants)), len(variants))
    seconds_by_variant = {
        index: bench_model.visit(variants[index], compute_first=rng.random() < 0.5) for index in order
    }
    return [seconds for index in range(len(variants)) for seconds in seconds_by_variant[index]]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter without a gradient"
    return parameter.grad


def check_ddp_memory(request: DdpRequest, local_ranks: int, available: int | None) -> None:
    """Raise ConfigError if the model and all buckets need more than the host's `available` memory."""
    model = causal_lm_on_meta(MODELS[request.model])
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Weights, two AdamW states, gradients of two passes; and buckets, which every variant keeps.
    needed = local_ranks * weights * (5 + len(request.variants))
    if available is not None and needed > available:
        raise ConfigError(
            "too little memory for the model and its buckets",
            given=f"--model {request.model}, {len(request.variants)} variants on {local_ranks} ranks need "
            f"{format_bytes(needed)}; {format_bytes(available)} are available",
            expected="a model whose ranks fit into the memory together",
            hint="fewer --caps, or --model tiny",
        )
