"""Pushes of a worker's gradients: as they are, by a codec of the plan's `reduce`, or in part.

[Note: pushes during backward]
To a worker's engine, pushes are the reduction of a unit's gradient: they start when backward has completed
it, and the engine waits for them before it commits. Each server has a thread that sends.

[Note: sparse pushes]
A push may have some blocks of a chunk only: their contents, then their numbers. Elements of other blocks are
zero. With reduce=fp32 blocks are of _BLOCK elements, and zero blocks are left out: rows of an
embedding, and parameters, that a batch does not use. With reduce=topk:R blocks are of one element, and
the largest magnitudes of each chunk are sent (Aji and Heafield, 1704.05021; Lin et al., 1712.01887).

[Note: error feedback of pushes]
What was not sent is added to the worker's next push (see `comm/compression.py`): each worker has its own
residual, whichever order servers apply pushes in. It is discarded with a step that was skipped, and it is not
saved.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import CODECS, Compressor, PartialReduceWork, ReduceWork, Work
from plait.comm.compression import Codec
from plait.comm.connection import Message, as_bytes
from plait.errors import ModelError
from plait.parallel.zero.flat_param import FlatParam
from plait.plan.compression import BLOCK
from plait.plan.servers import top_share
from plait.server.protocol import Chunk

_BLOCK = 64  # elements of a block that is left out if it is zero
_NUMBER = torch.int32


@dataclass(frozen=True)
class Push:
    """A chunk's gradient as it is sent. `block`: elements of a block, if it is sparse; `count`: blocks."""

    payload: Tensor
    block: int = 0
    count: int = 0


class PushReduction:
    """Pushes units' gradients. Implements `GradReduction`; see [Note: pushes during backward]."""

    is_single = True
    scratch_bytes = 0
    compressors: Sequence[Compressor] = ()

    def __init__(self, push: Callable[[FlatParam], Sequence[Future[None]]], *, has_norm: bool) -> None:
        """`push`: start to send what is in a unit's `grad_shard`. `has_norm`: compute the gradient's norm."""
        self._push = push
        self._has_norm = has_norm

    def start(self, unit: FlatParam, grads: Tensor) -> ReduceWork:
        gradient = unit.grad_shard  # where servers read it
        if grads.data_ptr() != gradient.data_ptr():
            gradient.copy_(grads)
        work = PartialReduceWork([gradient], Work(*(push.result for push in self._push(unit))))
        if not self._has_norm:
            work.squares = torch.zeros((), dtype=torch.float64)
        return work

    def start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> tuple[Tensor, Work]:  # noqa: ARG002
        raise AssertionError("a worker has no replicas")


class GradientEncoder:
    """Encodes a worker's gradients, a chunk at a time; `unit.grad_shard` then holds what servers decode."""

    def __init__(self, reduce: str, units: Sequence[FlatParam]) -> None:
        """`reduce`: of the plan."""
        self._codec = CODECS.get(reduce)
        self._units = units
        self._top_share = top_share(reduce)
        has_residuals = self._top_share or (self._codec is not None and self._codec.error_feedback)
        self._residuals = [torch.zeros_like(unit.grad_shard) for unit in units] if has_residuals else []

    @property
    def is_exact(self) -> bool:
        """True if servers get the gradients as they are."""
        return self._codec is None and not self._top_share

    @property
    def residual_bytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals)

    def encode(self, chunk: Chunk) -> Push:
        """Return what to send of a chunk's gradient."""
        gradient = self._units[chunk.unit].grad_shard[chunk.start : chunk.stop]
        if self.is_exact:
            return _without_zeros(gradient)
        if self._residuals:
            residual = self._residuals[chunk.unit][chunk.start : chunk.stop]
            gradient.add_(residual)
            residual.copy_(gradient)
        if self._codec is None:
            numbers = gradient.abs().topk(math.ceil(self._top_share * gradient.numel()), sorted=False).indices
            push = _sparse(gradient, numbers, 1)
            _scattered(push.payload, gradient, 1, push.count)
        else:
            codes = _encoded(gradient, self._codec)
            gradient.copy_(_decoded(codes, gradient.numel(), self._codec))
            push = Push(codes.view(-1))
        if self._residuals:
            residual.sub_(gradient)
        return push

    def discard(self) -> None:
        """Drop the residuals: their step was skipped, or another training begins."""
        for residual in self._residuals:
            residual.zero_()


def decode(message: Message, numel: int, dtype: torch.dtype, reduce: str) -> Tensor:
    """Decode the gradient of a chunk. `message.value` is the block size. Raises ModelError for another
    size."""
    codec, payload, count = CODECS.get(reduce), message.payload, message.count
    block = 0 if codec is not None else message.value
    if codec is not None:
        expected = _num_blocks(numel) * codec.block_bytes
    elif block:
        expected = count * (block * dtype.itemsize + _NUMBER.itemsize)
    else:
        expected = numel * dtype.itemsize
    if payload.numel() != expected or (block and not _has_blocks(payload, numel, block, count)):
        raise ModelError(
            "a worker pushed a gradient of another shape",
            given=f"{payload.numel()} bytes",
            expected=f"{expected} bytes: {numel} elements of {dtype}, reduce={reduce}",
            hint="start all processes with the same script and plan",
        )
    if block:
        return _scattered(payload, torch.empty(numel, dtype=dtype), block, count)
    return payload.view(dtype) if codec is None else _decoded(payload, numel, codec).to(dtype)


def _without_zeros(gradient: Tensor) -> Push:
    block = math.gcd(gradient.numel(), _BLOCK)
    numbers = (gradient.view(-1, block) != 0).any(1).nonzero().view(-1)
    if numbers.numel() * (block * gradient.itemsize + _NUMBER.itemsize) < gradient.nbytes:
        return _sparse(gradient, numbers, block)
    return Push(as_bytes(gradient))


def _sparse(gradient: Tensor, numbers: Tensor, block: int) -> Push:
    contents = gradient.view(-1, block)[numbers].view(-1)
    payload = torch.cat([as_bytes(contents), as_bytes(numbers.to(_NUMBER))])
    return Push(payload, block, numbers.numel())


def _numbers(payload: Tensor, count: int) -> Tensor:
    return payload[payload.numel() - count * _NUMBER.itemsize :].clone().view(_NUMBER).long()


def _has_blocks(payload: Tensor, numel: int, block: int, count: int) -> bool:
    """Return whether the blocks of a sparse push are blocks of the chunk."""
    if block < 1 or numel % block or count < 0:
        return False
    if not count:
        return True
    least, most = _numbers(payload, count).aminmax()
    return int(least) >= 0 and int(most) < numel // block


def _scattered(payload: Tensor, out: Tensor, block: int, count: int) -> Tensor:
    """Write the blocks of a sparse push into `out`, and zero elsewhere."""
    contents = payload[: count * block * out.itemsize].clone().view(out.dtype)
    blocks = out.zero_().view(-1, block)
    blocks[_numbers(payload, count)] = contents.view(-1, block)
    return out


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _encoded(values: Tensor, codec: Codec) -> Tensor:
    blocks_BK = torch.zeros(_num_blocks(values.numel()), BLOCK)
    blocks_BK.view(-1)[: values.numel()] = values
    codes = torch.empty(len(blocks_BK), codec.block_bytes, dtype=torch.uint8)
    codec.encode(blocks_BK, codes)
    return codes


def _decoded(codes: Tensor, numel: int, codec: Codec) -> Tensor:
    blocks_BK = torch.empty(_num_blocks(numel), BLOCK)
    codec.decode(codes.view(-1, codec.block_bytes), blocks_BK)
    return blocks_BK.view(-1)[:numel]
