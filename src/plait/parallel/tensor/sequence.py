"""Tokens cut over `col`: the stream between the first block's input and the last block's output.

[Note: which rank has which tokens]
A sequence of T tokens is cut in consecutive pieces, the first T % col of them a token longer. Of (B, T, H)
dim 1 is cut, of (T, H) dim 0. A block that flattens its piece to (B t, H) has B runs of its tokens; so have
the others, and gathered along dim 0 they are in an order of their own, which layers that treat tokens alike
do not see and which the sum after them undoes. A region that is given (B, T, H) and flattens that has whole
sequences one after the other: its ROW layers are told, and sum (B, T, H).

What was the whole length can not be told from a piece. The first block sees it. Each block marks what it
gives, at the graph's node or, where there is none, at the tensor; and reads the mark of what it gets: so a
block that is run again in backward, after the forward of another micro-batch, finds its own. A mark that is
lost between two blocks of one forward is the first block's. Without a mark there is none in a backward, which
is refused.

The stream is cut from the first block's input to the last one's output of a forward: not where a block is run
again in backward, and no more where a new forward of the model begins.
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

_MARK = "plait: tokens of the whole sequence"


@dataclass
class SequenceShard:
    """The cut of the tokens that are under way. See [Note: which rank has which tokens]."""

    group: Group
    length: int = 0  # of the whole sequence; set, as what follows, by the block that is running
    begun: int = 0  # autograd's number when the first block was entered
    sequences: int = 1  # that lie one after the other where a block flattens them
    dims: int = 3  # of what the running region was given
    is_cut: bool = False  # the stream of the forward that is running
    _graphless: WeakTensorMap[tuple[int, int]] = field(default_factory=WeakTensorMap)  # marks

    def enter(self, name: str, x: Tensor, *, is_whole: bool) -> None:
        """A block begins with `x`, its piece or (the first one) the whole."""
        self.sequences = x.shape[0] if x.dim() > 2 else 1
        if is_whole:
            self.length, self.begun = x.shape[token_dim(x)], torch.autograd._get_sequence_nr()
            self.is_cut = not _is_backward()
            return
        node: Any = x.grad_fn
        mark = self._graphless.get(x) if node is None else node.metadata.get(_MARK)
        if mark is not None:
            self.length, self.begun = mark
        elif _is_backward() or not self.is_cut:
            raise ModelError(
                f"{name} runs on tokens of a sequence whose length is not known",
                given="in backward, what it reads is not what the block before it gave"
                if _is_backward()
                else "the first block has not run in this forward",
                expected="blocks in their order, each reading what the one before it gave",
                hint="recompute=none, or sp=false",
            )

    def mark(self, x: Tensor) -> None:
        """A block gives `x`; or the first one goes on with it."""
        node: Any = x.grad_fn
        if node is None:
            self._graphless.put(x, (self.length, self.begun))
        else:
            node.metadata[_MARK] = (self.length, self.begun)

    def leave(self) -> None:
        """The last block ends, or a new forward begins."""
        if not _is_backward():
            self.is_cut = False

    def sequences_of(self, whole: Tensor) -> int | None:
        """How many whole sequences a region has flattened to `whole`; None where it has not."""
        if whole.dim() > 2 or self.dims <= 2 or not self.length:
            return None
        return whole.shape[0] // self.length

    @property
    def own(self) -> int:
        """Tokens of this rank."""
        return self.pieces[self.group.rank]

    @property
    def pieces(self) -> tuple[int, ...]:
        return shard_lengths(self.length, self.group.size)

    def sizes_around(self, piece: Tensor) -> tuple[int, ...]:
        """Of what `piece` is this rank's part of, every rank's tokens."""
        own, tokens = self.own, piece.shape[token_dim(piece)]
        if not own:  # nothing to tell it from
            return self._times(self.sequences if piece.dim() == 2 else 1)
        return self._runs(tokens, own, "a rank's piece")

    def sizes_within(self, whole: Tensor) -> tuple[int, ...]:
        """Of `whole`, every rank's tokens."""
        return self._runs(whole.shape[token_dim(whole)], self.length, "the whole sequence")

    def _runs(self, tokens: int, expected: int, what: str) -> tuple[int, ...]:
        runs, rest = divmod(tokens, expected) if expected else (1, tokens)
        if rest:
            raise ModelError(
                "a block re-arranges tokens in a way that cannot be cut over ranks",
                given=f"{tokens} tokens where {what} has {expected}",
                hint="sp=false",
            )
        return self._times(runs)

    def _times(self, runs: int) -> tuple[int, ...]:
        return tuple(runs * piece for piece in self.pieces)


def depends_on_block_input(x: Tensor) -> bool:
    """Whether autograd's graph leads from `x` to what a block was given."""
    seen: set[Any] = set()
    left: list[Any] = [x.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if _MARK in node.metadata:
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_lengths(length: int, ranks: int) -> tuple[int, ...]:
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def token_dim(x: Tensor) -> int:
    return 1 if x.dim() > 2 else 0


def split_tokens(whole: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """This rank's tokens; backward gathers."""
    return _SplitTokens.apply(whole, group, sizes) if group.size > 1 else whole


def gather_tokens(piece: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """All tokens; backward takes this rank's, as what follows is the same on every rank."""
    return _GatherTokens.apply(piece, group, sizes) if group.size > 1 else piece


def all_gather_tokens(piece: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """(B, t, H) of every rank to (B, T, H), without a graph. One pass beyond the message where B > 1 or
    pieces are uneven."""
    if group.size == 1:
        return piece
    room = _GatherBuffer.of(piece, group, sizes)
    all_gather(room.there.view(-1), room.own.view(-1), group, label="tokens")
    return room.whole(piece)


def start_all_gather_tokens(
    piece: Tensor, group: Group, sizes: tuple[int, ...], label: str = "tokens"
) -> Callable[[], Tensor]:
    """The same, begun; what is returned waits for the whole."""
    if group.size == 1:
        return lambda: piece
    room = _GatherBuffer.of(piece, group, sizes)
    pending = start_all_gather(room.there.view(-1), room.own.view(-1), group, label=label)

    def end() -> Tensor:
        pending.wait()
        return room.whole(piece)

    return end


@dataclass(frozen=True)
class _GatherBuffer:
    """Where ranks' tokens arrive: in the whole; or padded to equal lengths, one rank's after the other's."""

    there: Tensor
    own: Tensor  # what this rank gives
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, piece: Tensor, group: Group, sizes: tuple[int, ...]) -> "_GatherBuffer":
        dim, longest, own = token_dim(piece), max(sizes), sizes[group.rank]
        if _is_rank_major(piece, sizes):
            return cls(piece.new_empty(_with_tokens(piece, sum(sizes))), piece.contiguous(), sizes)
        buffer = piece.new_empty(group.size, *_with_tokens(piece, longest))
        given = buffer[group.rank]
        given.narrow(dim, 0, own).copy_(piece)
        given.narrow(dim, own, longest - own).zero_()
        return cls(buffer, given, sizes)

    def whole(self, piece: Tensor) -> Tensor:
        if _is_rank_major(piece, self.sizes):
            return self.there
        dim, whole = token_dim(piece), piece.new_empty(_with_tokens(piece, sum(self.sizes)))
        for part, got in zip(whole.split(self.sizes, dim), self.there, strict=True):
            part.copy_(got.narrow(dim, 0, part.shape[dim]))
        return whole


def _with_tokens(piece: Tensor, tokens: int) -> tuple[int, ...]:
    dim = token_dim(piece)
    return (*piece.shape[:dim], tokens, *piece.shape[dim + 1 :])


def start_reduce_scatter_tokens(
    whole: Tensor, group: Group, sizes: tuple[int, ...], label: str = "tokens"
) -> tuple[Tensor, Work]:
    """The sum over ranks of (B, T, H), of which this rank gets its tokens once the Pending is over."""
    dim, longest = token_dim(whole), max(sizes)
    if group.size == 1:
        return whole, Work()
    shape = (*whole.shape[:dim], longest, *whole.shape[dim + 1 :])
    piece = whole.new_empty(shape)
    if _is_rank_major(whole, sizes):
        buffer = whole.contiguous()
    else:
        buffer = whole.new_empty(group.size, *shape)
        for part, into in zip(whole.split(sizes, dim), buffer, strict=True):
            into.narrow(dim, 0, part.shape[dim]).copy_(part)
            into.narrow(dim, part.shape[dim], longest - part.shape[dim]).zero_()
    pending = start_reduce_scatter(piece.view(-1), buffer.view(-1), group, label=label)
    own = sizes[group.rank]
    return piece if own == longest else piece.narrow(dim, 0, own), pending


def reduce_scatter_tokens(whole: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """`start_reduce_scatter_tokens`, to its end. No view: a model's own code may write into it."""
    piece, pending = start_reduce_scatter_tokens(whole, group, sizes)
    pending.wait()
    return piece.clone(memory_format=torch.contiguous_format) if piece._is_view() else piece


def _is_rank_major(x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether ranks' tokens lie one after the other in the whole, and are equally many."""
    return len(set(sizes)) == 1 and (token_dim(x) == 0 or x.shape[0] == 1)


def _own_shard(whole: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    return whole.narrow(token_dim(whole), sum(sizes[: group.rank]), sizes[group.rank])


class _SplitTokens(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _own_shard(whole, group, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_tokens(grad, ctx.group, ctx.sizes), None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return all_gather_tokens(piece, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own_shard(grad, ctx.group, ctx.sizes), None, None
