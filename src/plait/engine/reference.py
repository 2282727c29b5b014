"""The reference: the full model in plain PyTorch in one process, with which sharded models are compared."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.inputs import on_device
from plait.engine.loss import Loss, choose_loss
from plait.models import forward_inputs, forward_names, without_cache

_TIMES_NOISE = 4.0


def copy_with_values(
    meta_model: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Copy a model on meta with these values. `dtype`: of floating-point parameters."""
    memo: dict[int, Any] = {id(b): buffers[name].detach().clone() for name, b in meta_model.named_buffers()}
    for name, p in meta_model.named_parameters():
        values = parameters[name].to(device, dtype if p.is_floating_point() else p.dtype)
        memo[id(p)] = nn.Parameter(values, p.requires_grad)
    return copy.deepcopy(meta_model, memo)


# Runs the model on a batch: (loss summed over its targets, number of targets).
Run = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, int | Tensor]]


def run_with(loss: Loss) -> Run:
    """Run the model as ranks do, and compute this loss."""
    return lambda model, batch: loss(model(**forward_inputs(model, batch)), batch)


def run_with_own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
    """Run a Hugging Face model with its labels, for the mean loss that it computes itself."""
    outputs = model(**batch, **without_cache(model))
    _, count = choose_loss(model, None)(outputs, batch)
    return outputs.loss * count, count


def sum_gradients(
    model: nn.Module, micros: Iterable[Mapping[str, Tensor]], run: Run, dtype: torch.dtype
) -> tuple[float, int, dict[str, Tensor]]:
    """Run the micro-batches forward and backward.

    Returns the summed loss, the number of targets, and for each trainable parameter the sum of its gradients
    in `dtype` on the CPU: zeros if it is unused.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros(p.shape, dtype=dtype) for name, p in trained.items()}
    first = next(iter(trained.values()))
    total, count = 0.0, 0
    for micro in micros:
        inputs = on_device(micro, first.device, first.dtype, forward_names(model))
        summed, targets = run(model, inputs)
        summed.backward()
        total, count = total + summed.item(), count + int(targets)
        for name, parameter in trained.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                sums[name] += gradient.to("cpu", dtype)
    return total, count, sums


@dataclass(frozen=True)
class Tolerances:
    """The relative errors that are allowed: `base` for every number, plus a multiple of the rounding noise.

    noise       error of one process in the plan's dtype relative to a wider one, by parameter
    step_noise  the same for losses and gradient norms
    """

    base: float
    noise: Mapping[str, float] = field(default_factory=dict)
    step_noise: float = 0.0

    def of(self, name: str) -> float:
        return self.base + _TIMES_NOISE * self.noise.get(name, 0.0)

    @property
    def of_steps(self) -> float:
        return self.base + _TIMES_NOISE * self.step_noise


def relative_errors(
    actual: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Return by name the largest norm of the difference over the norm of the expected tensor.

    A tensor that is nearly zero is noise: its error is relative to a thousandth of the largest norm.
    """
    errors: dict[str, float] = {}
    for tensors, references in zip(actual, expected, strict=True):
        different = sorted(tensors.keys() ^ references.keys())
        assert not different, f"{different} on one side only"
        norms = {name: float(tensor.double().norm()) for name, tensor in references.items()}
        min_norm = max(1e-3 * max(norms.values(), default=0.0), 1e-30)
        for name, tensor in references.items():
            error = float((tensors[name].double() - tensor.double()).norm()) / max(norms[name], min_norm)
            errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return errors
