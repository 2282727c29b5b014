"""Layers that keep whole weights among cut ones, and modules of experts.

Modules that are handed something of all heads take this column's of it: ALiBi's slopes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group
from plait.parallel.tensor.functional import gather_features, split_features, spread, spread_tail, total
from plait.parallel.tensor.groups import ShardedDim
from plait.parallel.tensor.sequence_forward import with_input, with_output
from plait.plan.sharding import ArgumentSharding, TPPlan


class OwnHeads:
    """A forward pre-hook that leaves a module this column's heads of an argument. See `ArgumentSharding`."""

    def __init__(self, cut: ArgumentSharding, col: int) -> None:
        self._argument, self._dim, self._heads = cut.argument, cut.dim, cut.heads
        ((self._start, self._stop),) = cut.sharding.ranges[col]

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = kwargs.get(self._argument)
        if not isinstance(whole, Tensor) or whole.shape[self._dim] % self._heads:
            return args, kwargs
        by_head = whole.unflatten(self._dim, (-1, self._heads))
        mine = by_head.narrow(self._dim, self._start, self._stop - self._start)
        return args, {**kwargs, self._argument: mine.flatten(self._dim - 1, self._dim)}


def take_own_heads(model: nn.Module, plan: TPPlan, col: int) -> None:
    """Sees to `plan.arguments` on a model: each module gets this column's heads of them."""
    for cut in plan.arguments:
        hook = OwnHeads(cut, col)
        model.get_submodule(cut.module).register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(frozen=True)
class ReplicatedLayer:
    """The forward of a layer with a whole weight, given and giving what its neighbours have.

    inp   its input is this cut of what it reads: it is gathered
    out   its neighbours want this cut of its output
    tail  of its output so many last features are read by every rank of `col` for itself: DeepSeek's rotary
          key, which all heads share, behind the latent that COLUMN layers read
    """

    name: str
    forward: Callable[..., Any]
    inp: ShardedDim | None
    out: ShardedDim | None
    tail: int
    col: Group

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inp, out = self.inp, self.out
        if inp is not None:
            args, kwargs = with_input(lambda x: gather_features(x, inp), self.name, args, kwargs)
        output = self.forward(module, *args, **kwargs)
        if self.tail:
            output = spread_tail(output, self.tail, self.col)
        return output if out is None else with_output(lambda y: split_features(y, out), self.name, output)


@dataclass(frozen=True)
class ParallelExperts:
    """The forward of a module of expert tensors that are cut over `col`: what it reads is whole, what it
    gives a part.

    The gradients of its hidden states and of the weights that mix its experts (its floating arguments) are
    parts.
    """

    name: str
    forward: Callable[..., Any]
    col: Group

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        spread_args = tuple(self._spread(value) for value in args)
        spread_kwargs = {key: self._spread(value) for key, value in kwargs.items()}
        output = self.forward(module, *spread_args, **spread_kwargs)
        return with_output(lambda y: total(y, self.col), self.name, output)

    def _spread(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            return spread(value, self.col)
        return value
