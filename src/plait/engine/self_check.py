"""Self-check at start-up: compare the gradients of the sharded model with those of the full model.

[Note: sensitivity of the self-check]
Two small random inputs go through the sharded model and, on the first rank, through a full copy; gradients
of all parameters are compared. The loss would not do: that of untrained models is near log V whatever they
compute, while a wrong gradient is wrong by as much as it is large. The rounding error of the plan's dtype is
measured on the full copy, in that dtype and in the master weights'; the sharded model may lose a few times as
much. The model is in eval mode: with dropout, ranks and one process draw different masks. int8 and PowerSGD
gradients are too inexact to compare.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import broadcast
from plait.engine.batch import ProbeResult, on_device
from plait.engine.engine import Engine
from plait.engine.loss import Loss, choose_loss
from plait.errors import ConfigError, ModelError
from plait.models import copy_to_meta, forward_inputs
from plait.parallel import Precision
from plait.plan import Plan

_SAMPLES, _LENGTH = 2, 16
_EXACT = {torch.float64: 1e-5, torch.float32: 2e-3}  # norms and tables of transformers are always float32
_NARROW = 0.02  # computed or sent in 16 bits
_COMPARABLE = ("fp32", "bf16", "fp16")  # values of `reduce` that are exact enough to compare
_TIMES_NOISE = 4.0
_SCALE = 1024.0  # of the loss, in both models: keeps fp16 gradients in range


@dataclass(frozen=True)
class SelfCheck:
    """A self-check, created before its model is sharded. `meta_model`: the full model, on meta."""

    meta_model: nn.Module
    batch: Mapping[str, Tensor]

    @classmethod
    def build(
        cls, model: nn.Module, probe: bool | Mapping[str, Tensor], plan: Plan, seed: int
    ) -> "SelfCheck | None":
        """`probe`: whether to check, or the batch to use. Raises ModelError if a batch is needed, ConfigError
        under a plan whose gradients are too inexact."""
        if probe is False:
            return None
        if plan.dp > 1 and plan.reduce not in _COMPARABLE:
            raise ConfigError(
                "a probe compares gradients, which this plan compresses with loss",
                given=f"probe and reduce={plan.reduce}",
                expected=f"reduce={' or '.join(_COMPARABLE)}, once: `tp` shards layers the same way",
                hint="reduce=fp32 for the probe, or no probe",
            )
        return cls(copy_to_meta(model), _random_batch(model, seed) if probe is True else probe)

    def run(self, engine: Engine, loss: Loss | None) -> Engine:
        """Return the engine if its model's gradients match the full model's.

        Every rank must call it; meanwhile rank 0 holds the full model and its gradients. The engine is
        unchanged. Raises ModelError on every rank, naming the parameter that differs most, if it differs by
        more than the plan's precision explains.
        """
        gradients = engine.probe_gradients(self.batch, _SCALE)
        weights = engine.full_parameters()
        result = torch.zeros(3, dtype=torch.float64, device=engine.device)  # index, difference, allowed
        if engine.world.rank == 0:
            result.copy_(
                torch.tensor(_compare(engine, self.meta_model, self.batch, loss, gradients, weights))
            )
        broadcast(result, engine.world.group)
        index, difference, allowed = result.tolist()
        name = list(dict(self.meta_model.named_parameters()))[int(index)]
        engine.probed = ProbeResult(name, difference, allowed)
        if not difference <= allowed:
            raise ModelError(
                "the sharded model computes a different function than the full model",
                given=f"{engine.plan}: the gradient of {name} differs by {difference:.2g} of its norm",
                expected=f"at most {allowed:.2g}",
                hint="tensor_plan= with styles that fit this model's code, or tp=1",
            )
        return engine


def _random_batch(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Two short sequences of random tokens. Raises ModelError for a model without a vocabulary."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ModelError(
            "a probe needs inputs, and this model's are unknown",
            given=type(model).__name__,
            hint="probe=batch, a dict as for engine.step",
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (_SAMPLES, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _compare(
    engine: Engine,
    meta_model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Loss | None,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> tuple[float, float, float]:
    """(index of the worst parameter, its difference, the allowed difference)."""
    precision = Precision.from_plan(engine.plan)
    exact = _gradients(meta_model, engine, batch, loss, weights, precision.master)
    rounded = exact
    if precision.compute != precision.master:
        rounded = _gradients(meta_model, engine, batch, loss, weights, precision.compute)
    is_exact = engine.plan.dp == 1 or engine.plan.reduce == "fp32"
    tolerance = _EXACT.get(precision.compute, _NARROW) if is_exact else _NARROW
    largest = max(float(g.norm()) for g in exact.values())
    worst = (0.0, 0.0, tolerance)
    for index, name in enumerate(exact):
        if name not in gradients:
            continue
        # A near-zero gradient is noise: compare it with the largest gradient's norm instead.
        norm = max(float(exact[name].norm()), 1e-3 * largest, 1e-30)
        noise = float((rounded[name] - exact[name]).norm()) / norm
        allowed = tolerance + _TIMES_NOISE * noise
        difference = float((gradients[name].cpu().to(exact[name].dtype) - exact[name]).norm()) / norm
        if not math.isfinite(difference):
            return float(index), math.inf, allowed
        if difference / allowed > worst[1] / worst[2]:
            worst = (float(index), difference, allowed)
    return worst


def _gradients(
    meta_model: nn.Module,
    engine: Engine,
    batch: Mapping[str, Tensor],
    loss: Loss | None,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Gradients of the mean loss of the full model in one process, on the CPU; zeros where there are none."""
    model = _with_weights(meta_model, engine.model, weights, engine.device, dtype).eval()
    inputs = on_device(batch, engine.device, dtype)
    total, count = choose_loss(model, loss)(model(**forward_inputs(model, inputs)), inputs)
    (total * (_SCALE / float(count))).backward()
    return {
        name: torch.zeros_like(weights[name], device="cpu")
        if p.grad is None
        else p.grad.to("cpu", weights[name].dtype) / _SCALE
        for name, p in model.named_parameters()
        if name in weights
    }


def _with_weights(
    meta_model: nn.Module,
    sharded: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """A copy of `meta_model` with these weights, and the buffers of the sharded model."""
    memo: dict[int, Any] = {}
    for name, parameter in meta_model.named_parameters():
        values = (
            weights[name].to(device, dtype) if parameter.is_floating_point() else weights[name].to(device)
        )
        memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
    buffers = dict(sharded.named_buffers())
    for name, buffer in meta_model.named_buffers():
        memo[id(buffer)] = buffers[name].detach().clone()
    return copy.deepcopy(meta_model, memo)
