"""Attention of a rank's queries to the tokens of all ranks.

# B batch  H heads  K kv heads  S tokens of the row (padded)  n of this rank  D, V head sizes  P ranks

  allgather   every rank gathers the keys and values of all tokens, in their order in the row, and computes
              with its own queries; in backward their gradients are summed and scattered (Llama 3, 2407.21783,
              section 3.3.2)
  ulysses     an all-to-all gives every rank all tokens of its share of the heads, and another one brings the
              outputs back (Jacobs et al. 2309.14509)
  ring        keys and values go from rank to rank; results of parts are merged by their log-sum-exps (Liu et
              al. 2310.01889)
  RxU         ulysses among U neighbours, and a ring of R ranks with the same heads (Fang and Zhao 2405.07719)

[Note: tensors kept for backward]
The queries, keys and values of a rank, the output and its log-sum-exp: as much as without cp, for fewer
tokens. A block that is recomputed keeps the latter two, and does not communicate for them again. Gathered
keys and values are gathered again. They are in memory for one group of kv heads at a time.

[Note: sums of gradients]
Outputs are merged, and gradients of keys and values are added over blocks, and over ranks, in float32 or
wider; 16-bit models send them in their own dtype.

[Note: sinks]
A sink is a score without a value. With the log-sum-exp over the keys and the sink in place of that over the
keys, outputs and all gradients are those of a key whose value is zero.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, all_to_all, all_to_all_list
from plait.errors import ModelError
from plait.models import Numbering
from plait.models.attention import AttentionCall, plain_attention
from plait.parallel.activation_checkpoint import kept
from plait.parallel.context.dropout import Dropout, DropoutStream
from plait.parallel.context.kernels import BlockTensors, Scores, attend, attend_backward, merge
from plait.parallel.context.keys import LABEL, GatheredKeys, Keys, Pair, RingKeys
from plait.parallel.context.tokens import BlockSlices, SequenceShare, SharedTokens
from plait.plan.context import TokenOrder, gathered_kv_heads, heads_error, ulysses_kv_heads


@dataclass(frozen=True)
class ContextAttention:
    """Computes the attention of a micro-batch's tokens. Every rank of the group makes the same calls.
    `dropout`: needed where values are computed in training."""

    group: Group
    share: SequenceShare
    method: str
    dropout: DropoutStream | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """See `Attention`."""
        if call.q.shape[2] != self.share.order.per_rank:
            raise ModelError(
                "attention is not among the tokens that cp divides",
                given=f"{call.caller}: {call.q.shape[2]} tokens",
                expected=f"{self.share.order.per_rank}, this rank's part of {self.share.order.num_tokens}",
                hint="a plan without cp",
            )
        scores = Scores(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale, call.softcap)
        order = self.share.order
        if order.inner > 1:
            return self._by_heads(call, scores)
        keys = GatheredKeys(self.group, order) if self.method == "allgather" else RingKeys(self.group)
        return self._computed(call, scores, keys)

    def _computed(self, call: AttentionCall, scores: Scores, keys: Keys, before: int = 0) -> Tensor:
        """`before`: heads of this column on the neighbours before this rank."""
        work = [self.share.work(call.rule, source) for source in keys.sources]
        dropouts = self._dropouts(call, keys, before)
        return _Attention.apply(call.q, call.k, call.v, call.sinks_H, work, dropouts, scores, keys)

    def _dropouts(self, call: AttentionCall, keys: Keys, before: int) -> list[Dropout | None]:
        """The dropout of each part of the keys; draws a seed."""
        if not call.dropout or call.q.is_meta:
            return [None] * len(keys.sources)
        assert self.dropout is not None, "dropout of attention without a stream of seeds"
        size_B, size_H, share = *call.q.shape[:2], self.share
        heads = size_H * share.order.inner
        if heads not in self.dropout.first_heads:
            raise ModelError(
                "layers with other numbers of heads hide which heads a column of tp has",
                given=f"{call.caller}: {heads} heads on this column, and dropout of attention",
                expected="as many heads in all layers, or no dropout of attention",
                hint="a plan without tp, or attention_dropout=0 in the model's configuration",
            )
        first = before + self.dropout.first_heads[heads]
        samples_B, heads_H = (
            torch.arange(at, at + size, device=share.device) for at, size in ((0, size_B), (first, size_H))
        )
        own = share.positions(share.rank // share.order.inner)
        given = call.dropout, self.dropout.draw(), samples_B, heads_H, own
        return [Dropout(*given, share.positions(source)) for source in keys.sources]

    def _by_heads(self, call: AttentionCall, scores: Scores) -> Tensor:
        order, heads, kv_heads = self.share.order, call.q.shape[1], call.k.shape[1]
        copies = ulysses_kv_heads(heads, kv_heads, order.inner)
        if copies is None:
            raise heads_error(heads, kv_heads, order.inner)
        k, v = (
            t.repeat_interleave(copies // kv_heads, 1) if copies > kv_heads else t for t in (call.k, call.v)
        )
        q, k, v = _Exchange.apply(self.group, order, True, call.q, k, v)
        part = self.group.rank % order.inner
        sinks = None if call.sinks_H is None else call.sinks_H.chunk(order.inner)[part]
        keys = RingKeys(self.group, order.inner)
        own = replace(call, q=q, k=k, v=v, sinks_H=sinks)
        out = self._computed(own, scores, keys, before=part * q.shape[1])
        return _Exchange.apply(self.group, order, False, out)[0]


@dataclass(frozen=True)
class RowAttention:
    """Computes the attention of a micro-batch whose rows this rank has, in modules of one's own: of documents
    and without padding, as for the tokens of several ranks."""

    group: Group  # of this rank
    batch: Mapping[str, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        """See `Attention`."""
        return plain_attention(call) if self._by_blocks is None else self._by_blocks.attend(call)

    @cached_property
    def _by_blocks(self) -> ContextAttention | None:
        share = SequenceShare.of_batch(self.batch, ("position_ids", "attention_mask"), self.group, "ring")
        is_plain = not share.is_packed and [*share.kept] == [(0, share.order.num_tokens)]
        return None if is_plain else ContextAttention(self.group, share, "ring")


class _Attention(Function):
    """Attention of this rank's queries. `work`, `dropouts`: blocks and dropout of each part of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        work: Sequence[Sequence[BlockSlices]],
        dropouts: Sequence[Dropout | None],
        scores: Scores,
        keys: Keys,
    ) -> Tensor:
        out, lse_BHn = kept(lambda: _attended(q, k, v, sinks_H, work, dropouts, scores, keys))
        ctx.save_for_backward(q, k, v, sinks_H, out, lse_BHn)
        ctx.work, ctx.dropouts, ctx.scores, ctx.keys = work, dropouts, scores, keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, lse_BHn = ctx.saved_tensors
        wide, keys = lse_BHn.dtype, ctx.keys
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)

        def of_parts(heads: slice, kv_heads: slice) -> Iterator[Pair]:
            parts = keys.parts(k[:, kv_heads], v[:, kv_heads])
            for (part_k, part_v), blocks, dropout in zip(parts, ctx.work, ctx.dropouts, strict=True):
                of_k, of_v = torch.zeros_like(part_k, dtype=wide), torch.zeros_like(part_v, dtype=wide)
                for at in blocks:
                    block, own = _block(at, heads, q, part_k, part_v, dropout), at.queries
                    results = out[:, heads][own], lse_BHn[:, heads][own]
                    gradients = attend_backward(gradient[:, heads][own], block, *results, ctx.scores)
                    dq[:, heads][own] += gradients[0]
                    of_k[at.of_keys] += gradients[1]
                    of_v[at.of_keys] += gradients[2]
                yield of_k, of_v

        for heads, kv_heads in _head_groups(q, k, keys.ranks_in_part):
            dk[:, kv_heads], dv[:, kv_heads] = keys.summed(of_parts(heads, kv_heads), k.dtype)
        of_sinks = None
        if sinks_H is not None:
            d_BHn = (gradient.to(wide) * out.to(wide)).sum(-1)
            of_sinks = -((sinks_H.to(wide)[:, None] - lse_BHn).exp() * d_BHn).sum((0, 2)).to(sinks_H.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None, None


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    work: Sequence[Sequence[BlockSlices]],
    dropouts: Sequence[Dropout | None],
    scores: Scores,
    keys: Keys,
) -> tuple[Tensor, ...]:
    """The output and its log-sum-exp."""
    size_B, size_H, size_n, _ = q.shape
    out = q.new_empty(size_B, size_n, size_H, v.shape[-1]).transpose(1, 2)  # as the next layer reads it
    wide = torch.promote_types(q.dtype, torch.float32)
    lse_BHn = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for heads, kv_heads in _head_groups(q, k, keys.ranks_in_part):
        merged = q.new_zeros(size_B, q[:, heads].shape[1], size_n, v.shape[-1], dtype=wide)
        parts = keys.parts(k[:, kv_heads], v[:, kv_heads])
        for (part_k, part_v), blocks, dropout in zip(parts, work, dropouts, strict=True):
            for at in blocks:
                result = attend(_block(at, heads, q, part_k, part_v, dropout), scores)
                merge(merged[at.queries], lse_BHn[:, heads][at.queries], *result)
        out[:, heads] = merged
    if sinks_H is not None:
        with_sinks = torch.logaddexp(lse_BHn, sinks_H.to(wide)[:, None])
        out *= (lse_BHn - with_sinks).exp_().to(out.dtype).unsqueeze(-1)
        lse_BHn = with_sinks
    lse_BHn.masked_fill_(lse_BHn == -torch.inf, 0.0)  # of queries that see nothing: no gradient either
    return out, lse_BHn


def _block(
    at: BlockSlices, heads: slice, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout | None
) -> BlockTensors:
    """`heads`: of the queries; the keys and values are theirs. `dropout`: of all heads and tokens."""
    if dropout is not None:
        indices = dropout.samples_B[at.samples], dropout.heads_H[heads]
        dropout = Dropout(*dropout[:2], *indices, dropout.queries_Q[at.rows], dropout.keys_N[at.keys])
    queries = q[:, heads][at.queries]
    return BlockTensors(queries, k[at.of_keys], v[at.of_keys], at.causal, at.mask_QN, dropout)


def _head_groups(q: Tensor, k: Tensor, ranks_in_part: int) -> list[tuple[slice, slice]]:
    """Slices of the heads, and of their kv heads, that are computed at the same time: so many that gathered
    keys and values, of so many ranks, take no more memory than the rank's queries and outputs."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if ranks_in_part == 1:
        return [(slice(None), slice(None))]
    step, each = gathered_kv_heads(heads, kv_heads, ranks_in_part), heads // kv_heads
    return [(slice(at * each, (at + step) * each), slice(at, at + step)) for at in range(0, kv_heads, step)]


class _Exchange(Function):
    """All-to-all of tensors (B, heads, tokens, width) among neighbours: all heads of this rank's tokens
    become all tokens of this rank's heads (`to_heads`), or the reverse. In one message to each."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, order: TokenOrder, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.given = group, order, not to_heads
        return _exchanged(group, order, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        group, order, to_heads = ctx.given
        return None, None, None, *_exchanged(group, order, to_heads, gradients)


def _exchanged(
    group: Group, order: TokenOrder, to_heads: bool, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    size, num_runs = order.inner, order.num_runs
    # Each neighbour's (B, heads, runs, tokens of a run, width): all ranks' have the same shape.
    if to_heads:
        parts = [t.unflatten(1, (size, -1)).unflatten(3, (num_runs, -1)).movedim(1, 0) for t in tensors]
    else:
        parts = [t.unflatten(2, (num_runs, size, -1)).movedim(3, 0) for t in tensors]
    sent = torch.cat([part.reshape(size, -1) for part in parts], 1)
    received = torch.empty_like(sent)
    if size == group.size:
        all_to_all(received.view(-1), sent.view(-1), group, label=LABEL)
    else:
        first = group.rank - group.rank % size
        ins, outs = ([t.new_empty(0)] * group.size for t in (sent, received))
        ins[first : first + size], outs[first : first + size] = sent.unbind(), received.unbind()
        all_to_all_list(outs, ins, group, label=LABEL)
    results = []
    for flat, part in zip(received.split([part[0].numel() for part in parts], 1), parts, strict=True):
        ranks = flat.unflatten(1, part.shape[1:])
        if to_heads:
            results.append(ranks.movedim(0, 3).flatten(2, 4))
        else:
            results.append(ranks.movedim(0, 1).flatten(3, 4).flatten(1, 2))
    return tuple(results)


def row_attention(batch: Mapping[str, Tensor], group: Group) -> Mapping[str, Tensor]:
    """The micro-batch with the attention of its complete rows, if it has positions or padding."""
    is_plain = not batch.keys() & {"position_ids", "attention_mask"}
    return batch if is_plain else SharedTokens(batch, RowAttention(group, batch))


def share_tokens(
    batch: Mapping[str, Tensor],
    of_tokens: Collection[str],
    group: Group,
    method: str,
    numbering: Numbering | None,
    dropout: DropoutStream | None = None,
) -> SharedTokens:
    """This rank's tokens of a micro-batch. `of_tokens`: entries with tokens in dim 1. `numbering`: of a model
    that takes position ids, which the batch may leave to it. `dropout`: see `ContextAttention`. Raises
    ModelError."""
    share = SequenceShare.of_batch(batch, of_tokens, group, method)
    rows = dict(batch)
    if numbering is not None and "position_ids" not in rows:
        rows["position_ids"] = numbering.positions(batch, share.order.num_tokens, share.device)
    attention = ContextAttention(group, share, method, dropout)
    return SharedTokens(share.own(rows, of_tokens), attention, share.own_filled)
