"""The needs of an optimizer's update, and the states that it makes.

[Note: three kinds of optimizers]
The engine has flat ranges of units, of which each rank owns one. What a class makes of them depends on what
the update of an element depends on:

  elements   this element alone (AdamW, SGD, Lion): it steps ranges of any kind. See `flat.py`
  norms      sums over the element's parameter as well (LAMB, LARS): it steps ranges of one parameter each,
             and calls `sum_over_shards` between its own sums and their use: one small all-reduce
  tensors    the full parameter (Muon's orthogonalization, Adafactor's rows and columns): one rank receives
             the full gradient and weights and sends back the update. See `parallel/zero/full_tensors.py`

A class that has `sum_over_shards` is of the second kind. Whether another one is of the first kind is tested:
an update must depend neither on the parameter's shape nor on whether it is split. What fails this test is of
the third kind if two parameters are updated together as each by itself. Only memory and communication depend
on the kind: all of them train the same under every plan.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, nearest

# Options of the optimizer's groups: group 0 has weight decay as in the arguments, group 1 has none.
DEFAULT_GROUPS: tuple[Mapping[str, Any], ...] = ({}, {"weight_decay": 0.0})

_REFUSED = {
    "LBFGS": "it searches along a direction over all parameters together",
    "SparseAdam": "it takes sparse gradients",
}
_PROBE = 8  # elements of the parameter on which an optimizer class is tested
_SIZES = (3, 5, 7, 11, 13, 17)  # of its dims, where the shape of states is tested


class Needs(Enum):
    """See [Note: three kinds of optimizers]."""

    ELEMENTS = "elements"
    NORMS = "norms"
    TENSORS = "full tensors"


@dataclass(frozen=True)
class GroupOptimizer:
    """The class that updates a group of parameters, and its arguments, those of the group included."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    _kinds_of: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = field(
        default_factory=dict, init=False, compare=False
    )

    @classmethod
    def of_groups(
        cls,
        optimizer_class: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
    ) -> "list[GroupOptimizer]":
        """The groups' optimizers: `optimizer_class` with `arguments`, or a group's own, `group["optimizer"]`,
        to which `arguments` do not apply. `weight_decay=0` is omitted for a class without weight decay."""
        result = []
        for group in groups:
            options = dict(group)
            own = options.pop("optimizer", optimizer_class)
            if options.get("weight_decay") == 0.0 and "weight_decay" not in _takes(own):
                del options["weight_decay"]
            result.append(cls(own, {**(arguments if own is optimizer_class else {}), **options}))
        return result

    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Build the class over parameters, or groups of them. Raises ConfigError for invalid arguments."""
        try:
            return self.optimizer_class(params, **self.arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            takes = _takes(self.optimizer_class)
            unknown = [key for key in self.arguments if key not in takes]
            raise ConfigError(
                f"{self.name} does not take these arguments",
                given=f"{dict(self.arguments)}: {error}",
                expected=", ".join(takes),
                hint=(nearest(unknown[0], takes) if unknown else None) or "{'lr': 1e-3}",
            ) from error

    def check(self) -> None:
        """Raise ConfigError for invalid arguments: torch checks none of those of a group."""
        self.build([torch.zeros(2, 2, requires_grad=True)])

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    @property
    def fuses(self) -> bool:
        """True if the class has a fused kernel, and the arguments choose no other."""
        is_chosen = {"fused", "foreach", "differentiable"} & self.arguments.keys()
        return "fused" in _takes(self.optimizer_class) and not is_chosen

    @cached_property
    def needs(self) -> Needs:
        """See [Note: three kinds of optimizers]. Raises ConfigError for a class that is of no kind, or for
        arguments that it cannot step with."""
        for base in self.optimizer_class.__mro__:
            if base.__name__ in _REFUSED:
                raise self.refusal(_REFUSED[base.__name__])
        half = _PROBE // 2
        matrix = self._update([(2, half)])
        if hasattr(self.optimizer_class, "sum_over_shards"):
            if not all(_are_close(self._update(shapes), matrix) for shapes in ([(_PROBE,)], [(half,)] * 2)):
                raise self.refusal("its update depends on more than `sum_over_shards` returns")
            return Needs.NORMS
        if self._is_elementwise(matrix):
            return Needs.ELEMENTS
        if not _are_close(self._update([(2, half // 2)] * 2), self._alone((2, half // 2))):
            raise self.refusal("its update of a parameter depends on other parameters")
        return Needs.TENSORS

    def _is_elementwise(self, matrix: Tensor) -> bool:
        """Return whether vectors are updated as the elements of `matrix`, also if they are split."""
        try:
            vectors = self._update([(_PROBE,)]), self._alone((_PROBE // 2,))
        except ConfigError:  # it takes no vectors
            return False
        return all(_are_close(each, matrix) for each in vectors)

    def _alone(self, shape: tuple[int, ...]) -> Tensor:
        """As `_update`, of two parameters of this shape, each by itself."""
        return torch.cat([self._update([shape], start) for start in (0, _PROBE // 2)])

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the states that a parameter of this shape has, by kind.

        A tensor's kind is its name (`exp_avg`); a counter is `scalar.step` or, if it is a Python number,
        `number.step`, of shape (). Raises ConfigError if the class cannot train such a parameter.
        """
        if self.needs is not Needs.TENSORS:
            return {kind: () if "." in kind else shape for kind in self._kinds((_PROBE,))}
        # One size for each dim, which the dims of states are recognized by.
        sizes = tuple(1 if size == 1 else tiny for size, tiny in zip(shape, _SIZES, strict=False))
        actual = {tiny: size for size, tiny in zip(shape, sizes, strict=True)}
        found = self._kinds(sizes)
        return {kind: tuple(actual.get(size, size) for size in dims) for kind, dims in found.items()}

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.name} cannot work on shards of parameters",
            given=reason,
            expected="an optimizer that updates each parameter by itself",
            hint="AdamW, Lion, LAMB, Muon, Adafactor, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam or Adamax",
        )

    def _kinds(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The states of a small parameter: their shapes by kind, () for counters."""
        if shape not in self._kinds_of:
            optimizer, leaves = self._probe([shape])
            state = optimizer.state.get(leaves[0], {})
            self._kinds_of[shape] = dict(
                self._kind(name, value) for name, value in state.items() if value is not None
            )
        return self._kinds_of[shape]

    def _kind(self, name: str, value: object) -> tuple[str, tuple[int, ...]]:
        if isinstance(value, bool | int | float):
            return f"number.{name}", ()
        if not isinstance(value, Tensor):
            raise self.refusal(f"its state {name} is a {type(value).__name__}")
        return (name, tuple(value.shape)) if value.ndim else (f"scalar.{name}", ())

    def _update(self, shapes: Sequence[tuple[int, ...]], start: int = 0) -> Tensor:
        """The weights after two steps on parameters of these shapes, which together hold the elements from
        `start` on of a small vector."""
        return torch.cat([leaf.detach().reshape(-1) for leaf in self._probe(shapes, start)[1]])

    def _probe(
        self, shapes: Sequence[tuple[int, ...]], start: int = 0
    ) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Run two steps on small parameters. Raises ConfigError."""
        leaves = []
        for shape in shapes:
            numbers = torch.arange(start, start := start + torch.Size(shape).numel(), dtype=torch.float64)
            leaf = (3 / _PROBE * numbers - 1 + 0.1 * numbers.cos()).view(shape).requires_grad_()
            leaf.grad = (3 - 0.5 * numbers + numbers.sin()).view(shape)
            leaves.append(leaf)
        optimizer = self.build(leaves)
        if hasattr(optimizer, "sum_over_shards"):
            optimizer.sum_over_shards = lambda _, sums: sums.sum(0, keepdim=True).expand_as(sums)
        before = _options_text(optimizer)
        try:
            for _ in range(2):
                optimizer.step()
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"{self.name} cannot step with these arguments",
                given=f"{dict(self.arguments)}: {error}",
                expected="arguments with which a step on one element succeeds",
                hint="{'lr': 1e-3}",
            ) from error
        if _options_text(optimizer) != before:
            raise self.refusal("it counts in its param_groups, which are stepped a slice at a time")
        return optimizer, leaves


def state_kinds(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = DEFAULT_GROUPS,
) -> set[str]:
    """The kinds of states of an optimizer on parameter servers, the same in all groups. Raises ConfigError
    unless it is element-wise, and for groups with different states."""
    optimizers = GroupOptimizer.of_groups(optimizer_class, arguments, groups)
    by_group = []
    for optimizer in optimizers:
        if optimizer.needs is not Needs.ELEMENTS:
            raise not_elementwise(optimizer, "parameter servers")
        by_group.append(set(optimizer.state_shapes((_PROBE,))))
    for group, kinds in zip(groups, by_group, strict=True):
        if kinds != by_group[0]:
            raise ConfigError(
                f"groups of one {optimizer_class.__name__} keep different states",
                given=f"{dict(group)} keeps {sorted(kinds)}",
                expected=f"{sorted(by_group[0])}, as {dict(groups[0]) or 'group 0'} does",
                hint="the same momentum, betas and amsgrad in all groups",
            )
    return by_group[0]


def not_elementwise(optimizer: GroupOptimizer, option: str) -> ConfigError:
    """The error for an option that only element-wise optimizers work with."""
    return ConfigError(
        f"{optimizer.name} does not work with {option}",
        given=f"{optimizer.name}, which needs {optimizer.needs.value} of parameters",
        expected="an element-wise optimizer",
        hint="AdamW, Lion, Adam or SGD",
    )


def _takes(optimizer_class: type[torch.optim.Optimizer]) -> list[str]:
    """The arguments of a class."""
    return list(inspect.signature(optimizer_class).parameters)[1:]


def _are_close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-6, atol=0.0, equal_nan=True)


def _options_text(optimizer: torch.optim.Optimizer) -> str:
    return repr([{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups])
