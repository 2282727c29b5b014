"""The trajectory of a training run: its steps, gradients and final weights; and that of the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.loss import IGNORED, Loss
from plait.engine.reference import sum_gradients
from plait.errors import ModelError
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
    """The results of a run; its gradients are not clipped."""

    steps: list[Step] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_reference(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Mapping[str, Tensor]]],
    precision: Precision,
    loss: Loss | None,
) -> Trajectory:
    """Train the model in one process from these weights, with one step per batch, a list of micro-batches."""
    model = model.to(precision.compute).train()
    masters = {
        name: nn.Parameter(weights[name].to(precision.master, copy=True), p.requires_grad)
        for name, p in model.named_parameters()
    }
    trained = {name: parameter for name, parameter in masters.items() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(_groups(model, trained), foreach=False, **ADAMW)
    trajectory = Trajectory()
    for micros in batches:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        total, count, sums = sum_gradients(model, micros, loss or token_loss, precision.master)
        if not count:
            raise ModelError("a step of the data has no targets", hint="labels that are not all -100")
        for name, parameter in trained.items():
            parameter.grad = sums[name] / count
        trajectory.gradients.append({name: sums[name] / count for name in trained})
        norm = nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM, foreach=False)
        trajectory.steps.append(Step(total / count, norm.item()))
        optimizer.step()
    trajectory.weights = {name: parameter.detach() for name, parameter in masters.items()}
    return trajectory


def token_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed next-token cross entropy of unsharded logits, and the number of targets."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].reshape(-1)
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    summed = F.cross_entropy(upcast, targets, ignore_index=IGNORED, reduction="sum")
    return summed, (targets != IGNORED).sum()


def _groups(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups, without weight decay for norms and biases."""
    norms = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for key, _ in module.named_parameters(recurse=False)
    }
    decays = {n: p.ndim >= 2 and not n.endswith("bias") and n not in norms for n, p in trained.items()}
    return [
        {"params": [p for name, p in trained.items() if decays[name]]},
        {"params": [p for name, p in trained.items() if not decays[name]], "weight_decay": 0.0},
    ]
