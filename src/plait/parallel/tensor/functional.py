"""What communicates inside a cut model's forward and backward, as functions that autograd knows.

  function         forward              backward             where
  spread           identity             sum over the group   what all ranks have is read by each for itself
  total            sum over the group   identity             parts of a tensor become one
  total_of_parts   sum                  sum                  a statistic that all ranks add to and use
  gather_features  pieces to the whole  own piece            what follows is the same on every rank
  split_features   own piece            pieces to the whole  what came before is the same on every rank

Spread and total are f and g of Megatron-LM (Shoeybi et al. 1909.08053, section 3). A group of one
communicates with nobody. On meta tensors only shapes come about. None of them can be differentiated twice:
torch says so.

[Note: shared pieces count once]
Ranks that have the same piece (kv heads fewer than columns) hold copies, whose gradients are parts of a sum
that somebody else takes. What is the same on every rank must therefore reach one copy only, the first: the
gradient of a gathered whole, and a copy's part in a statistic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from plait.comm import Group, Work, all_gather, all_reduce, start_all_reduce
from plait.parallel.tensor.groups import ShardedDim


def all_reduce_in_place(tensor: Tensor, group: Group, label: str = "") -> Tensor:
    """Sums a tensor that nobody else has over the group."""
    if group.size > 1:
        all_reduce(tensor, group, label=label)
        increment_version(tensor)  # whoever kept it before the sum can tell
    return tensor


def start_all_reduce_in_place(tensor: Tensor, group: Group, label: str = "") -> Work:
    """The same, begun: for gradients, which are not kept."""
    if group.size == 1:
        return Work()
    return start_all_reduce(tensor, group, label=label)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    return _CopyToGroup.apply(x, group) if group.size > 1 else x


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    return _ReduceFromGroup.apply(x, group) if group.size > 1 else x


def differentiable_all_reduce(x: Tensor, group: Group) -> Tensor:
    return _DifferentiableAllReduce.apply(x, group) if group.size > 1 else x


def copy_tail_to_group(x: Tensor, width: int, group: Group) -> Tensor:
    """`copy_to_group` of the last `width` features alone."""
    return _CopyTailToGroup.apply(x, width, group) if group.size > 1 and width else x


def gather_features(piece: Tensor, cut: ShardedDim) -> Tensor:
    """(..., piece) to (..., whole). See [Note: shared pieces count once]."""
    return _GatherFeatures.apply(piece, cut) if cut.group.size > 1 else piece


def split_features(whole: Tensor, cut: ShardedDim) -> Tensor:
    """(..., whole) to (..., piece)."""
    return _SplitFeatures.apply(whole, cut) if cut.group.size > 1 else whole


def all_gather_features(piece: Tensor, cut: ShardedDim) -> Tensor:
    """The whole of which every rank has its features. Uneven pieces travel padded."""
    group, sizes = cut.group, cut.dim.sizes
    whole = piece.new_empty(*piece.shape[:-1], cut.whole)
    longest = max(sizes)
    buffer = piece.new_empty(group.size, *piece.shape[:-1], longest)
    buffer[cut.place, ..., : piece.shape[-1]] = piece
    if piece.shape[-1] < longest:
        buffer[cut.place, ..., piece.shape[-1] :] = 0
    all_gather(buffer.view(-1), buffer[cut.place].view(-1), group, label="features")
    for place, size in enumerate(sizes):
        cut.put(whole, buffer[place, ..., :size], place)
    return whole


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce_in_place(_own_copy(grad), ctx.group), None


class _CopyTailToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, group: Group) -> Tensor:
        ctx.width, ctx.group = width, group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        summed = _own_copy(grad)
        tail = _own_copy(summed[..., -ctx.width :])
        summed[..., -ctx.width :] = all_reduce_in_place(tail, ctx.group)
        return summed, None, None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce_in_place(_own_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(_: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _DifferentiableAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_in_place(_own_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce_in_place(_own_copy(grad), ctx.group), None


class _GatherFeatures(Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, cut: ShardedDim) -> Tensor:
        ctx.cut = cut
        return all_gather_features(piece, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.cut.own(grad)
        return own if ctx.cut.is_first else torch.zeros_like(own), None


class _SplitFeatures(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: ShardedDim) -> Tensor:
        ctx.cut = cut
        return cut.own(whole).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_features(grad, ctx.cut), None


def _own_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
