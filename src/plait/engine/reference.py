"""The reference: the full model in plain PyTorch in one process, with which sharded models are compared,
and the self-check at start-up, which compares gradients.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import broadcast
from plait.engine.engine import Engine
from plait.engine.inputs import on_device
from plait.engine.loss import Loss, choose_loss
from plait.engine.spec import TrainingSpec
from plait.engine.totals import ProbeResult
from plait.errors import ConfigError, ModelError
from plait.models import (
    copy_to_meta,
    forward_inputs,
    forward_names,
    has_pretrained_model,
    vocabulary_size,
    without_cache,
)
from plait.parallel.context.attention import row_attention
from plait.parallel.context.tokens import attention_of
from plait.parallel.float8 import LayerProducts
from plait.parallel.tensor.cross_entropy import SINGLE_RANK
from plait.parallel.zero.rank_context import Precision

_TIMES_NOISE = 4.0
# Of the self-check.
_SAMPLES, _LENGTH = 2, 16
_EXACT = {torch.float64: 1e-5, torch.float32: 2e-3}  # norms and tables of transformers are always float32
_NARROW = 0.02  # computed or sent in 16 bits
_COMPARABLE = ("fp32", "bf16", "fp16")  # values of `reduce` that are exact enough to compare
_SCALE = 1024.0  # of the loss, in both models: keeps fp16 gradients in range


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

    def run(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        rows = batch if has_pretrained_model(model) else row_attention(batch, SINGLE_RANK)
        with attention_of(rows):
            inputs = forward_inputs(model, batch)
            inputs.pop("output_router_logits", None)  # here the model computes its auxiliary loss itself
            outputs = model(**inputs)
        return loss(outputs, batch)

    return run


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


@dataclass(frozen=True)
class SelfCheck:
    """A self-check, created before its model is sharded. `meta_model`: the full model, on meta."""

    spec: TrainingSpec
    meta_model: nn.Module
    batch: Mapping[str, Tensor]

    @classmethod
    def build(cls, spec: TrainingSpec) -> "SelfCheck | None":
        """The self-check that the arguments ask for. Raises ModelError if a batch is needed, ConfigError
        under a plan whose gradients are too inexact."""
        plan, probe = spec.plan, spec.given.probe
        if probe is False:
            return None
        if plan.token_ranks > 1 and plan.reduce not in _COMPARABLE:
            raise ConfigError(
                "a probe compares gradients, which this plan compresses with loss",
                given=f"probe and reduce={plan.reduce}",
                expected=f"reduce={' or '.join(_COMPARABLE)}, once: `tp` shards layers the same way",
                hint="reduce=fp32 for the probe, or no probe",
            )
        model = spec.given.model
        batch = _random_batch(model, spec.given.seed) if probe is True else probe
        return cls(spec, copy_to_meta(model), batch)

    def run(self, engine: Engine) -> Engine:
        """Return the engine if its model's gradients match the full model's.

        Every rank must call it; meanwhile rank 0 holds the full model and its gradients. The engine is
        unchanged. Raises ModelError on every rank, naming the parameter that differs most, if it differs by
        more than the plan's precision explains.
        """
        gradients = engine.probe_gradients(self.batch, _SCALE)
        weights = engine.full_parameters()
        names = [name for name, _ in self.meta_model.named_parameters()]
        result = torch.zeros(3, dtype=torch.float64, device=engine.device)  # index, difference, allowed
        if engine.world.rank == 0:
            name, difference, allowed = self._worst(engine, gradients, weights)
            result.copy_(torch.tensor([names.index(name), difference, allowed]))
        broadcast(result, engine.world.group)
        index, difference, allowed = result.tolist()
        name = names[int(index)]
        engine.probed = ProbeResult(name, difference, allowed)
        if difference > allowed or not math.isfinite(difference):
            raise ModelError(
                "the sharded model computes a different function than the full model",
                given=f"{engine.plan}: the gradient of {name} differs by {difference:.2g} of its norm",
                expected=f"at most {allowed:.2g}",
                hint="tensor_plan= with styles that fit this model's code, or tp=1",
            )
        return engine

    def _worst(
        self, engine: Engine, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[str, float, float]:
        """The parameter whose difference is the largest multiple of what is allowed, and both."""
        precision = Precision.from_plan(engine.plan)

        def reference(dtype: torch.dtype) -> dict[str, Tensor]:
            """Return gradients of the mean loss of the full model."""
            buffers = dict(engine.model.named_buffers())
            model = copy_with_values(self.meta_model, weights, buffers, dtype, engine.device).eval()
            if dtype != precision.master:
                LayerProducts.build(engine.plan, self.spec.float8).convert(model)
            summed = choose_loss(model, self.spec.given.loss)

            def mean(outputs: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
                total, count = summed(outputs, inputs)
                return total * (_SCALE / float(count)), 1

            sums = sum_gradients(model, [self.batch], run_with(mean), precision.master)[2]
            return {name: gradient / _SCALE for name, gradient in sums.items()}

        exact = reference(precision.master)
        is_exact = engine.plan.token_ranks == 1 or engine.plan.reduce == "fp32"
        tolerances = Tolerances(_EXACT.get(precision.compute, _NARROW) if is_exact else _NARROW)
        if precision.compute != precision.master:
            noise = relative_errors([reference(precision.compute)], [exact])
            tolerances = replace(tolerances, noise=noise)
        errors = relative_errors([{name: g.cpu() for name, g in gradients.items()}], [exact])

        def excess(name: str) -> float:
            return errors[name] / tolerances.of(name) if math.isfinite(errors[name]) else math.inf

        worst = max(errors, key=excess)
        return worst, errors[worst], tolerances.of(worst)


def _random_batch(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Two short sequences of random tokens. Raises ModelError for a model without a vocabulary."""
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise ModelError(
            "a probe needs inputs, and this model's are unknown",
            given=type(model).__name__,
            expected="config.vocab_size, for random tokens",
            hint="probe=batch, a dict as for engine.step",
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (_SAMPLES, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}
