"""Modules that are handed something of all heads take this column's of it: ALiBi's slopes."""

from typing import Any

from torch import Tensor, nn

from plait.plan.tensor import ArgumentCut, TensorPlan


class OwnHeads:
    """A forward pre-hook that leaves a module this column's heads of an argument. See `ArgumentCut`."""

    def __init__(self, cut: ArgumentCut, col: int) -> None:
        self._argument, self._dim, self._heads = cut.argument, cut.dim, cut.heads
        ((self._start, self._stop),) = cut.cut.ranges[col]

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = kwargs.get(self._argument)
        if not isinstance(whole, Tensor) or whole.shape[self._dim] % self._heads:
            return args, kwargs
        by_head = whole.unflatten(self._dim, (-1, self._heads))
        mine = by_head.narrow(self._dim, self._start, self._stop - self._start)
        return args, {**kwargs, self._argument: mine.flatten(self._dim - 1, self._dim)}


def take_own_heads(model: nn.Module, plan: TensorPlan, col: int) -> None:
    """Sees to `plan.arguments` on a model: each module gets this column's heads of them."""
    for cut in plan.arguments:
        hook = OwnHeads(cut, col)
        model.get_submodule(cut.module).register_forward_pre_hook(hook, with_kwargs=True)
