"""A probe at start-up: does the model, cut as the plan says, still compute what the whole model computes?

[Note: what a probe can tell]
Two small random inputs go through the cut model and, on the first rank, through a whole copy of it; gradients
of all parameters are compared. A loss would not do: that of untrained models is near log V whatever they
compute, while a wrong gradient is wrong by as much as it is large. What the plan's dtype loses is measured on
the whole copy, in that dtype and in the master weights': the cut model may lose a few times as much. The
model is in eval mode: with dropout, ranks and one process draw different masks. Gradients that data ranks add
up in codes or factors are too far from the whole ones to say anything.
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
_EXACT = {torch.float64: 1e-5, torch.float32: 2e-3}  # transformers' norms and tables are float32 in any case
_NARROW = 0.02  # computed, or sent, in half as many bits
_COMPARABLE = ("fp32", "bf16", "fp16")  # what gradients may travel in
_TIMES_NOISE = 4.0
_SCALE = 1024.0  # of the loss, in both: fp16 has the numbers for it


@dataclass(frozen=True)
class SelfCheck:
    """A probe that waits for its model to be cut. `twin`: the same model, whole, on meta."""

    twin: nn.Module
    batch: Mapping[str, Tensor]

    @classmethod
    def build(
        cls, model: nn.Module, asked: bool | Mapping[str, Tensor], plan: Plan, seed: int
    ) -> "SelfCheck | None":
        """`asked`: whether one is, or the batch that it is to take. Raises ModelError where it needs one,
        ConfigError under a plan whose gradients tell nothing."""
        if asked is False:
            return None
        if plan.dp > 1 and plan.reduce not in _COMPARABLE:
            raise ConfigError(
                "a probe compares gradients, and this plan does not keep them between data ranks",
                given=f"probe and reduce={plan.reduce}",
                expected=f"reduce={' or '.join(_COMPARABLE)}, once: `tp` cuts layers the same way under each",
                hint="reduce=fp32 for the probe, or no probe",
            )
        return cls(copy_to_meta(model), _random_batch(model, seed) if asked is True else asked)

    def run(self, engine: Engine, loss: Loss | None) -> Engine:
        """The engine, if its model's gradients are those of the twin.

        Every rank must call it; rank 0 holds, while it lasts, the whole model and its gradients. Changes
        nothing of the engine. Raises ModelError on every rank, naming the parameter that differs most, when
        it is by more than the plan's precision explains.
        """
        found = engine.probe_gradients(self.batch, _SCALE)
        weights = engine.full_parameters()
        verdict = torch.zeros(3, dtype=torch.float64, device=engine.device)  # index, difference, allowed
        if engine.world.rank == 0:
            verdict.copy_(torch.tensor(_compare(engine, self.twin, self.batch, loss, found, weights)))
        broadcast(verdict, engine.world.group)
        index, difference, allowed = verdict.tolist()
        name = list(dict(self.twin.named_parameters()))[int(index)]
        engine.probed = ProbeResult(name, difference, allowed)
        if not difference <= allowed:
            raise ModelError(
                "cut as the plan says, the model computes another function than it does whole",
                given=f"{engine.plan}: the gradient of {name} differs by {difference:.2g} of its norm",
                expected=f"at most {allowed:.2g}",
                hint="tensor_plan= with styles that fit what this class's code does, or tp=1",
            )
        return engine


def _random_batch(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Two short sequences of random tokens. Raises ModelError for a model that has no vocabulary."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ModelError(
            "a probe needs inputs, and this model does not say what it takes",
            given=type(model).__name__,
            hint="probe=a batch: the dict that engine.step takes",
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (_SAMPLES, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _compare(
    engine: Engine,
    twin: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Loss | None,
    found: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> tuple[float, float, float]:
    """(index of the worst parameter, its difference, what is allowed)."""
    precision = Precision.of(engine.plan)
    exact = _gradients(twin, engine, batch, loss, weights, precision.master)
    rough = exact
    if precision.compute != precision.master:
        rough = _gradients(twin, engine, batch, loss, weights, precision.compute)
    is_exact = engine.plan.dp == 1 or engine.plan.reduce == "fp32"
    least = _EXACT.get(precision.compute, _NARROW) if is_exact else _NARROW
    largest = max(float(g.norm()) for g in exact.values())
    worst = (0.0, 0.0, least)
    for index, name in enumerate(exact):
        if name not in found:
            continue
        # A gradient that is all but nothing is noise: what its neighbours have is the measure then.
        norm = max(float(exact[name].norm()), 1e-3 * largest, 1e-30)
        noise = float((rough[name] - exact[name]).norm()) / norm
        allowed = least + _TIMES_NOISE * noise
        difference = float((found[name].cpu().to(exact[name].dtype) - exact[name]).norm()) / norm
        if not math.isfinite(difference):
            return float(index), math.inf, allowed
        if difference / allowed > worst[1] / worst[2]:
            worst = (float(index), difference, allowed)
    return worst


def _gradients(
    twin: nn.Module,
    engine: Engine,
    batch: Mapping[str, Tensor],
    loss: Loss | None,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Of the mean loss, by the whole model in one process, on the CPU; zeros where there is none."""
    model = _with_weights(twin, engine.model, weights, engine.device, dtype).eval()
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
    twin: nn.Module, cut: nn.Module, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A copy of `twin` that has these weights, and the buffers of the model that is cut."""
    memo: dict[int, Any] = {}
    for name, parameter in twin.named_parameters():
        values = (
            weights[name].to(device, dtype) if parameter.is_floating_point() else weights[name].to(device)
        )
        memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
    buffers = dict(cut.named_buffers())
    for name, buffer in twin.named_buffers():
        memo[id(buffer)] = buffers[name].detach().clone()
    return copy.deepcopy(twin, memo)
