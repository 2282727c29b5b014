"""Forwards of modules other than linear layers and norms: embeddings, replicated layers between parallel
ones, experts, mixers and their convolutions; and per-head arguments (ALiBi slopes).

# B batch  S sequence  H hidden;  h = this rank's features

[Note: sharded embeddings]
Embeddings are sharded over the vocabulary (`col`) and over features (`row`). Every rank looks up the indices
in its vocabulary range and sets the rows of all others to zero; the sum over `col` then contains each row
once. The module's own forward does the lookup, with indices into the rank's shard, so what a subclass adds to
it (Gemma's scale) is preserved.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group
from plait.errors import ModelError
from plait.parallel.tensor.functional import (
    all_reduce_in_place,
    copy_ranges_to_group,
    copy_to_group,
    gather,
    reduce_from_group,
    split,
)
from plait.parallel.tensor.sequence_forward import Arguments, map_hidden_input, map_hidden_output
from plait.parallel.tensor.shards import ShardedDim
from plait.parallel.tensor.shared_input import weight_of
from plait.plan.sharding import ArgumentSharding, Range, TPPlan


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """Forward of an embedding whose vocabulary is sharded. See [Note: sharded embeddings]."""

    forward: Callable[..., Tensor]
    vocabulary: ShardedDim

    @torch.compiler.disable(reason="an embedding")
    def __call__(self, module: nn.Module, indices_BS: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_indices(indices_BS, self.vocabulary.full_size)
        ranges = self.vocabulary.sharding.ranges[self.vocabulary.coord]
        local_BS, mask_BS = _to_local(indices_BS, ranges)
        if not self.vocabulary.is_first:
            mask_BS = torch.ones_like(mask_BS)  # a copy of a shard: the first holder provides its rows
        if any(stop > start for start, stop in ranges):
            with _padding_in_shard(module, self.vocabulary):
                rows = self.forward(module, local_BS, *args, **kwargs)
        else:  # in the graph, as on other ranks: a consumer reduces gradients on every rank or on none
            weight = weight_of(module)
            rows = weight.new_zeros(*indices_BS.shape, weight.shape[-1]) + weight.sum()
        return _MaskAndReduce.apply(rows, mask_BS, self.vocabulary.group)


def _check_indices(indices: Tensor, size: int) -> None:
    """Raise ModelError for an index that no rank holds; a GPU is not synchronized, but asserts, as in torch's
    embedding."""
    if indices.is_meta:
        return
    is_valid = (indices >= 0) & (indices < size)
    if indices.device.type != "cpu":
        torch._assert_async(is_valid.all())
    elif not is_valid.all():
        raise ModelError(
            "an index is not in the embedding's table",
            given=int(indices[~is_valid][0]),
            expected=f"0 to {size - 1}: ids of tokens in the model's vocabulary",
            hint="the model's own tokenizer",
        )


def check_embedding(name: str, module: nn.Module) -> None:
    """Raise ModelError if the embedding cannot be sharded over the vocabulary."""
    for option, default in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
        value = getattr(module, option, default)
        if value != default:
            raise ModelError(
                f"cannot shard the embedding {name} over its vocabulary",
                given=f"{option}={value}, which needs the rows of all ranks",
                expected=f"{option}={default}",
                hint="tp=1",
            )


@contextlib.contextmanager
def _padding_in_shard(module: Any, vocabulary: ShardedDim) -> Iterator[None]:
    """Let `padding_idx`, whose row gets no gradient, be a row of this rank's shard, or None. An adapter with
    a full table reads it outside of the embedding's forward."""
    index = getattr(module, "padding_idx", None)
    if index is None:
        yield
        return
    begin, module.padding_idx = 0, None
    for start, stop in vocabulary.sharding.ranges[vocabulary.coord]:
        if start <= index < stop:
            module.padding_idx = begin + index - start
        begin += stop - start
    try:
        yield
    finally:
        module.padding_idx = index


def _to_local(indices: Tensor, ranges: tuple[Range, ...]) -> tuple[Tensor, Tensor]:
    """Return indices into the rank's shard, 0 for those of other ranks, and the mask of the latter."""
    local, mask = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    begin = 0
    for start, stop in ranges:
        is_local = (indices >= start) & (indices < stop)
        local = torch.where(is_local, indices - (start - begin), local)
        mask = mask & ~is_local
        begin += stop - start
    return local, mask


class _MaskAndReduce(Function):
    """Set masked rows to zero and all-reduce, both in the lookup's output."""

    @staticmethod
    def forward(ctx: Any, rows_BSh: Tensor, mask_BS: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(mask_BS)
        ctx.mark_dirty(rows_BSh)
        return all_reduce_in_place(
            rows_BSh.masked_fill_(mask_BS.unsqueeze(-1), 0), group, "rows of an embedding"
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSh: Tensor) -> tuple[Tensor | None, ...]:
        (mask_BS,) = ctx.saved_tensors
        return grad_BSh.masked_fill(mask_BS.unsqueeze(-1), 0), None, None


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
