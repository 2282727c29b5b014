"""A differentiable all-gather, for losses that compare the samples of all data ranks.

[Note: gradient of the sum over ranks]
An engine trains on the sum of what `loss=` returns on the data ranks, divided by the sum of the numbers of
targets. A rank's features are in the losses of all ranks, so their gradient is the sum over these losses: the
backward pass is a reduce-scatter of sums. It does not matter then whether every rank returns the loss of all
samples (which counts the loss and the targets once per rank) or that of its own samples.
"""

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, reduce_scatter
from plait.comm import all_gather as all_gather_into
from plait.errors import CommError

_LABEL = "a differentiable all-gather"


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Concatenate the tensors of a group's ranks along dim 0, in order of rank; backward reaches all of them.

    For a loss over the samples of all data ranks, such as CLIP's: `group` is `engine.data_group`. Ranks may
    have different numbers of samples. See [Note: gradient of the sum over ranks]: so `loss=` returns, on
    every rank, either the loss summed over all samples and their number, or the loss summed over
    the rank's own samples and their number; a step's loss is the mean over all samples in both cases. With
    `micro` above 1, the samples are those of one micro-batch of every rank. In a group of one rank, the
    result is `tensor` itself.

    Every rank must call it, and use its result in the loss: the backward pass communicates too. A second
    derivative raises an error (torch's). Raises CommError if the ranks' tensors differ in dtype or in a dim
    other than the first.
    """
    if group.size == 1:
        return tensor
    lengths = _lengths(tensor, group)
    gathered: Tensor = _AllGather.apply(tensor, group, lengths)
    return gathered


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, lengths: list[int]) -> Tensor:
        ctx.group, ctx.lengths = group, lengths
        padded = _padded(tensor, max(lengths))
        gathered = padded.new_empty(group.size * len(padded), *padded.shape[1:])
        all_gather_into(gathered, padded, group, label=_LABEL)
        if min(lengths) == max(lengths):
            return gathered
        parts = gathered.split(max(lengths))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, lengths = ctx.group, ctx.lengths
        full = grad.contiguous()
        if min(lengths) != max(lengths):
            full = torch.cat([_padded(part, max(lengths)) for part in grad.split(lengths)])
        own = full.new_empty(max(lengths), *full.shape[1:])
        reduce_scatter(own, full, group, label=_LABEL)
        return own[: lengths[group.rank]], None, None


def _lengths(tensor: Tensor, group: Group) -> list[int]:
    """Return the ranks' sizes along dim 0. Raises CommError if they differ in another way."""
    if not tensor.ndim:
        raise CommError(
            "a tensor without dims cannot be gathered along dim 0",
            given="shape ()",
            expected="at least one dim",
            hint="tensor.reshape(1)",
        )
    if tensor.is_meta:  # a dry run has one batch shape
        return [tensor.shape[0]] * group.size
    digest = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
    facts = torch.empty(2 * group.size, dtype=torch.int64, device=tensor.device)
    own = torch.tensor([tensor.shape[0], digest], device=tensor.device)
    all_gather_into(facts, own, group, label=_LABEL)
    lengths, digests = facts.view(-1, 2).t().tolist()
    if len(set(digests)) > 1:
        raise CommError(
            "the tensors of an all-gather differ between ranks in more than their first dim",
            given=f"{tensor.dtype} {tuple(tensor.shape)} on this rank",
            expected="one dtype, and one size of every other dim",
            hint="torch.nn.functional.pad, to one size of the other dims",
        )
    return [int(length) for length in lengths]


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Return a contiguous tensor with `length` entries along dim 0."""
    if tensor.shape[0] == length:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])])
