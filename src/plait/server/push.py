"""Encoding of the gradients that workers push: as they are, or by a codec of the plan's `reduce`.

[Note: error feedback of pushes]
What a codec lost is added to the worker's next push (see `comm/compression.py`): each worker has its own
residual, whichever order servers apply pushes in. It is discarded with a step that was skipped, and it is not
saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import CODECS
from plait.comm.compression import Codec
from plait.comm.pair import as_bytes
from plait.errors import ModelError
from plait.parallel.zero.flat_param import FlatParam
from plait.plan.compression import BLOCK
from plait.server.chunks import Chunk


class GradientEncoder:
    """Encodes a worker's gradients, a chunk at a time; `unit.grad_shard` then holds what servers decode."""

    def __init__(self, reduce: str, units: Sequence[FlatParam]) -> None:
        """`reduce`: of the plan."""
        self._codec = CODECS.get(reduce)
        self._units = units
        has_residuals = self._codec is not None and self._codec.error_feedback
        self._residuals = [torch.zeros_like(unit.grad_shard) for unit in units] if has_residuals else []

    @property
    def is_exact(self) -> bool:
        """True if servers get the gradients as they are."""
        return self._codec is None

    def encode(self, chunk: Chunk) -> Tensor:
        """The bytes of a chunk's gradient."""
        gradient = self._units[chunk.unit].grad_shard[chunk.start : chunk.stop]
        if self._codec is None:
            return as_bytes(gradient)
        if self._residuals:
            residual = self._residuals[chunk.unit][chunk.start : chunk.stop]
            gradient.add_(residual)
            residual.copy_(gradient)
        codes = _encoded(gradient, self._codec)
        gradient.copy_(_decoded(codes, gradient.numel(), self._codec))
        if self._residuals:
            residual.sub_(gradient)
        return codes.view(-1)

    def discard(self) -> None:
        """Drop the residuals: their step was skipped, or another training begins."""
        for residual in self._residuals:
            residual.zero_()


def decode(payload: Tensor, numel: int, dtype: torch.dtype, reduce: str) -> Tensor:
    """A chunk's gradient from what `GradientEncoder` returned. Raises ModelError for another size."""
    codec = CODECS.get(reduce)
    expected = numel * dtype.itemsize if codec is None else _num_blocks(numel) * codec.block_bytes
    if payload.numel() != expected:
        raise ModelError(
            "a worker pushed a gradient of another shape",
            given=f"{payload.numel()} bytes",
            expected=f"{expected} bytes: {numel} elements of {dtype}, reduce={reduce}",
        )
    return payload.view(dtype) if codec is None else _decoded(payload, numel, codec).to(dtype)


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
