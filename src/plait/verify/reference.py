"""The reference: the one-process program in plain PyTorch, independent of the parallel code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.batch import on_device
from plait.engine.loss import Loss
from plait.errors import ModelError
from plait.models import forward_inputs

IGNORE_INDEX = -100
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
    """The results of a run: its steps, their unclipped gradients, and the final weights."""

    steps: list[Step] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_reference(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Mapping[str, Tensor]]],
    *,
    compute: torch.dtype,
    master: torch.dtype,
    loss: Loss | None,
) -> Trajectory:
    """Train the model from these weights, with one step per batch; a batch is a list of micro-batches.

    Computes in `compute`; accumulates gradients and updates weights in `master`.
    """
    model = model.to(compute).train()
    named = dict(model.named_parameters())
    masters = {
        name: nn.Parameter(weights[name].to(master, copy=True), p.requires_grad) for name, p in named.items()
    }
    trained = {name: parameter for name, parameter in masters.items() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(_groups(model, trained), foreach=False, **ADAMW)
    trajectory = Trajectory()
    for micros in batches:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
        sums = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
        total, count = 0.0, 0
        for inputs in micros:
            micro = on_device(inputs, torch.device("cpu"), compute)
            summed, targets = (loss or token_loss)(model(**forward_inputs(model, micro)), micro)
            summed.backward()
            total, count = total + summed.item(), count + int(targets)
            for name in trained:
                gradient, named[name].grad = named[name].grad, None
                if gradient is not None:
                    sums[name] += gradient.to(master)
        if not count:
            raise ModelError("a step of the data has no targets", hint="labels that are not all -100")
        for name, parameter in trained.items():  # unused parameters have a zero gradient
            parameter.grad = sums[name] / count
        trajectory.gradients.append(
            {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        )
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
    summed = F.cross_entropy(upcast, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return summed, (targets != IGNORE_INDEX).sum()


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
