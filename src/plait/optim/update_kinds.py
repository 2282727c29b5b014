"""The scope of an optimizer's update, and the states that it makes.

[Note: four kinds of optimizers]
The engine has flat ranges of units; each rank owns one range of a unit. How an optimizer uses these ranges
depends on what its update of an element reads:

  elements   this element alone (AdamW, SGD, Lion): it steps ranges of any kind. See `flat_optimizer.py`
  blocks     this element alone, but states are stored in codes whose scale 256 elements share (AdamW8bit):
             it steps ranges of any kind that begin at multiples of 256. See `adamw_8bit.py`
  norms      sums over the element's parameter as well (LAMB, LARS): it steps ranges of one parameter each,
             and calls `sum_over_shards` between its own sums and their use: one small all-reduce
  tensors    the full parameter (Muon's orthogonalization, Adafactor's rows and columns): one rank receives
             the full gradient and weights and sends back the update. See `parallel/zero/full_tensors.py`

A class says of which kind it is. torch's element-wise ones are listed here; another is of the first kind if
it declares `is_elementwise = True`, in the class itself: what is derived from it may do something else. One
that has `sum_over_shards` is of the second kind. All others are of the third, which is right for a class if
updating two parameters together gives the same result as updating each alone. Only memory and
communication depend on the kind: all of them train the same under every plan.

[Note: trying an optimizer]
The declaration of a class is tried on small parameters. A rule may depend on the tensor only where gradients
are large or change their signs, after some steps, or from a size on (second moments of rows and columns): so
the gradients of `_STEPS` steps differ in size and signs, and shapes include one that published rules factor.
Units are stepped one after another, so a class that counts its own calls would count units: parameters are
also stepped by turns. A rule that none of this finds would train wrongly, so nothing undeclared is trusted.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ConfigError, nearest
from plait.models.trace.modes import Operators
from plait.optim.adamw_8bit import AdamW8bit

# Options of the optimizer's groups: group 0 has weight decay as in the arguments, group 1 has none.
DEFAULT_GROUPS: tuple[Mapping[str, Any], ...] = ({}, {"weight_decay": 0.0})

_REFUSED = {
    "LBFGS": "it searches along a direction over all parameters together",
    "SparseAdam": "it takes sparse gradients",
}
_NAMES = "AdamW Adam SGD Adagrad RMSprop NAdam RAdam Adamax Adadelta ASGD Rprop"
_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())
DECLARATION = "is_elementwise = True in the class, if an element's update depends on this element alone"
# See [Note: trying an optimizer]
_STEPS = 6
_SHAPES = ((24,), (2, 12), (2, 3, 2, 2), (160, 160))
_PARTS = ([(9,), (15,)], [(1, 12)] * 2)  # of the first shape
_LARGE_PARTS = [(9_000,), (16_600,)]  # of the last one
_SIZES = (3, 5, 7, 11, 13, 17)  # of dims, where the shape of states is tried


class UpdateScope(Enum):
    """See [Note: four kinds of optimizers]."""

    ELEMENTS = "elements"
    BLOCKS = "blocks of 256 elements"
    NORMS = "norms"
    TENSORS = "full tensors"


@dataclass(frozen=True)
class GroupOptimizer:
    """The class that updates a group of parameters, and its arguments, with the group's own."""

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
        """Raise ConfigError for invalid arguments: torch does not check the arguments of a group."""
        self.build([torch.zeros(2, 2, requires_grad=True)])

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    @property
    def fuses(self) -> bool:
        """True if the class has a fused kernel, and the arguments choose no other."""
        is_chosen = {"fused", "foreach", "differentiable"} & self.arguments.keys()
        return "fused" in _takes(self.optimizer_class) and not is_chosen

    @property
    def is_known(self) -> bool:
        """True if the class says of which kind it is. See [Note: four kinds of optimizers]."""
        own = self.optimizer_class
        is_torchs = own.__module__.partition(".optim")[0] == "torch"
        return is_torchs or "is_elementwise" in vars(own) or hasattr(own, "sum_over_shards")

    @cached_property
    def scope(self) -> UpdateScope:
        """See [Note: four kinds of optimizers]. Raises ConfigError for a class that is of no kind or not of
        the one that it declares, or for arguments that it cannot step with."""
        own = self.optimizer_class
        for base in own.__mro__:
            if base.__name__ in _REFUSED:
                raise self.refusal(_REFUSED[base.__name__])
        if own in _ELEMENTWISE:
            self._kinds((24,))  # raises for arguments
            return UpdateScope.ELEMENTS
        matrix = self._update([(2, 12)])
        if not _are_close(self._update([(2, 12)], reads_first=True), matrix):
            raise self.refusal("it reads the parameters when it is built, before they have their values")
        if hasattr(own, "sum_over_shards"):
            self._try_by_turns()
            if not all(_are_close(self._update(shapes), matrix) for shapes in ([(24,)], *_PARTS)):
                raise self.refusal("its update depends on more than `sum_over_shards` returns")
            return UpdateScope.NORMS
        if issubclass(own, AdamW8bit):
            self._try_elements()
            return UpdateScope.BLOCKS
        if vars(own).get("is_elementwise", False):
            self._try_elements()
            return UpdateScope.ELEMENTS
        alone = torch.cat([self._update([(2, 6)], start) for start in (0, 12)])
        if not _are_close(self._update([(2, 6)] * 2), alone):
            raise self.refusal("its update of a parameter depends on other parameters")
        return UpdateScope.TENSORS

    def _try_elements(self) -> None:
        """Raise ConfigError unless vectors are updated as the same elements in other shapes and in parts."""
        for shape in _SHAPES:
            large = self._update([(math.prod(shape),)])
            if not _are_close(self._update([shape]), large):
                raise self._misdeclared(f"a parameter of shape {shape} is not updated as a vector is")
        vector = self._update([(24,)])
        parts = [(vector, shapes) for shapes in _PARTS] + [(large, _LARGE_PARTS)]
        if not all(_are_close(self._update(shapes), of) for of, shapes in parts):
            raise self._misdeclared("parts of a parameter are not updated as the full one is")
        self._try_by_turns()

    def _try_by_turns(self) -> None:
        """Raise ConfigError unless parameters may be stepped one after another."""
        by_turns, together = (self._update([(12,), (12,)], turns=turns) for turns in (2, 1))
        if not _are_close(by_turns, together):
            raise self._misdeclared(
                "two groups that are stepped by turns are updated otherwise: it counts, or reads other groups"
            )

    def _misdeclared(self, reason: str) -> ConfigError:
        declared = "sum_over_shards" if hasattr(self.optimizer_class, "sum_over_shards") else "is_elementwise"
        return ConfigError(
            f"{self.name} is not what its {declared} declares",
            given=reason,
            expected="an update that depends on one element's weights, gradients and states"
            + (" and on sums over its parameter" if declared == "sum_over_shards" else ""),
            hint=f"without {declared}, its ranks update full tensors, which is right for all that updates "
            "each parameter by itself",
        )

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the states that a parameter of this shape has, by kind.

        A tensor's kind is its name (`exp_avg`); a counter is `scalar.step` or, if it is a Python number,
        `number.step`, of shape (). Raises ConfigError if the class cannot train such a parameter.
        """
        if self.scope is not UpdateScope.TENSORS:
            return {kind: () if "." in kind else shape for kind in self._kinds((24,))}
        try:
            return self._kinds(shape, "meta")
        except ConfigError:  # it may need numbers
            pass
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
            hint="AdamW, AdamW8bit, Lion, LAMB, Muon, Adafactor, Adam, SGD, Adagrad, RMSprop, NAdam, "
            "RAdam or Adamax",
        )

    def _kinds(self, shape: tuple[int, ...], device: str = "cpu") -> dict[str, tuple[int, ...]]:
        """The states of a parameter: their shapes by kind, () for counters."""
        if shape not in self._kinds_of:
            optimizer, leaves = self._probe([shape], device=device)
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

    def _update(self, shapes: Sequence[tuple[int, ...]], start: int = 0, **options: Any) -> Tensor:
        """The weights after steps on parameters of these shapes, which together hold the elements from
        `start` on of a vector. `options`: see `_probe`."""
        return torch.cat([leaf.detach().reshape(-1) for leaf in self._probe(shapes, start, **options)[1]])

    def _probe(
        self,
        shapes: Sequence[tuple[int, ...]],
        start: int = 0,
        *,
        device: str = "cpu",
        reads_first: bool = False,
        turns: int = 0,
    ) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Run steps on parameters. Raises ConfigError. See [Note: trying an optimizer].

        reads_first   parameters have their values already when the class is built
        turns         0: the parameters are parts of one, for `sum_over_shards`; 1, 2: each is in a group of
                      its own, with another learning rate; 2: and a step is a call for each group
        """
        leaves: list[Tensor] = []
        numbers: list[Tensor] = []
        for shape in shapes:
            stop = start + math.prod(shape)
            numbers.append(torch.arange(start, stop, dtype=torch.float64, device=device).view(shape))
            leaves.append(nn.Parameter(torch.zeros_like(numbers[-1])))
            start = stop

        def fill() -> None:
            for leaf, number in zip(leaves, numbers, strict=True):
                leaf.data.copy_((2.3 * number).cos() + 0.1)

        if reads_first:
            fill()
        groups: list[dict[str, Any]] = [{"params": [leaf]} for leaf in leaves]
        optimizer = self.build(groups if turns else leaves)
        for index, group in enumerate(optimizer.param_groups):
            group |= {"lr": group["lr"] * 0.5**index} if isinstance(group.get("lr"), float) else {}
        fill()
        if hasattr(optimizer, "sum_over_shards") and not turns:
            optimizer.sum_over_shards = lambda _, sums: sums.sum(0, keepdim=True).expand_as(sums)
        before, all_groups = _options_text(optimizer), optimizer.param_groups
        try:
            with Operators():  # shapes of states do not depend on numbers that are read on meta
                for step in range(_STEPS):
                    for leaf, number in zip(leaves, numbers, strict=True):
                        leaf.grad = 100.0 ** (step % 4 - 1) * ((number + 1) * (0.7 * step + 1.3)).sin()
                    for turn in [[group] for group in all_groups] if turns > 1 else [all_groups]:
                        optimizer.param_groups = turn
                        optimizer.step()
                    optimizer.param_groups = all_groups
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
        if optimizer.scope is not UpdateScope.ELEMENTS:
            raise not_elementwise(optimizer, "parameter servers")
        by_group.append(set(optimizer.state_shapes((1,))))
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
        given=f"{optimizer.name}, which needs {optimizer.scope.value} of parameters",
        expected="an element-wise optimizer",
        hint="AdamW, Lion, Adam or SGD" + ("" if optimizer.is_known else f"; or {DECLARATION}"),
    )


def _takes(optimizer_class: type[torch.optim.Optimizer]) -> list[str]:
    """The arguments of a class."""
    return list(inspect.signature(optimizer_class).parameters)[1:]


def _are_close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-6, atol=0.0, equal_nan=True)


def _options_text(optimizer: torch.optim.Optimizer) -> str:
    return repr([{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups])
