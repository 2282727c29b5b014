"""Operations on the samples of all data ranks: a differentiable all-gather, for losses that compare samples,
and BatchNorm with the statistics of all micro-batches (Ioffe and Szegedy 1502.03167, algorithm 1).

# N samples and positions of this rank  C channels

[Note: gradient of the sum over ranks]
An engine trains on the sum of what `loss=` returns on the data ranks, divided by the sum of the numbers of
targets. A rank's features are in the losses of all ranks, so their gradient is the sum over these losses: the
backward pass is a reduce-scatter of sums. It does not matter then whether every rank returns the loss of all
samples (which counts the loss and the targets once per rank) or that of its own samples.

[Note: synchronized statistics]
torch's SyncBatchNorm, for accelerators, gathers a mean, a variance and a count of each rank. Here sums are
all-reduced: first of the values, then of the squared distances from the mean, which avoids cancellation.
Their backward is an all-reduce too, as every rank's output depends on every rank's input.
"""

import zlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from plait.comm import Group, reduce_scatter
from plait.comm import all_gather as all_gather_into
from plait.errors import CommError
from plait.parallel.tensor.functional import differentiable_all_reduce

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


def batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the modules that will compute with the statistics of a batch, with their names.

    A model in evaluation mode will be trained completely; otherwise parts of it may be frozen on purpose.
    """
    for name, module in model.named_modules():
        is_trained = module.training or not model.training
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and is_trained:
            yield name, module


def sync_batch_norms(model: nn.Module, group: Group) -> None:
    """Replace the forward of each BatchNorm, in place. `group`: the data ranks."""
    modules: list[nn.Module] = [module for _, module in batch_norms(model)]
    for module in modules:
        module.forward = MethodType(SyncedBatchNorm(module.forward, group), module)


class SyncedBatchNorm:
    """The forward of a BatchNorm over all ranks of a group; bound to the module by `types.MethodType`. See
    [Note: synchronized statistics]."""

    def __init__(self, forward: Callable[[Tensor], Tensor], group: Group) -> None:
        self._local: Any = getattr(forward, "__func__", forward)
        self._group = group

    @torch.compiler.disable(reason="a synchronized BatchNorm")
    def __call__(self, module: _BatchNorm, x: Tensor) -> Tensor:
        """Normalize `x` (B, C, ...), in its dtype; statistics are in float32 at least."""
        if not module.training:
            return self._local(module, x)
        wide = x.transpose(0, 1).flatten(1).to(torch.promote_types(x.dtype, torch.float32))  # (C, N)
        count = torch.full((1,), wide.shape[1], dtype=wide.dtype, device=x.device)
        sums = differentiable_all_reduce(torch.cat([wide.sum(1), count]), self._group)
        count, mean_C = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        centered = wide - mean_C[:, None]
        variance_C = differentiable_all_reduce(centered.square().sum(1), self._group) / count
        _update_running_statistics(
            module, mean_C.detach(), variance_C.detach() * (count / (count - 1).clamp(min=1))
        )
        y = centered * torch.rsqrt(variance_C + module.eps)[:, None]
        if module.affine:
            y = y * module.weight[:, None] + module.bias[:, None]
        return y.to(x.dtype).unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)


@torch.no_grad()
def _update_running_statistics(module: _BatchNorm, mean_C: Tensor, variance_C: Tensor) -> None:
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked += 1
    momentum: Any = module.momentum
    factor = 1.0 / module.num_batches_tracked.to(mean_C) if momentum is None else momentum
    module.running_mean += factor * (mean_C.to(module.running_mean) - module.running_mean)
    module.running_var += factor * (variance_C.to(module.running_var) - module.running_var)
