"""torch's own optimizers over flat storages: a few large tensors instead of one per parameter.

An element-wise optimizer does to a range of a flat storage exactly what it would do to each parameter
in it. What differs between parameters (weight decay) is a range of its own: see `UnitLayout.groups`.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, unknown_key_hint

# What the optimizer's groups do differently: 0 decays as the arguments say, 1 does not.
DEFAULT_GROUPS: tuple[Mapping[str, Any], ...] = ({}, {"weight_decay": 0.0})

# These look at a parameter as a whole (its rows, its spectrum, a line search over all of them).
_NEEDS_WHOLE_TENSORS = {
    "Adafactor": "it factors second moments by rows and columns",
    "LBFGS": "it searches along a direction over all parameters together",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}
_PROBE = 8  # elements of the parameter on which a class is tried


@dataclass(frozen=True)
class FlatSlice:
    """A range of a unit's storage that one optimizer group owns.

    `leaf` is the optimizer's parameter: a view of the master weights whose `.grad` is a view of the
    unit's gradient, for ever: nobody calls zero_grad.
    """

    group: int
    leaf: Tensor

    @classmethod
    def of(cls, group: int, master: Tensor, gradient: Tensor) -> "FlatSlice":
        leaf = master.detach().requires_grad_()
        leaf.grad = gradient
        return cls(group, leaf)


def make_optimizer(
    kind: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    slices: Iterable[FlatSlice],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> torch.optim.Optimizer:
    """The optimizer over these slices, fused where the class can.

    `groups[i]`: what the slices of group i have other than `arguments`. Every group is there, in this
    order, also where no slice of it is: schedules address groups by their place. No decay is left out
    for a class that knows none. Raises ConfigError for a class that needs whole tensors, or for what it
    does not take.
    """
    _refuse_by_name(kind)
    takes = inspect.signature(kind).parameters
    options = dict(arguments)
    if "fused" in takes and not {"fused", "foreach", "differentiable"} & options.keys():
        options["fused"] = True
    differences = [_without_decay_unless_taken(group, takes) for group in groups]
    for group in ({}, *differences):  # torch itself looks at none but the arguments
        _build(kind, [{"params": [torch.zeros(_PROBE, requires_grad=True)]}], options, group)
    leaves: list[list[Tensor]] = [[] for _ in groups]
    for piece in slices:
        leaves[piece.group].append(piece.leaf)
    own = [{"params": leaves, **group} for leaves, group in zip(leaves, differences, strict=True)]
    return _build(kind, own, options, {})


def _refuse_by_name(kind: type[torch.optim.Optimizer]) -> None:
    for base in kind.__mro__:
        if base.__name__ in _NEEDS_WHOLE_TENSORS:
            raise _refusal(kind, _NEEDS_WHOLE_TENSORS[base.__name__])


def _refusal(kind: type[torch.optim.Optimizer], reason: str) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} cannot work on flat pieces of parameters",
        given=reason,
        expected="an element-wise optimizer",
        hint="AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD or Rprop",
    )


def _without_decay_unless_taken(
    group: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    nothing_said = "weight_decay" not in takes and group.get("weight_decay") == 0.0
    return {key: value for key, value in group.items() if not (nothing_said and key == "weight_decay")}


def _build(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
) -> torch.optim.Optimizer:
    try:
        return kind(groups, **{**options, **group})
    except (TypeError, ValueError, RuntimeError) as error:
        takes = list(inspect.signature(kind).parameters)[1:]
        unknown = [key for key in (*group, *options) if key not in takes]
        raise ConfigError(
            f"{kind.__name__} does not take these arguments",
            given=f"{dict(group or options)}: {error}",
            hint=unknown_key_hint(unknown[0], takes) if unknown else None,
        ) from error


def state_kinds(
    kind: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> set[str]:
    """What the optimizer will remember, found by a step on a tiny parameter of each group.

    A state as large as the parameter by its name (`exp_avg`), a counter as `scalar.step` or, where it is
    a Python number, `number.step`. Raises ConfigError for what it cannot step with, for groups that
    remember different things, and for a class that does not do to two halves what it does to the whole.
    """
    found = []
    for index in range(len(groups)):
        whole, state = _probe(kind, arguments, groups, index, [_PROBE])
        halves, _ = _probe(kind, arguments, groups, index, [_PROBE // 2, _PROBE // 2])
        if not torch.allclose(whole, halves, rtol=1e-6, atol=0.0, equal_nan=True):
            raise _refusal(kind, "what it does to an element depends on the elements around it")
        found.append({_kind(name, value) for name, value in state.items() if value is not None})
    for group, kinds in zip(groups, found, strict=True):
        if kinds != found[0]:
            raise ConfigError(
                f"groups of one {kind.__name__} keep different states",
                given=f"{dict(group)} keeps {sorted(kinds)}",
                expected=f"{sorted(found[0])}, as {dict(groups[0]) or 'group 0'} does",
            )
    return found[0]


def _probe(
    kind: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    group: int,
    sizes: list[int],
) -> tuple[Tensor, dict[str, Any]]:
    """Two steps on a small parameter, cut into leaves of these sizes: its values, the first one's state."""
    values = torch.linspace(-1.0, 2.0, _PROBE, dtype=torch.float64)
    gradient = torch.linspace(3.0, -0.5, _PROBE, dtype=torch.float64)
    pairs = zip(values.split(sizes), gradient.split(sizes), strict=True)
    slices = [FlatSlice.from_views(group, *pair) for pair in pairs]
    optimizer = make_optimizer(kind, arguments, slices, groups)
    before = _options_of(optimizer)
    try:
        for _ in range(2):
            optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{kind.__name__} cannot step with these arguments", given=f"{dict(arguments)}: {error}"
        ) from error
    if _options_of(optimizer) != before:
        raise _refusal(kind, "it counts in its param_groups, which are stepped a piece at a time")
    return values, optimizer.state.get(slices[0].leaf, {})


def _options_of(optimizer: torch.optim.Optimizer) -> str:
    return repr([{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups])


def _kind(name: str, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"number.{name}"
    return name if value.numel() == _PROBE else f"scalar.{name}"


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
    if factor == 1.0 or not in_kernel or not parameters or parameters[0].dtype != torch.float32:
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
