"""An embedding cut over the vocabulary (`col`) and over features (`row`).

Every rank looks up the indices that it has; rows of foreign ones are zero; the sum over `col` has each row
once. The module's own forward does the lookup, with indices into the rank's piece, so what a subclass adds
to it (Gemma's scale) is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group
from plait.errors import ModelError
from plait.parallel.tensor.functional import all_reduce_in_place
from plait.parallel.tensor.groups import ShardedDim
from plait.parallel.tensor.shared_input import weight_of
from plait.plan.sharding import Range


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """The forward of an embedding of which this rank has some of the vocabulary."""

    forward: Callable[..., Tensor]
    vocabulary: ShardedDim

    @torch.compiler.disable
    def __call__(self, module: nn.Module, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ranges = self.vocabulary.dim.ranges[self.vocabulary.place]
        local, foreign = _to_local(indices, ranges)
        if not self.vocabulary.is_first:
            foreign = torch.ones_like(foreign)  # a copy of a piece: the first that has it gives its rows
        if not sum(stop - start for start, stop in ranges):
            weight = weight_of(module)
            # In the graph like other ranks' rows: what reads them sums gradients on every rank or on none.
            rows = weight.new_zeros(*indices.shape, weight.shape[-1]) + weight.sum()
            return _MaskAndReduce.apply(rows, foreign, self.vocabulary.group)
        return _MaskAndReduce.apply(self.forward(module, local, *args, **kwargs), foreign, self.vocabulary.group)


def check_embedding(name: str, module: nn.Module) -> None:
    """Raises ModelError for what cannot be cut over the vocabulary."""
    for option, off in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
        value = getattr(module, option, off)
        if value != off:
            raise ModelError(
                f"the embedding {name} cannot be cut over its vocabulary",
                given=f"{option}={value}, which is about rows that other ranks have",
                expected=f"{option}={off}",
                hint="tp=1",
            )


def local_padding_idx(index: int | None, cut: ShardedDim) -> int | None:
    """Where this rank's piece has the row of the whole's `padding_idx`, which gets no gradient."""
    begin = 0
    for start, stop in cut.dim.ranges[cut.place]:
        if index is not None and start <= index < stop:
            return begin + index - start
        begin += stop - start
    return None


def _to_local(indices: Tensor, ranges: tuple[Range, ...]) -> tuple[Tensor, Tensor]:
    """Indices into the rank's piece, 0 for foreign ones; and which ones are foreign."""
    local, foreign = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    begin = 0
    for start, stop in ranges:
        here = (indices >= start) & (indices < stop)
        local = torch.where(here, indices - (start - begin), local)
        foreign = foreign & ~here
        begin += stop - start
    return local, foreign


class _MaskAndReduce(Function):
    """Foreign rows become zero, and the ranks' rows are summed: both in the tensor that the lookup gave."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, foreign: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(foreign)
        ctx.mark_dirty(rows)
        return all_reduce_in_place(rows.masked_fill_(foreign.unsqueeze(-1), 0), group, "rows of an embedding")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (foreign,) = ctx.saved_tensors
        return grad.masked_fill(foreign.unsqueeze(-1), 0), None, None
