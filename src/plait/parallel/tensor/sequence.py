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

[Note: token shards between stages]
Stages of a pipeline split the residual stream between two blocks, where every column has its own tokens. So a
stage sends its shard as it is, and the next stage begins with it: each column sends 1 / col of the tokens to
the same column of the next stage, nothing is gathered or split, and a collective in addition, which ranks
could start in different orders, is not needed. The full length is sent with the shard: as a number it is part
of the output's description, which is sent once for each shape of a micro-batch.
The gradient that returns is exact: between blocks a column's gradient of its own tokens is complete, and it
has no others. A stage's other received tensors are what blocks of earlier stages returned, as if these were
its own: they depend on a block's input, and are not side inputs from outside of the blocks. So outputs of
earlier blocks that are sent along (skip connections) hold this rank's tokens too. A first stage without
blocks splits the first block's input before it sends it, and a last one gathers what it has received.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm import Group
from plait.errors import ModelError
from plait.models.tensors import WeakTensorMap, tensors_in
from plait.parallel.tensor.functional import split
from plait.parallel.tensor.shards import TokenShards, token_dim

_MARK = "plait: length of the full sequence"


@dataclass
class SequenceShard:
    """Sharding of the running block's tokens. See [Note: token shards]."""

    group: Group
    earlier: tuple[str, ...] = ()  # blocks of earlier stages, which return what the stage receives
    is_sent: bool = False  # the last block's output goes to another stage
    has_blocks: bool = True
    begins_with_input: bool = False  # receives the input of `earlier`, which is its own first block
    full_length: int = 0  # T; this and the next three are set by the running block
    begin_seq_nr: int = 0  # autograd's sequence number when the first block began
    num_sequences: int = 1  # in the tokens that a block flattens
    region_input_dims: int = 3  # of the running region
    is_sharded: bool = False  # the residual stream, at this point of the running forward
    # In the running block, for pure regions and for others: all tokens by this rank's. One gather for each.
    gathered: dict[bool, WeakTensorMap[Tensor]] = field(
        default_factory=lambda: {True: WeakTensorMap(), False: WeakTensorMap()}
    )
    _graphless_marks: WeakTensorMap[tuple[int, int]] = field(default_factory=WeakTensorMap)

    def message(self, output: Any) -> Any:
        """Return what a stage sends. See [Note: token shards between stages]."""
        if self.is_sent and not self.has_blocks:
            output = self.shard(output)
        return (self.full_length, output) if self.is_sent else output

    def receive(self, message: Any) -> Any:
        """Return the previous stage's output, before a forward."""
        if self.earlier:
            self.full_length, message = message
        return message

    def begin_received(self, output: Any) -> None:
        """Begin the blocks of a stage with what it received: outputs of earlier blocks."""
        self.is_sharded = True
        for tensor in tensors_in(output):
            self.mark(tensor)

    def enter(self, name: str, x: Tensor, *, is_first: bool) -> None:
        """Begin a block with input `x`: this rank's tokens or, in the model's first block, all of them.
        `is_first`: of the stage."""
        self.num_sequences = x.shape[0] if x.dim() > 2 else 1
        if is_first and not self.earlier:
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
        if is_first and not _in_backward():
            self.begin_seq_nr = torch.autograd._get_sequence_nr()
            self.mark(x)

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
        return self._lengths[self.group.rank]

    @property
    def _lengths(self) -> tuple[int, ...]:
        length, ranks = self.full_length, self.group.size
        return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))

    def shards_of_own(self, x_BtH: Tensor) -> TokenShards:
        """Return the shards of the tensor of which `x_BtH` is this rank's."""
        if not self.own_length:  # an empty shard does not show the number of sequences
            return self._shards(self.num_sequences if x_BtH.dim() == 2 else 1)
        return self._shards(self._num_runs(x_BtH, self.own_length, "a rank's shard"))

    def shard(self, x_BTH: Tensor) -> Tensor:
        """Return this rank's tokens of full sequences, whose length becomes the running one."""
        self.full_length = x_BTH.shape[token_dim(x_BTH)]
        return split(x_BTH, self.shards_of_full(x_BTH))

    def shards_of_full(self, x_BTH: Tensor) -> TokenShards:
        return self._shards(self._num_runs(x_BTH, self.full_length, "the full sequence"))

    def _num_runs(self, x: Tensor, length: int, what: str) -> int:
        num_tokens = x.shape[token_dim(x)]
        num_runs, rest = divmod(num_tokens, length) if length else (1, num_tokens)
        if rest:
            raise ModelError(
                "cannot shard the tokens of a block that rearranges them",
                given=f"{num_tokens} tokens where {what} has {length}",
                expected="complete sequences of one length",
                hint="sp=false",
            )
        return num_runs

    def _shards(self, num_runs: int) -> TokenShards:
        return TokenShards(self.group, tuple(num_runs * length for length in self._lengths))


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
