"""The trajectory of a training run: its steps, gradients and final state; and that of the reference."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.batch import on_device
from plait.engine.loss import Loss
from plait.engine.reference import Run, run_with, run_with_own_loss, sum_gradients
from plait.errors import ModelError
from plait.models import forward_names
from plait.parallel.zero.rank_context import Precision

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CLIP_NORM = 0.05  # far below the norms of untrained models: clipping is active in every step


@dataclass(frozen=True)
class Step:
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

    steps: list[Step] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = math.nan


Batch = Mapping[str, Tensor]


def train_reference(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequence[Batch]]],
    evaluated: Batch,
    precision: Precision,
    loss: Loss | None,
) -> Trajectory:
    """Train the model in one process from these weights, with one step per batch; then evaluate it.

    A batch is divided into the shares of data ranks, and these into micro-batches. As on ranks, each share
    starts from the buffers of the last step, and those of the first one are kept. The loss is the model's own
    if it has one and no `loss` is given.
    """
    model = model.to(precision.compute).train()
    run = run_with_own_loss if loss is None else run_with(loss)
    masters = {
        name: nn.Parameter(weights[name].to(precision.master, copy=True), p.requires_grad)
        for name, p in model.named_parameters()
    }
    trained = {name: parameter for name, parameter in masters.items() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(_groups(model, trained), foreach=False, **ADAMW)
    trajectory = Trajectory()
    for shares in batches:
        _copy_weights(masters, model)
        total, count, sums = _sum_over_shares(model, shares, run, precision.master)
        if not count:
            raise ModelError(
                "a step of the data has no targets",
                given="labels of -100",
                expected="at least one target in a step",
                hint="labels that are not all -100",
            )
        for name, parameter in trained.items():
            parameter.grad = sums[name] / count
        trajectory.gradients.append({name: sums[name] / count for name in trained})
        norm = nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM, foreach=False)
        trajectory.steps.append(Step(total / count, norm.item()))
        optimizer.step()
    _copy_weights(masters, model)
    trajectory.weights = {name: parameter.detach() for name, parameter in masters.items()}
    trajectory.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    trajectory.evaluation = _evaluate(model.eval(), evaluated, run)
    return trajectory


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


def _evaluate(model: nn.Module, batch: Batch, run: Run) -> float:
    first = next(model.parameters())
    with torch.no_grad():
        total, count = run(model, on_device(batch, first.device, first.dtype, forward_names(model)))
    return float(total) / float(count)


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
