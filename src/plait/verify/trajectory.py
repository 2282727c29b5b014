"""The trajectory of a training run: its steps, gradients and final state; and that of the reference."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.inputs import on_device
from plait.engine.loss import Loss
from plait.engine.reference import Run, run_with, run_with_own_loss, sum_gradients
from plait.errors import ModelError
from plait.models import forward_names
from plait.parallel.zero.rank_context import Precision
from plait.plan.local_steps import LocalSteps

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CLIP_NORM = 0.05  # far below the norms of untrained models: clipping is active in every step


@dataclass(frozen=True)
class TrainedStep:
    """The mean loss of a step, and the gradient norm before clipping."""

    loss: float
    grad_norm: float

    @property
    def clip_factor(self) -> float:
        """The factor by which clipping scaled the gradient, as in torch."""
        return min(1.0, CLIP_NORM / (self.grad_norm + 1e-6))


@dataclass
class Trajectory:
    """The results of a run; its gradients are not clipped.

    weights, buffers, evaluation    after the last step; empty and NaN if a mismatch ended the run
    """

    steps: list[TrainedStep] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = math.nan


Batch = Mapping[str, Tensor]


def train_reference(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequence[Batch]]],
    evaluated: Sequence[Batch],
    precision: Precision,
    loss: Loss | None,
    local_islands: tuple[LocalSteps, int],
) -> Trajectory:
    """Train the model in one process from these weights, with one step per batch; then evaluate it.

    A batch is divided into the shares of data ranks, and these into micro-batches. As on ranks, each share
    starts from the buffers of the last step, and those of the first one are kept. The loss is the model's own
    if it has one and no `loss` is given. `local_islands`: the local steps, and the number of islands, of
    which each takes its part of the shares; the results are those of the first one.
    """
    local, num_islands = local_islands
    model = model.to(precision.compute).train()
    run = run_with_own_loss if loss is None else run_with(loss)
    islands = [_Program(copy.deepcopy(model), weights, precision, run) for _ in range(num_islands)]
    outer = _Outer(islands[0].trained, local)
    trajectory = Trajectory()
    for number, shares in enumerate(batches, start=1):
        size = len(shares) // num_islands
        parts = [shares[index * size : (index + 1) * size] for index in range(num_islands)]
        (step, gradients), *_ = [i.step(part) for i, part in zip(islands, parts, strict=True)]
        trajectory.steps.append(step)
        trajectory.gradients.append(gradients)
        if local.steps and number % local.steps == 0:
            outer.exchange(islands)
    first = islands[0]
    _copy_weights(first.masters, first.model)
    trajectory.weights = {name: parameter.detach() for name, parameter in first.masters.items()}
    trajectory.buffers = {name: buffer.detach().clone() for name, buffer in first.model.named_buffers()}
    trajectory.evaluation = _evaluate(first.model.eval(), evaluated, run)
    return trajectory


class _Program:
    """A model in one process with its master weights and its optimizer."""

    def __init__(
        self, model: nn.Module, weights: Mapping[str, Tensor], precision: Precision, run: Run
    ) -> None:
        self.model, self._run, self._dtype = model, run, precision.master
        self.masters = {
            name: nn.Parameter(weights[name].to(precision.master, copy=True), p.requires_grad)
            for name, p in model.named_parameters()
        }
        self.trained = {
            name: parameter for name, parameter in self.masters.items() if parameter.requires_grad
        }
        self._optimizer = torch.optim.AdamW(_groups(model, self.trained), foreach=False, **ADAMW)

    def step(self, shares: Sequence[Sequence[Batch]]) -> tuple[TrainedStep, dict[str, Tensor]]:
        """Run one step. Returns its numbers, and the gradients before clipping."""
        _copy_weights(self.masters, self.model)
        total, count, sums = _sum_over_shares(self.model, shares, self._run, self._dtype)
        if not count:
            raise ModelError(
                "a step of the data has no targets",
                given="labels of -100",
                expected="at least one target in a step",
                hint="labels that are not all -100",
            )
        for name, parameter in self.trained.items():
            parameter.grad = sums[name] / count
        gradients = {name: sums[name] / count for name in self.trained}
        norm = nn.utils.clip_grad_norm_(self.trained.values(), CLIP_NORM, foreach=False)
        self._optimizer.step()
        return TrainedStep(total / count, norm.item()), gradients


class _Outer:
    """The weights that islands exchange, and their optimizer. See `plan/local_steps.py`."""

    def __init__(self, weights: Mapping[str, Tensor], local: LocalSteps) -> None:
        self._weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        lr, momentum = local.learning_rate or 1.0, local.momentum
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        self._optimizer = torch.optim.SGD(self._weights.values(), **options)

    @torch.no_grad()
    def exchange(self, islands: Sequence[_Program]) -> None:
        """Step with the islands' mean change, and give them the result and the mean of their buffers."""
        for name, weight in self._weights.items():
            weight.grad = weight - torch.stack([island.trained[name] for island in islands]).mean(0)
        self._optimizer.step()
        buffers = [[*island.model.buffers()] for island in islands]
        means = [
            torch.stack(of).mean(0) if of[0].is_floating_point() else of[0]
            for of in zip(*buffers, strict=True)
        ]
        for island, own in zip(islands, buffers, strict=True):
            for name, weight in self._weights.items():
                island.trained[name].copy_(weight)
            for buffer, mean in zip(own, means, strict=True):
                buffer.copy_(mean)


def _copy_weights(masters: Mapping[str, Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters[name])


def _sum_over_shares(
    model: nn.Module, shares: Sequence[Sequence[Batch]], run: Run, dtype: torch.dtype
) -> tuple[float, int, dict[str, Tensor]]:
    before = copy.deepcopy(dict(model.named_buffers()))
    kept: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    total, count = 0.0, 0
    for micros in shares:
        _set_buffers(model, before)
        loss, targets, gradients = sum_gradients(model, micros, run, dtype)
        total, count = total + loss, count + targets
        sums = {name: sums[name] + g if sums else g for name, g in gradients.items()}
        kept = kept or copy.deepcopy(dict(model.named_buffers()))
    _set_buffers(model, kept)
    return total, count, sums


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _evaluate(model: nn.Module, batches: Sequence[Batch], run: Run) -> float:
    first, names = next(model.parameters()), forward_names(model)
    with torch.no_grad():
        results = [run(model, on_device(batch, first.device, first.dtype, names)) for batch in batches]
    return sum(float(total) for total, _ in results) / sum(float(count) for _, count in results)


def _groups(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups, without weight decay for norms and biases."""
    norms = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)
        for key, _ in module.named_parameters(recurse=False)
    }
    decays = {n: p.ndim >= 2 and not n.endswith("bias") and n not in norms for n, p in trained.items()}
    return [
        {"params": [p for name, p in trained.items() if decays[name]]},
        {"params": [p for name, p in trained.items() if not decays[name]], "weight_decay": 0.0},
    ]
