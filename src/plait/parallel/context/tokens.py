"""A rank's tokens of a micro-batch: its entries divided, and which keys its queries see.

[Note: one division, on the host]
Every rank of `cp` has the complete rows of a micro-batch, and takes its own tokens of them once, before the
forward: ids, labels (which are shifted by then), padding and positions. The borders of the other ranks'
documents and of their padding are read here too; no layer reads a value on the host.

Documents of packed rows are separated in every attention: see [Note: documents of packed rows] in
models/mask_decisions.py. In other rows padding is at the ends; position ids that only jump forward begin a
document where transformers says so, without an attention mask: then the rule of the mask is `packed`.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.comm import Group, all_gather
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, OF_TOKENS
from plait.models.attention import Attention, MaskRule, attention_by
from plait.models.mask_decisions import (
    PackedRows,
    documents_apart,
    documents_of,
    host_values,
    install_decisions,
)
from plait.plan.context import Block, Interval, Segment, TokenOrder, Visible, blocks_of, divided

_ANY = 1 << 40  # more than any distance of positions
_FILL = {"labels": IGNORED_LABEL}  # of tokens that fill up the last runs; 0 in other entries


class BlockSlices(NamedTuple):
    """A block of keys for some of a rank's queries.

    rows       of the rank's queries
    keys       of the keys that are at hand
    causal     a triangle
    mask_QN    of distances; None: all
    """

    samples: slice
    rows: slice
    keys: slice
    causal: bool
    mask_QN: Tensor | None

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Index of tensors (B, H, tokens of queries, ...)."""
        return self.samples, slice(None), self.rows

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        """Index of tensors (B, K, tokens of keys, ...)."""
        return self.samples, slice(None), self.keys


@dataclass(eq=False)
class SequenceShare:
    """Facts about a micro-batch's rows, for attention.

    documents   of each sample, or of all
    kept        the tokens of each sample, or of all, that are no padding
    is_packed   the documents are those of packed rows, in which padding is one, too
    """

    order: TokenOrder
    rank: int
    documents: Sequence[Sequence[Interval]]
    kept: Sequence[Interval]
    device: torch.device
    is_packed: bool = False
    _work: dict[tuple[MaskRule, int | None], list[BlockSlices]] = field(default_factory=dict)
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of_batch(
        cls, batch: Mapping[str, Tensor], of_tokens: Collection[str], group: Group, method: str
    ) -> "SequenceShare":
        """How the tokens of complete rows are divided. `of_tokens`: entries (B, S, ...) in which they are.
        Raises ModelError for entries of different lengths, and for masks that are not padding."""
        shapes = {key: tuple(value.shape) for key, value in batch.items() if key in of_tokens}
        lengths = {shape[1] for shape in shapes.values() if len(shape) > 1}
        if (mask := batch.get("attention_mask")) is not None and mask.ndim != 2:
            raise ModelError(
                "an attention mask of pairs of tokens cannot be divided",
                given=f"attention_mask {tuple(mask.shape)}",
                expected="(samples, tokens), which marks padding",
                hint="position_ids that start again in each document, to separate documents",
            )
        if len(lengths) != 1:
            raise ModelError(
                "the batch has no one length of sequences that cp could divide",
                given=", ".join(f"{key} {shape}" for key, shape in shapes.items())
                or f"only {', '.join(batch)}",
                expected="entries of (samples, tokens): input_ids, labels, attention_mask, position_ids",
                hint="rows of one length, or a plan without cp",
            )
        (num_tokens,) = lengths
        order = TokenOrder.of_method(method, num_tokens, group.size)
        device = batch[next(iter(shapes))].device
        found = documents_of(batch)
        if found is not None:
            order = order.balanced(found.intervals)
            return cls(order, group.rank, found.intervals, [], device, is_packed=True)
        rows = _documents(batch, num_tokens), _kept(batch, num_tokens)
        return cls(order, group.rank, *rows, device)

    @property
    def own_filled(self) -> int:
        """The rank's tokens that only fill up its runs: they are its last ones."""
        ends = (start + self.order.run_length for start in self.order.starts(self.rank))
        return sum(min(self.order.run_length, max(0, end - self.order.num_tokens)) for end in ends)

    def own(self, batch: Mapping[str, Tensor], of_tokens: Collection[str]) -> dict[str, Tensor]:
        """This rank's tokens of each entry, in its order."""
        starts, length, extra = self.order.starts(self.rank), self.order.run_length, self.order.num_filled
        entries = dict(batch)
        for key in batch.keys() & {*of_tokens}:
            row = batch[key]
            if row.ndim < 2:
                continue
            if extra:
                row = F.pad(row, (*(0, 0) * (row.ndim - 2), 0, extra), value=_FILL.get(key, 0))
            entries[key] = torch.cat([row[:, at : at + length] for at in starts], 1)
        return entries

    def complete(self, outputs: Any, group: Group, samples: int) -> Any:
        """Outputs with the tokens of all ranks, in the row's order: of each (B, S of this rank, ...) in them.
        Collective. Raises ModelError for tokens in other dims."""
        rows = samples, self.order.per_rank

        def of_all(own: Tensor) -> Tensor:
            if own.shape[:2] != rows:
                return _without_tokens(own, rows)
            ranks = own.new_empty(group.size * own.numel())
            all_gather(ranks, own.flatten(), group)
            runs = ranks.view(group.size, own.shape[0], self.order.num_runs, -1, *own.shape[2:]).movedim(0, 1)
            runs = runs.flatten(1, 2)
            row = torch.cat([runs[:, number] for number in self.order.in_row], 1)
            return row[:, : self.order.num_tokens]

        return tree_map_only(Tensor, of_all, outputs)

    def work(self, rule: MaskRule, source: int | None) -> list[BlockSlices]:
        """The blocks of this rank's queries for the keys of `source`, in `order.of_heads`; None: of the row,
        in its order. Every rank of `cp` has the blocks of its neighbours that exchange heads."""
        if (rule, source) not in self._work:
            self._work[rule, source] = list(_joined(self._blocks(rule, source)))
        return self._work[rule, source]

    def _blocks(self, rule: MaskRule, source: int | None) -> Iterator[BlockSlices]:
        order = self.order.of_heads
        key_starts, keys_length = self._runs(source)
        samples_segments: list[list[Segment]] = [[((0, self.order.num_tokens), kept)] for kept in self.kept]
        if rule.packed or self.is_packed:
            samples_segments = [[(each, each) for each in documents] for documents in self.documents]
        for sample, row in enumerate(samples_segments):
            samples = slice(None) if len(samples_segments) == 1 else slice(sample, sample + 1)
            segments = divided(row, rule.chunk)
            for number, start in enumerate(order.starts(self.rank // self.order.inner)):
                for at, first in enumerate(key_starts):
                    held = _within(segments, (first, first + keys_length))
                    for block in blocks_of((start, start + order.run_length), held, rule.before, rule.after):
                        rows = _shifted(block.queries, number * order.run_length - start)
                        keys = _shifted(block.keys, at * keys_length - first)
                        causal = block.visible is Visible.CAUSAL
                        yield BlockSlices(samples, rows, keys, causal, self._mask(block, rule))

    def positions(self, source: int | None) -> Tensor:
        """The positions in the row of the tokens of `source`: see `work`."""
        starts, length = self._runs(source)
        return torch.cat([torch.arange(at, at + length, device=self.device) for at in starts])

    def _runs(self, source: int | None) -> tuple[Sequence[int], int]:
        """The starts of its runs, and their length."""
        order = self.order.of_heads
        return ((0,), order.padded) if source is None else (order.starts(source), order.run_length)

    def _mask(self, block: Block, rule: MaskRule) -> Tensor | None:
        if block.visible is not Visible.MASKED:
            return None
        (q, q_stop), (k, k_stop) = block.queries, block.keys
        before = _ANY if rule.before is None else rule.before
        after = _ANY if rule.after is None else rule.after
        key = (q - k, q_stop - q, k_stop - k, before, after)
        if key not in self._masks:
            q_positions = torch.arange(q, q_stop, device=self.device)
            distance_QN = q_positions[:, None] - torch.arange(k, k_stop, device=self.device)
            self._masks[key] = (distance_QN < before) & (distance_QN >= -after)
        return self._masks[key]


def _without_tokens(own: Tensor, rows: tuple[int, int]) -> Tensor:
    dims = own.shape[own.shape[:1] == rows[:1] : -1]
    if {rows[1], math.prod(rows)} & {*dims}:
        raise ModelError(
            "an output of the model has its tokens in a dim from which cp does not gather them",
            given=f"shape {tuple(own.shape)}, and {rows[1]} tokens on this rank of each of {rows[0]} samples",
            expected="(samples, tokens, ...)",
            hint="a configuration of the model without this output, or a plan without cp",
        )
    return own


def _within(segments: Sequence[Segment], keys: Interval) -> list[Segment]:
    """Segments with those of their keys that are in an interval."""
    found = ((queries, (max(keys[0], first), min(keys[1], last))) for queries, (first, last) in segments)
    return [segment for segment in found if segment[1][0] < segment[1][1]]


def _shifted(interval: Interval, by: int) -> slice:
    return slice(interval[0] + by, interval[1] + by)


def _joined(blocks: Iterable[BlockSlices]) -> Iterator[BlockSlices]:
    """Blocks; of two that are seen by all their queries and touch each other, one is made: kernels pay for
    each call."""
    last: BlockSlices | None = None
    for block in blocks:
        if last is None:
            last = block
            continue
        both = last if _is_full(last) and _is_full(block) and last.samples == block.samples else None
        if both and last.rows == block.rows and last.keys.stop == block.keys.start:
            last = last._replace(keys=slice(last.keys.start, block.keys.stop))
        elif both and last.keys == block.keys and last.rows.stop == block.rows.start:
            last = last._replace(rows=slice(last.rows.start, block.rows.stop))
        else:
            yield last
            last = block
    if last is not None:
        yield last


def _is_full(block: BlockSlices) -> bool:
    return not block.causal and block.mask_QN is None


class SharedTokens(dict[str, Tensor]):
    """A rank's tokens of a micro-batch. `attention`: computes that of all tokens. `num_filled`: of the rank's
    tokens, the last ones, which only fill up its runs."""

    def __init__(self, entries: Mapping[str, Tensor], attention: Attention, num_filled: int = 0) -> None:
        super().__init__(entries)
        self.attention, self.num_filled = attention, num_filled

    def for_loss(self, outputs: Any) -> tuple[Any, dict[str, Tensor]]:
        """The outputs and the entries as a user's loss takes them: of tokens of the row alone."""
        if not self.num_filled:
            return outputs, self
        lengths = {value.shape[1] for key, value in self.items() if key in OF_TOKENS and value.ndim > 1}

        def of_row(tensor: Tensor) -> Tensor:
            is_of_tokens = tensor.ndim > 1 and tensor.shape[1] in lengths
            return tensor[:, : -self.num_filled] if is_of_tokens else tensor

        entries = {key: of_row(value) if key in OF_TOKENS else value for key, value in self.items()}
        return tree_map_only(Tensor, of_row, outputs), entries


def attention_of(micro: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """The context of a forward with a micro-batch."""
    if isinstance(micro, PackedRows):
        return documents_apart(micro.documents)
    if not isinstance(micro, SharedTokens):
        return nullcontext()
    install_decisions()
    return attention_by(micro.attention)


def _documents(batch: Mapping[str, Tensor], num_tokens: int) -> list[list[Interval]]:
    """The documents of each sample that jumps begin; of one sample, if all are one document."""
    positions = batch.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.is_meta:
        return [[(0, num_tokens)]]
    starts = host_values(positions).diff(dim=1) != 1
    borders = [[0, *(row.nonzero().flatten() + 1).tolist(), num_tokens] for row in starts]
    documents = [list(itertools.pairwise(row)) for row in borders]
    return documents if any(len(of) > 1 for of in documents) else documents[:1]


def _kept(batch: Mapping[str, Tensor], num_tokens: int) -> list[Interval]:
    """The interval of each sample's tokens that are no padding; of one, if there is no padding."""
    mask = batch.get("attention_mask")
    if mask is None or mask.is_meta:
        return [(0, num_tokens)]
    seen = host_values(mask).bool()
    return [(0, num_tokens)] if bool(seen.all()) else [_interval(row) for row in seen]


def _interval(seen: Tensor) -> Interval:
    at = seen.nonzero().flatten()
    if not at.numel():
        return 0, 0
    first, last = int(at[0]), int(at[-1]) + 1
    if last - first != at.numel():
        raise ModelError(
            "an attention mask hides tokens between others",
            given=f"attention_mask with {at.numel()} tokens between positions {first} and {last - 1}",
            expected="padding at the ends of a row",
            hint="rows without these tokens, or a plan without cp",
        )
    return first, last
