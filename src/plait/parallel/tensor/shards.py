"""Shards of activations: features along `row` or `col`, tokens of a sequence along `col`; and the collectives
between shards and full tensors.

# B batch  T tokens of a sequence  H hidden;  t = this rank's tokens
# F features of the full tensor;  f = this rank's
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, Work, all_gather, named_group, start_all_gather, start_reduce_scatter
from plait.parallel.linear_products import Float8Input, PlainProducts, Products
from plait.parallel.tensor.operators import all_gather_into, define
from plait.plan.axes import FEATURES, HIDDEN
from plait.plan.sharding import DimSharding


@dataclass(frozen=True)
class TensorGroups:
    """This rank's process groups along `row` and `col`."""

    row: Group
    col: Group

    def along(self, axis: str) -> Group:
        """Return the group of an axis, HIDDEN or FEATURES."""
        return {HIDDEN: self.row, FEATURES: self.col}[axis]


@dataclass(frozen=True)
class ShardedDim:
    """A feature dim sharded along an axis, and the group of the ranks that hold the shards."""

    sharding: DimSharding
    group: Group

    @property
    def coord(self) -> int:
        return self.group.rank

    @property
    def full_size(self) -> int:
        """Features of the full tensor; those that several coordinates hold count once."""
        return max((stop for ranges in self.sharding.ranges for _, stop in ranges), default=0)

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks that hold this shard."""
        return self.sharding.sharers(self.coord)[0] == self.coord

    def shard(self, full_F: Tensor) -> Tensor:
        """Return this rank's features of (..., F), shape (..., f): a view where they are one range."""
        slices = [full_F[..., start:stop] for start, stop in self.sharding.ranges[self.coord]]
        return slices[0] if len(slices) == 1 else torch.cat([full_F[..., :0], *slices], -1)

    def all_gather(self, shard_f: Tensor) -> Tensor:
        """All-gather (..., f) of every rank to (..., F), without a graph. Uneven shards are padded."""
        full_F = shard_f.new_empty(*shard_f.shape[:-1], self.full_size)
        buffer = shard_f.new_empty(self.group.size, *shard_f.shape[:-1], max(self.sharding.sizes))
        own = buffer[self.coord]
        own[..., : shard_f.shape[-1]] = shard_f
        own[..., shard_f.shape[-1] :] = 0
        all_gather(buffer.view(-1), own.view(-1), self.group, label="features")
        for ranges, padded in zip(self.sharding.ranges, buffer, strict=True):
            begin = 0
            for start, stop in ranges:
                full_F[..., start:stop] = padded[..., begin : begin + stop - start]
                begin += stop - start
        return full_F


def token_dim(x: Tensor) -> int:
    """Return 1 for (B, T, H), 0 for (T, H)."""
    return 1 if x.dim() > 2 else 0


@dataclass(frozen=True)
class TokenShards:
    """Contiguous shards of a tensor's tokens, in rank order. `sizes`: tokens of each rank."""

    group: Group
    sizes: tuple[int, ...]
    is_first = True  # no two ranks hold the same tokens; see ShardedDim

    def shard(self, x_BTH: Tensor) -> Tensor:
        """Return this rank's tokens, a view."""
        rank = self.group.rank
        return x_BTH.narrow(token_dim(x_BTH), sum(self.sizes[:rank]), self.sizes[rank])

    def all_gather(self, x_BtH: Tensor) -> Tensor:
        """All-gather to (B, T, H), without a graph. Copies once more than the transport does where B > 1 or
        shards are uneven."""
        output, own = self.gather_buffers(x_BtH)
        return self.unpadded(all_gather_into(output, own, self.group, "tokens"), x_BtH.dim())

    def start_reduce_scatter(self, x_BTH: Tensor, label: str) -> tuple[Tensor, Work]:
        """Start summing (B, T, H) over ranks; return this rank's tokens, valid once the Work is done."""
        dim, longest, own_size = token_dim(x_BTH), max(self.sizes), self.sizes[self.group.rank]
        if self._are_rank_major(x_BTH):
            buffer = x_BTH.contiguous()
        else:
            buffer = x_BTH.new_empty(self.group.size, *_with_tokens(x_BTH, longest))
            for part, padded in zip(x_BTH.split(self.sizes, dim), buffer, strict=True):
                _copy_padded(part, padded)
        output = x_BTH.new_empty(_with_tokens(x_BTH, longest))
        work = start_reduce_scatter(output.view(-1), buffer.view(-1), self.group, label=label)
        return output if own_size == longest else output.narrow(dim, 0, own_size), work

    def reduce_scatter(self, x_BTH: Tensor) -> Tensor:
        """Sum (B, T, H) over ranks; return this rank's tokens. No view: the model may modify it in place."""
        output, work = self.start_reduce_scatter(x_BTH, "tokens")
        work.wait()
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output

    def _are_rank_major(self, x: Tensor) -> bool:
        """Return whether the full tensor is the shards one after another in memory, of equal sizes."""
        return min(self.sizes) == max(self.sizes) and (token_dim(x) == 0 or x.shape[0] == 1)

    def gather_buffers(self, x_BtH: Tensor) -> tuple[Tensor, Tensor]:
        """Return an all-gather's output and input. The output is the full tensor itself or, where the shards
        are not contiguous in it, (ranks, ...) with shards padded to equal lengths."""
        if self._are_rank_major(x_BtH):
            return x_BtH.new_empty(_with_tokens(x_BtH, sum(self.sizes))), x_BtH.contiguous()
        output = x_BtH.new_empty(self.group.size, *_with_tokens(x_BtH, max(self.sizes)))
        own = output[self.group.rank]
        _copy_padded(x_BtH, own)
        return output, own

    def unpadded(self, output: Tensor, num_dims: int) -> Tensor:
        """Return the full tensor, of `num_dims` dims, in the output of an all-gather."""
        if output.dim() == num_dims:
            return output
        dim = token_dim(output[0])
        parts = zip(output, self.sizes, strict=True)
        return torch.cat([padded.narrow(dim, 0, size) for padded, size in parts], dim)


class TokenGather:
    """An all-gather that the first of several users of its result starts. `cast`: what they take."""

    def __init__(self, shards: TokenShards, cast: Float8Input | None = None) -> None:
        self._shards = shards
        self._cast = cast
        self._decode: Callable[[Tensor], Tensor] | None = None
        self._started: tuple[Tensor, int, Work] | None = None  # output, dims of the full tensor
        self._full: Tensor | None = None

    def start(self, x_BtH: Tensor, label: str) -> None:
        """Start it, unless another user has."""
        if self._started is None and self._full is None:
            if self._cast is not None:
                x_BtH, self._decode = self._cast.encode(x_BtH, self._shards)
            output, own = self._shards.gather_buffers(x_BtH)
            work = start_all_gather(output.view(-1), own.view(-1), self._shards.group, label=label)
            self._started = output, x_BtH.dim(), work

    def run_during_product(
        self, x_BtH: Tensor, label: str, dy: Tensor, weight: Tensor, products: Products
    ) -> Tensor:
        """Return a layer's input gradient, and all-gather meanwhile, unless another user has. For graphs that
        are traced; see operators.py."""
        if self._started is not None or self._full is not None:
            return products.input_gradient(dy, weight)
        assert self._cast is None, "inputs of traced layers are gathered as they are"
        output, own = self._shards.gather_buffers(x_BtH)
        group = self._shards.group
        full, dx = torch.ops.plait.all_gather_during_product(
            own.reshape(-1), group.name, group.size, label, dy, weight, products.transposed
        )
        self._started = full.view(output.shape), x_BtH.dim(), Work()
        return dx

    def wait(self) -> Tensor:
        """Return (B, T, H); the first call waits."""
        if self._full is None:
            assert self._started is not None, "wait() before start()"
            output, num_dims, work = self._started
            work.wait()
            full = self._shards.unpadded(output, num_dims)
            self._full, self._started = full if self._decode is None else self._decode(full), None
        return self._full

    def discard(self) -> None:
        """Free the result; it may be started again."""
        self._started = self._full = self._decode = None


def _with_tokens(x: Tensor, num_tokens: int) -> tuple[int, ...]:
    """Return the shape of `x` with another number of tokens."""
    dim = token_dim(x)
    return (*x.shape[:dim], num_tokens, *x.shape[dim + 1 :])


def _copy_padded(shard: Tensor, padded: Tensor) -> None:
    dim = token_dim(shard)
    own_size = shard.shape[dim]
    padded.narrow(dim, 0, own_size).copy_(shard)
    padded.narrow(dim, own_size, padded.shape[dim] - own_size).zero_()


def _all_gather_during_product(
    own: Tensor, group: str, size: int, label: str, dy: Tensor, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the gathered tensor, and the input gradient that is computed meanwhile."""
    full = own.new_empty(size * own.numel())
    work = start_all_gather(full, own.contiguous(), named_group(group), label=label)
    dx = PlainProducts(transposed).input_gradient(dy, weight)
    work.wait()
    return full, dx


def _all_gather_during_product_shapes(
    own: Tensor, _: str, size: int, __: str, dy: Tensor, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    return own.new_empty(size * own.numel()), PlainProducts(transposed).input_gradient(dy, weight)


define(
    "all_gather_during_product",
    "Tensor own, str group, int size, str label, Tensor dy, Tensor weight, bool transposed",
    "(Tensor, Tensor)",
    _all_gather_during_product,
    _all_gather_during_product_shapes,
)
