"""Forwards of modules other than linear layers, embeddings and norms: replicated ones between parallel ones,
experts, mixers and their convolutions; and per-head arguments (ALiBi slopes)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group
from plait.parallel.tensor.functional import (
    copy_ranges_to_group,
    copy_to_group,
    gather,
    reduce_from_group,
    split,
)
from plait.parallel.tensor.sequence_forward import map_hidden_input, map_hidden_output
from plait.parallel.tensor.shards import ShardedDim
from plait.parallel.tensor.side_inputs import Arguments
from plait.plan.sharding import ArgumentSharding, Range, TPPlan


@dataclass(frozen=True)
class HeadSlicer:
    """Forward pre-hook that slices an argument to this column's heads."""

    sharding: ArgumentSharding
    col: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        argument, dim, heads = self.sharding.argument, self.sharding.dim, self.sharding.heads
        all_heads = kwargs.get(argument)
        if not isinstance(all_heads, Tensor) or all_heads.shape[dim] % heads:
            return args, kwargs
        [(start, stop)] = self.sharding.sharding.ranges[self.col]
        own_heads = all_heads.unflatten(dim, (-1, heads)).narrow(dim, start, stop - start)
        return args, {**kwargs, argument: own_heads.flatten(dim - 1, dim)}


def slice_head_arguments(model: nn.Module, plan: TPPlan, col: int) -> None:
    """Register a hook for each of `plan.arguments`: the module gets this column's heads of it."""
    for sharding in plan.arguments:
        hook = HeadSlicer(sharding, col)
        model.get_submodule(sharding.module).register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(frozen=True)
class ReplicatedLayer:
    """Forward of a layer with full weights, between layers with sharded features.

    inp      its input's features are sharded like this: they are all-gathered
    out      the layers that follow take this shard of its output
    summed   output features that each rank of `col` uses independently: see `LayerSharding`
    """

    name: str
    forward: Callable[..., Any]
    inp: ShardedDim | None
    out: ShardedDim | None
    summed: tuple[Range, ...]
    col: Group

    @torch.compiler.disable(reason="a replicated layer between sharded ones")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inp, out = self.inp, self.out
        if inp is not None:
            args, kwargs = map_hidden_input(lambda x: gather(x, inp), self.name, args, kwargs)
        output = self.forward(module, *args, **kwargs)
        if self.summed:
            output = copy_ranges_to_group(output, self.summed, self.col)
        return output if out is None else map_hidden_output(lambda y: split(y, out), self.name, output)


@dataclass(frozen=True)
class ParallelExperts:
    """Forward of a module whose expert tensors are sharded over `col`: full input, partial output.

    The gradients of its floating-point arguments (hidden states and the weights that mix the experts) are
    partial sums too.
    """

    name: str
    forward: Callable[..., Any]
    col: Group

    @torch.compiler.disable(reason="experts")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args_copy = tuple(self._copy_to_group(value) for value in args)
        kwargs_copy = {key: self._copy_to_group(value) for key, value in kwargs.items()}
        output = self.forward(module, *args_copy, **kwargs_copy)
        return map_hidden_output(lambda y: reduce_from_group(y, self.col), self.name, output)

    def _copy_to_group(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            return copy_to_group(value, self.col)
        return value


@dataclass(frozen=True)
class UnfusedForward:
    """Forward of a mixer, as when it is evaluated.

    [Note: fused kernels of mixers]
    While training, mixers call a fused kernel if one is installed. It reads the weights of several layers and
    leaves out their forwards, and with them the sums over columns. Mixers tell training by their own flag,
    and have no dropout. Kernels of single steps (convolution, scan) get tensors of this column's channels.
    """

    forward: Callable[..., Any]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        training, module.training = module.training, False
        try:
            return self.forward(module, *args, **kwargs)
        finally:
            module.training = training


def read_own_channels(module: nn.Module, channels: tuple[Range, ...]) -> None:
    """Make a module with all weights read as one with those of some channels."""
    cls = type(module)
    properties = {key: property(_OwnChannels(key)) for key in ("weight", "bias")}
    own_class = _CLASSES.get(cls) or type(cls.__name__, (cls,), properties)
    module.plait_channels = channels  # type: ignore[assignment]  # a module's attributes are tensors to mypy
    module.__class__ = _CLASSES[cls] = own_class


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # by original class


@dataclass(frozen=True)
class _OwnChannels:
    key: str

    def __call__(self, module: Any) -> Tensor | None:
        full = module._parameters[self.key]
        return (
            None if full is None else torch.cat([full[start:stop] for start, stop in module.plait_channels])
        )
