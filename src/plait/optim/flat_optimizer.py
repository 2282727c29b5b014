"""Optimizers over flat storages: a few large tensors instead of one per parameter.

An element-wise optimizer updates a range of a flat storage exactly as it would each parameter in it.
Parameters with other options (weight decay) are in a range of their own: see `UnitLayout.groups`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.optim.update_kinds import DEFAULT_GROUPS, GroupOptimizer


@dataclass(frozen=True)
class FlatSlice:
    """A range of a unit's storage that belongs to one optimizer group.

    `leaf` is the optimizer's parameter: a view of the master weights whose `.grad` is a view of the unit's
    `grad_shard`, permanently: nothing calls the optimizer's zero_grad.
    """

    group: int
    leaf: Tensor

    @classmethod
    def from_views(cls, group: int, master: Tensor, gradient: Tensor) -> "FlatSlice":
        leaf = nn.Parameter(master.detach())
        leaf.grad = gradient
        return cls(group, leaf)


class MixedOptimizer(torch.optim.Optimizer):
    """Optimizers of several classes as one, each for some of the groups: `group["optimizer"]` is the name of
    its class. States are in one dict."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], by_name: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """`groups`: the groups of all optimizers, in order."""
        shared = set.intersection(*(set(each.defaults) for each in by_name.values()))
        first = next(iter(by_name.values()))
        super().__init__(groups, {key: value for key, value in first.defaults.items() if key in shared})
        self.by_name = by_name
        for optimizer in by_name.values():
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer on its groups. Returns the result of `closure`, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, optimizer in self.by_name.items():
            optimizer.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            # Without parameters it may communicate, but counts no step.
            if optimizer.param_groups or hasattr(optimizer, "sum_over_shards"):
                optimizer.step()
        return loss


def make_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    slices: Iterable[FlatSlice],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> torch.optim.Optimizer:
    """Build the optimizer over these slices, fused if the class supports it.

    `groups[i]`: options of group i that override `arguments`; `optimizer`: a class of its own. All groups
    exist, in this order, also groups without a slice: schedules address groups by index. Raises ConfigError
    for arguments that a class does not take.
    """
    optimizers = GroupOptimizer.of_groups(optimizer_class, arguments, groups)
    GroupOptimizer(optimizer_class, arguments).check()
    return join_groups(optimizers, slices)


def join_groups(optimizers: Sequence[GroupOptimizer], slices: Iterable[FlatSlice]) -> torch.optim.Optimizer:
    """Build the optimizers of all groups as one. Raises ConfigError."""
    for optimizer in optimizers:
        optimizer.check()
    param_groups: list[dict[str, Any]] = [{"params": []} for _ in optimizers]
    for flat_slice in slices:
        param_groups[flat_slice.group]["params"].append(flat_slice.leaf)
    by_name: dict[str, list[int]] = {}
    for index, optimizer in enumerate(optimizers):
        by_name.setdefault(optimizer.name, []).append(index)
    if len(by_name) != len({optimizer.optimizer_class for optimizer in optimizers}):
        raise ConfigError(
            "two optimizers of one name",
            given=", ".join(dict.fromkeys(f"{each.optimizer_class}" for each in optimizers)),
            expected="another name for each class: groups are saved with it",
            hint="rename one of the classes",
        )
    if len(by_name) == 1:
        return _build(optimizers, param_groups)
    built = {}
    for name, indices in by_name.items():
        own = [param_groups[index] for index in indices]
        for group in own:
            group["optimizer"] = name
        built[name] = _build([optimizers[index] for index in indices], own)
    return MixedOptimizer(param_groups, built)


def _build(
    optimizers: Sequence[GroupOptimizer], param_groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build one class over groups, to which their arguments are added. A group without an option gets the
    class's default."""
    first = optimizers[0]
    required = [
        each.name
        for each in inspect.signature(first.optimizer_class).parameters.values()
        if each.default is each.empty
    ]
    common = {
        key: value
        for key, value in first.arguments.items()
        if key in required or all(key in each.arguments for each in optimizers)
    }
    for optimizer, group in zip(optimizers, param_groups, strict=True):
        group |= optimizer.arguments
    fused = {"fused": True} if first.fuses else {}
    return GroupOptimizer(first.optimizer_class, {**common, **fused}).build(param_groups)


def scaled_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Run one step on gradients multiplied by `factor`; the gradients may be scaled in place.

    Fused optimizers divide by a float32 `grad_scale` as they read (GradScaler's contract with them), so
    scaling float32 gradients needs no separate pass over memory.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(_is_of_others, getattr(optimizer, "by_name", {"": optimizer}).values())):
        with _restored(parameters):
            for parameter in parameters if factor != 1.0 else ():
                parameter.grad.mul_(factor)
            optimizer.step()
        return
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


def _is_of_others(optimizer: torch.optim.Optimizer) -> bool:
    return not type(optimizer).__module__.startswith(("torch.optim.", "plait.optim."))


@contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give an optimizer gradients that it may keep, exchange or drop, as in a loop, and copy new data of a
    parameter into its memory."""
    before = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
    for parameter, _, gradient in before:
        parameter.grad = None if gradient is None else gradient.clone()
    try:
        yield
    finally:
        for parameter, data, gradient in before:
            if parameter.data_ptr() != data.data_ptr():
                data.copy_(parameter.data)
                parameter.data = data
            parameter.grad = gradient
