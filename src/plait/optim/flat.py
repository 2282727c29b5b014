"""torch's own optimizers over flat storages: a few large tensors instead of one per parameter.

An element-wise optimizer does to a range of a flat storage exactly what it would do to each parameter
in it. What differs between parameters (weight decay) is a range of its own: see `UnitLayout.groups`.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError

# These look at a parameter as a whole (its rows, its spectrum, a line search over all of them).
_NEEDS_WHOLE_TENSORS = {
    "Adafactor": "it factors second moments by rows and columns",
    "LBFGS": "it searches along a direction over all parameters together",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}


@dataclass(frozen=True)
class FlatSlice:
    """A range of a unit's storage that one optimizer group owns.

    `leaf` is the optimizer's parameter: a view of the master weights whose `.grad` is a view of the
    unit's gradient, for ever: nobody calls zero_grad.
    """

    decay: bool
    leaf: Tensor

    @classmethod
    def of(cls, decay: bool, master: Tensor, gradient: Tensor) -> "FlatSlice":
        leaf = master.detach().requires_grad_()
        leaf.grad = gradient
        return cls(decay, leaf)


def make_optimizer(
    kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any], slices: Iterable[FlatSlice]
) -> torch.optim.Optimizer:
    """The optimizer over these slices: fused where the class can, no decay where the slice says so.

    Raises ConfigError for a class that
    needs whole tensors or arguments that it does not take.
    """
    if kind.__name__ in _NEEDS_WHOLE_TENSORS:
        raise ConfigError(
            f"{kind.__name__} cannot work on flat pieces of parameters",
            given=_NEEDS_WHOLE_TENSORS[kind.__name__],
            expected="an element-wise optimizer",
            hint="AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD or Rprop",
        )
    slices = list(slices)
    decaying = [piece.leaf for piece in slices if piece.decay]
    others = [piece.leaf for piece in slices if not piece.decay]
    takes = inspect.signature(kind).parameters
    options = dict(arguments)
    if "fused" in takes and not {"fused", "foreach", "differentiable"} & options.keys():
        options["fused"] = True
    no_decay = {"weight_decay": 0.0} if "weight_decay" in takes else {}
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, **no_decay}]
    try:
        return kind([group for group in groups if group["params"]], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{kind.__name__} does not take these arguments", given=f"{dict(arguments)}: {error}"
        ) from error


def state_kinds(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> set[str]:
    """What the optimizer will remember, found by one step on a tiny parameter.

    A state as large as the parameter by its name (`exp_avg`), a counter as `scalar.step` or, where it is
    a Python number, `number.step`. Raises ConfigError for what it cannot step with.
    """
    tiny = FlatSlice.of(True, torch.zeros(8), torch.ones(8))
    optimizer = make_optimizer(kind, arguments, [tiny])
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{kind.__name__} cannot step with these arguments", given=f"{dict(arguments)}: {error}"
        ) from error
    state = optimizer.state.get(tiny.leaf, {})
    return {_kind(name, value) for name, value in state.items() if value is not None}


def _kind(name: str, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"number.{name}"
    return name if value.numel() == 8 else f"scalar.{name}"


def states_per_element(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> int:
    """How many tensors as large as the parameter the optimizer will keep."""
    return sum("." not in name for name in state_kinds(kind, arguments))


def scaled_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """One step on gradients multiplied by `factor`, which they are afterwards.

    Fused optimizers divide by a float32 `grad_scale` as they read (GradScaler's contract with them), so
    that scaling float32 gradients costs no pass of its own over memory.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_kernel = getattr(optimizer, "_step_supports_amp_scaling", False)
    if factor == 1.0 or not in_kernel or parameters[0].dtype != torch.float32:
        if factor != 1.0:
            for parameter in parameters:
                parameter.grad.mul_(factor)
        optimizer.step()
        return
    scaled: Any = optimizer  # the two attributes are GradScaler's; torch's stubs do not know them
    scaled.grad_scale = torch.tensor(1.0 / factor, device=parameters[0].device)
    scaled.found_inf = torch.zeros((), device=parameters[0].device)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
