"""Tokens sharded over `col`, from the first block's input to the last block's output: sequence parallelism.

# B batch  T tokens of a sequence  H hidden;  t = this rank's tokens

[Note: token shards]
A sequence of T tokens is split into contiguous shards; the first T % col of them have one token more. In
(B, T, H) dim 1 is sharded, in (T, H) dim 0. A block that flattens its shard to (B t, H) holds B runs of its
tokens, like every other rank; gathered along dim 0 they are in another order than the model's, which layers
that treat tokens independently do not notice and which the reduction after them undoes. A region that is
given (B, T, H) and flattens it holds full sequences one after another: its ROW layers detect this and reduce
(B, T, H).

The full length does not follow from a shard. The first block sees it. Each block marks its output, at the
graph's node or, without a graph, at the tensor, and reads the mark of its input: so a block that is
recomputed in backward, after the forward of another micro-batch, finds its own length. If the mark is lost
between two blocks of one forward, the length of the first block holds. Without a mark in backward the length
is unknown, which is an error.

The residual stream is sharded from the first block's input to the last block's output of a forward; not while
a block is recomputed in backward, and no longer when a new forward of the model begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, Work, all_gather, start_all_gather, start_reduce_scatter
from plait.errors import ModelError
from plait.parallel.tensor.shared_input import WeakTensorMap

_MARK = "plait: length of the full sequence"


@dataclass
class SequenceShard:
    """Sharding of the running block's tokens. See [Note: token shards]."""

    group: Group
    full_length: int = 0  # T; this and the next three are set by the running block
    begin_seq_nr: int = 0  # autograd's sequence number when the first block began
    num_sequences: int = 1  # in the tokens that a block flattens
    region_input_dims: int = 3  # of the running region
    is_sharded: bool = False  # the residual stream, at this point of the running forward
    _graphless_marks: WeakTensorMap[tuple[int, int]] = field(default_factory=WeakTensorMap)

    def enter(self, name: str, x: Tensor, *, is_full: bool) -> None:
        """Begin a block with input `x`: this rank's tokens or, in the first block, all of them."""
        self.num_sequences = x.shape[0] if x.dim() > 2 else 1
        if is_full:
            self.full_length, self.begin_seq_nr = x.shape[token_dim(x)], torch.autograd._get_sequence_nr()
            self.is_sharded = not _in_backward()
            return
        node: Any = x.grad_fn
        mark = self._graphless_marks.get(x) if node is None else node.metadata.get(_MARK)
        if mark is not None:
            self.full_length, self.begin_seq_nr = mark
        elif _in_backward() or not self.is_sharded:
            raise ModelError(
                f"{name} gets tokens of a sequence of unknown length",
                given="in backward, an input that is not the previous block's output"
                if _in_backward()
                else "the first block has not run in this forward",
                expected="blocks in their order, each with the previous one's output as input",
                hint="recompute=none, or sp=false",
            )

    def mark(self, x: Tensor) -> None:
        """Mark a block's output, or the first block's sharded input, with the full length."""
        node: Any = x.grad_fn
        if node is None:
            self._graphless_marks.put(x, (self.full_length, self.begin_seq_nr))
        else:
            node.metadata[_MARK] = (self.full_length, self.begin_seq_nr)

    def exit(self) -> None:
        """End the last block, or begin a new forward."""
        if not _in_backward():
            self.is_sharded = False

    def num_flattened(self, full: Tensor) -> int | None:
        """Return the number of full sequences that a region has flattened to `full`; None if it has not."""
        if full.dim() > 2 or self.region_input_dims <= 2 or not self.full_length:
            return None
        return full.shape[0] // self.full_length

    @property
    def own_length(self) -> int:
        """Tokens of this rank, per sequence."""
        return self.lengths[self.group.rank]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank, per sequence."""
        return shard_lengths(self.full_length, self.group.size)

    def sizes_from_shard(self, shard: Tensor) -> tuple[int, ...]:
        """Return each rank's tokens of the tensor that `shard` is this rank's shard of."""
        own_length, num_tokens = self.own_length, shard.shape[token_dim(shard)]
        if not own_length:  # an empty shard does not show the number of sequences
            return self._sizes(self.num_sequences if shard.dim() == 2 else 1)
        return self._checked_sizes(num_tokens, own_length, "a rank's shard")

    def sizes_of_full(self, full: Tensor) -> tuple[int, ...]:
        """Return each rank's tokens of `full`."""
        return self._checked_sizes(full.shape[token_dim(full)], self.full_length, "the full sequence")

    def _checked_sizes(self, num_tokens: int, length: int, what: str) -> tuple[int, ...]:
        num_runs, rest = divmod(num_tokens, length) if length else (1, num_tokens)
        if rest:
            raise ModelError(
                "cannot shard the tokens of a block that rearranges them",
                given=f"{num_tokens} tokens where {what} has {length}",
                hint="sp=false",
            )
        return self._sizes(num_runs)

    def _sizes(self, num_runs: int) -> tuple[int, ...]:
        return tuple(num_runs * length for length in self.lengths)


def depends_on_block_input(x: Tensor) -> bool:
    """Return whether autograd's graph leads from `x` to a marked tensor: a block's input or output."""
    seen: set[Any] = set()
    pending: list[Any] = [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if _MARK in node.metadata:
            return True
        seen.add(node)
        pending += [before for before, _ in node.next_functions]
    return False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_lengths(length: int, ranks: int) -> tuple[int, ...]:
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def token_dim(x: Tensor) -> int:
    return 1 if x.dim() > 2 else 0


def split_tokens(x_BTH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """Return this rank's tokens; backward all-gathers."""
    return _SplitTokens.apply(x_BTH, group, sizes) if group.size > 1 else x_BTH


def gather_tokens(x_BtH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """Return all tokens; backward takes this rank's, as what follows is the same on every rank."""
    return _GatherTokens.apply(x_BtH, group, sizes) if group.size > 1 else x_BtH


def all_gather_tokens(x_BtH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """All-gather (B, t, H) of every rank to (B, T, H), without a graph. Copies once more than the transport
    does where B > 1 or shards are uneven."""
    if group.size == 1:
        return x_BtH
    buffer = _GatherBuffer.build(x_BtH, group, sizes)
    all_gather(buffer.output.view(-1), buffer.input.view(-1), group, label="tokens")
    return buffer.full(x_BtH)


def start_all_gather_tokens(
    x_BtH: Tensor, group: Group, sizes: tuple[int, ...], label: str = "tokens"
) -> Callable[[], Tensor]:
    """Start `all_gather_tokens`; return a function that waits for the result."""
    if group.size == 1:
        return lambda: x_BtH
    buffer = _GatherBuffer.build(x_BtH, group, sizes)
    work = start_all_gather(buffer.output.view(-1), buffer.input.view(-1), group, label=label)

    def wait() -> Tensor:
        work.wait()
        return buffer.full(x_BtH)

    return wait


@dataclass(frozen=True)
class _GatherBuffer:
    """Operands of an all-gather of tokens. `output`: the full tensor itself or, where ranks' tokens are not
    contiguous in it, (ranks, ...) with shards padded to equal lengths."""

    output: Tensor
    input: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def build(cls, x_BtH: Tensor, group: Group, sizes: tuple[int, ...]) -> "_GatherBuffer":
        dim, longest, own_size = token_dim(x_BtH), max(sizes), sizes[group.rank]
        if _is_rank_major(x_BtH, sizes):
            return cls(x_BtH.new_empty(_with_tokens(x_BtH, sum(sizes))), x_BtH.contiguous(), sizes)
        padded = x_BtH.new_empty(group.size, *_with_tokens(x_BtH, longest))
        own = padded[group.rank]
        own.narrow(dim, 0, own_size).copy_(x_BtH)
        own.narrow(dim, own_size, longest - own_size).zero_()
        return cls(padded, own, sizes)

    def full(self, x_BtH: Tensor) -> Tensor:
        if _is_rank_major(x_BtH, self.sizes):
            return self.output
        dim, full = token_dim(x_BtH), x_BtH.new_empty(_with_tokens(x_BtH, sum(self.sizes)))
        for part, padded in zip(full.split(self.sizes, dim), self.output, strict=True):
            part.copy_(padded.narrow(dim, 0, part.shape[dim]))
        return full


def _with_tokens(x: Tensor, num_tokens: int) -> tuple[int, ...]:
    """Return the shape of `x` with another number of tokens."""
    dim = token_dim(x)
    return (*x.shape[:dim], num_tokens, *x.shape[dim + 1 :])


def start_reduce_scatter_tokens(
    x_BTH: Tensor, group: Group, sizes: tuple[int, ...], label: str = "tokens"
) -> tuple[Tensor, Work]:
    """Start summing (B, T, H) over ranks; return this rank's tokens, valid once the Work is done."""
    dim, longest = token_dim(x_BTH), max(sizes)
    if group.size == 1:
        return x_BTH, Work()
    shape = (*x_BTH.shape[:dim], longest, *x_BTH.shape[dim + 1 :])
    output = x_BTH.new_empty(shape)
    if _is_rank_major(x_BTH, sizes):
        buffer = x_BTH.contiguous()
    else:
        buffer = x_BTH.new_empty(group.size, *shape)
        for part, padded in zip(x_BTH.split(sizes, dim), buffer, strict=True):
            padded.narrow(dim, 0, part.shape[dim]).copy_(part)
            padded.narrow(dim, part.shape[dim], longest - part.shape[dim]).zero_()
    work = start_reduce_scatter(output.view(-1), buffer.view(-1), group, label=label)
    own_size = sizes[group.rank]
    return output if own_size == longest else output.narrow(dim, 0, own_size), work


def reduce_scatter_tokens(x_BTH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """Sum (B, T, H) over ranks; return this rank's tokens. No view: the model may modify it in place."""
    output, work = start_reduce_scatter_tokens(x_BTH, group, sizes)
    work.wait()
    return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output


def _is_rank_major(x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Return whether the full tensor is the ranks' shards one after another in memory, of equal sizes."""
    return len(set(sizes)) == 1 and (token_dim(x) == 0 or x.shape[0] == 1)


def _own_shard(x_BTH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    return x_BTH.narrow(token_dim(x_BTH), sum(sizes[: group.rank]), sizes[group.rank])


class _SplitTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_BTH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _own_shard(x_BTH, group, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtH: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_tokens(grad_BtH, ctx.group, ctx.sizes), None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_BtH: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return all_gather_tokens(x_BtH, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTH: Tensor) -> tuple[Tensor | None, ...]:
        return _own_shard(grad_BTH, ctx.group, ctx.sizes), None, None
