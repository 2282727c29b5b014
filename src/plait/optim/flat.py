"""torch's own optimizers over flat storages: a few large tensors instead of one per parameter.

An element-wise optimizer updates a range of a flat storage exactly as it would each parameter in it.
Parameters with other options (weight decay) are in a range of their own: see `UnitLayout.groups`.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, unknown_key_hint

# Options of the optimizer's groups: group 0 has weight decay as in the arguments, group 1 has none.
DEFAULT_GROUPS: tuple[Mapping[str, Any], ...] = ({}, {"weight_decay": 0.0})

# Not element-wise: these use full parameters (rows, spectrum, a line search over all of them).
_NEEDS_FULL_TENSORS = {
    "Adafactor": "it factors second moments by rows and columns",
    "LBFGS": "it searches along a direction over all parameters together",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}
_PROBE = 8  # elements of the parameter on which an optimizer class is tested


@dataclass(frozen=True)
class FlatSlice:
    """A range of a unit's storage that belongs to one optimizer group.

    `leaf` is the optimizer's parameter: a view of the master weights whose `.grad` is a view of the unit's
    `grad_shard`, permanently: zero_grad is never called.
    """

    group: int
    leaf: Tensor

    @classmethod
    def from_views(cls, group: int, master: Tensor, gradient: Tensor) -> "FlatSlice":
        leaf = master.detach().requires_grad_()
        leaf.grad = gradient
        return cls(group, leaf)


def make_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    slices: Iterable[FlatSlice],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> torch.optim.Optimizer:
    """Build the optimizer over these slices, fused if the class supports it.

    `groups[i]`: options of group i that override `arguments`. All groups exist, in this order, also those
    without a slice: schedules address groups by index. `weight_decay=0` is omitted for a class without weight
    decay. Raises ConfigError for a class that needs full tensors, or for arguments that it does not take.
    """
    for base in optimizer_class.__mro__:
        if base.__name__ in _NEEDS_FULL_TENSORS:
            raise _not_elementwise(optimizer_class, _NEEDS_FULL_TENSORS[base.__name__])
    takes = inspect.signature(optimizer_class).parameters
    options = dict(arguments)
    if "fused" in takes and not {"fused", "foreach", "differentiable"} & options.keys():
        options["fused"] = True
    omitted = () if "weight_decay" in takes else (("weight_decay", 0.0),)
    overrides = [dict(item for item in group.items() if item not in omitted) for group in groups]
    for group in ({}, *overrides):  # torch itself validates only the arguments
        _build(optimizer_class, [{"params": [torch.zeros(_PROBE, requires_grad=True)]}], options, group)
    leaves: list[list[Tensor]] = [[] for _ in groups]
    for flat_slice in slices:
        leaves[flat_slice.group].append(flat_slice.leaf)
    param_groups = [{"params": leaves, **group} for leaves, group in zip(leaves, overrides, strict=True)]
    return _build(optimizer_class, param_groups, options, {})


def _not_elementwise(optimizer_class: type[torch.optim.Optimizer], reason: str) -> ConfigError:
    return ConfigError(
        f"{optimizer_class.__name__} cannot work on flat shards of parameters",
        given=reason,
        expected="an element-wise optimizer",
        hint="AdamW, Lion, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD or Rprop",
    )


def _build(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
) -> torch.optim.Optimizer:
    try:
        return optimizer_class(groups, **{**options, **group})
    except (TypeError, ValueError, RuntimeError) as error:
        takes = list(inspect.signature(optimizer_class).parameters)[1:]
        unknown = [key for key in (*group, *options) if key not in takes]
        raise ConfigError(
            f"{optimizer_class.__name__} does not take these arguments",
            given=f"{dict(group or options)}: {error}",
            hint=unknown_key_hint(unknown[0], takes) if unknown else None,
        ) from error


def state_kinds(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> set[str]:
    """The optimizer's states, determined by steps on a tiny parameter of each group.

    A state as large as the parameter has its name (`exp_avg`), a counter is `scalar.step` or, if it is a
    Python number, `number.step`. Raises ConfigError for arguments that it cannot step with, for groups with
    different states, and for a class that updates two halves differently from the full parameter.
    """
    by_group = []
    for index in range(len(groups)):
        full, state = _probe(optimizer_class, arguments, groups, index, [_PROBE])
        halves, _ = _probe(optimizer_class, arguments, groups, index, [_PROBE // 2, _PROBE // 2])
        if not torch.allclose(full, halves, rtol=1e-6, atol=0.0, equal_nan=True):
            raise _not_elementwise(optimizer_class, "its update of an element depends on other elements")
        by_group.append({_kind(name, value) for name, value in state.items() if value is not None})
    for group, kinds in zip(groups, by_group, strict=True):
        if kinds != by_group[0]:
            raise ConfigError(
                f"groups of one {optimizer_class.__name__} keep different states",
                given=f"{dict(group)} keeps {sorted(kinds)}",
                expected=f"{sorted(by_group[0])}, as {dict(groups[0]) or 'group 0'} does",
            )
    return by_group[0]


def _probe(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    group: int,
    sizes: list[int],
) -> tuple[Tensor, dict[str, Any]]:
    """Run two steps on a small parameter, split into leaves of these sizes; return its values and the first
    leaf's state."""
    values = torch.linspace(-1.0, 2.0, _PROBE, dtype=torch.float64)
    gradient = torch.linspace(3.0, -0.5, _PROBE, dtype=torch.float64)
    pairs = zip(values.split(sizes), gradient.split(sizes), strict=True)
    slices = [FlatSlice.from_views(group, *pair) for pair in pairs]
    optimizer = make_optimizer(optimizer_class, arguments, slices, groups)
    before = _options_of(optimizer)
    try:
        for _ in range(2):
            optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{optimizer_class.__name__} cannot step with these arguments",
            given=f"{dict(arguments)}: {error}",
        ) from error
    if _options_of(optimizer) != before:
        raise _not_elementwise(
            optimizer_class, "it counts in its param_groups, which are stepped a slice at a time"
        )
    return values, optimizer.state.get(slices[0].leaf, {})


def _options_of(optimizer: torch.optim.Optimizer) -> str:
    return repr([{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups])


def _kind(name: str, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"number.{name}"
    return name if value.numel() == _PROBE else f"scalar.{name}"


def states_per_element(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> int:
    """Number of the optimizer's states that are as large as the parameter."""
    return sum("." not in name for name in state_kinds(optimizer_class, arguments))


def scaled_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Run one step on gradients multiplied by `factor`; the gradients may be scaled in place.

    Fused optimizers divide by a float32 `grad_scale` as they read (GradScaler's contract with them), so
    scaling float32 gradients needs no separate pass over memory.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_kernel = getattr(optimizer, "_step_supports_amp_scaling", False)
    if factor == 1.0 or not in_kernel or not parameters or parameters[0].dtype != torch.float32:
        if factor != 1.0:
            for parameter in parameters:
                parameter.grad.mul_(factor)
        optimizer.step()
        return
    scaled: Any = optimizer  # the two attributes are GradScaler's; torch's stubs do not know them
    device = parameters[0].device
    scaled.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)  # does not block
    scaled.found_inf = torch.zeros((), dtype=torch.float32, device=device)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
