"""Attention of a rank's queries to the tokens of all ranks.

# B batch  H heads  K kv heads  S tokens of the row (padded)  n of this rank  D, V head sizes  P ranks

  allgather   every rank gathers the keys and values of all tokens, in their order in the row, and computes
              with its own queries; in backward their gradients are summed and scattered (Llama 3, 2407.21783,
              section 3.3.2)
  ulysses     an all-to-all gives every rank all tokens of its share of the heads, and another one brings the
              outputs back (Jacobs et al. 2309.14509)

[Note: tensors kept for backward]
The queries, keys and values of a rank, the output and its log-sum-exp: as much as without cp, for fewer
tokens. Gathered keys and values are gathered again. They are in memory for one group of kv heads at a time.

[Note: sums of gradients]
Gradients of keys and values are added over blocks, and over ranks, in float32 or wider, in the order of
ranks; 16-bit models send them in their own dtype.

[Note: sinks]
A sink is a score without a value. With the log-sum-exp over the keys and the sink in place of that over the
keys, outputs and all gradients are those of a key whose value is zero.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, all_gather, all_to_all, start_scattered_sum
from plait.errors import ModelError, PlanError
from plait.models import Numbering
from plait.models.attention import AttentionCall
from plait.parallel.context.kernels import Block, Scores, attend, attend_backward, merge
from plait.parallel.context.tokens import SequenceShare, SharedTokens, Work
from plait.plan.context import gathered_kv_heads, num_chunks, ulysses_kv_heads

_LABEL = "attention"


@dataclass(frozen=True)
class ContextAttention:
    """Computes the attention of a micro-batch's tokens. Every rank of the group makes the same calls."""

    group: Group
    share: SequenceShare
    method: str

    def attend(self, call: AttentionCall) -> Tensor:
        """See `Attention`."""
        if call.q.shape[2] != self.share.order.per_rank:
            raise ModelError(
                "attention is not among the tokens that cp divides",
                given=f"{type(call.module).__name__}: {call.q.shape[2]} tokens",
                expected=f"{self.share.order.per_rank}, this rank's part of {self.share.order.num_tokens}",
                hint="a plan without cp",
            )
        scores = Scores(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale, call.softcap)
        if self.method == "ulysses":
            return self._by_heads(call, scores)
        work = self.share.work(call.rule)
        keys = _GatheredKeys(self.group, self.share)
        return _Attention.apply(call.q, call.k, call.v, call.sinks_H, work, scores, keys)

    def _by_heads(self, call: AttentionCall, scores: Scores) -> Tensor:
        size, heads, kv_heads = self.group.size, call.q.shape[1], call.k.shape[1]
        copies = ulysses_kv_heads(heads, kv_heads, size)
        if copies is None:
            raise PlanError(
                "the heads do not divide over the ranks of cp",
                given=f"{heads} heads, {kv_heads} kv heads, cp={size} cp_method=ulysses",
                expected="a multiple of cp (and of the kv heads, if these are fewer)",
                hint="cp_method=allgather",
            )
        k, v = (
            t.repeat_interleave(copies // kv_heads, 1) if copies > kv_heads else t for t in (call.k, call.v)
        )
        q, k, v = _Exchange.apply(self.group, True, call.q, k, v)
        sinks = None if call.sinks_H is None else call.sinks_H.chunk(size)[self.group.rank]
        work = self.share.work(call.rule, of_row=True)
        out = _Attention.apply(q, k, v, sinks, work, scores, None)
        return _Exchange.apply(self.group, False, out)[0]


class _GatheredKeys:
    """Keys and values of all tokens, from those of each rank."""

    def __init__(self, group: Group, share: SequenceShare) -> None:
        self.size = group.size
        self._group, self._order = group, share.order

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, K, S, D) and (B, K, S, V), in the row's order."""
        own = torch.cat([k, v], -1)
        ranks = own.new_empty(self._group.size * own.numel())
        all_gather(ranks, own.flatten(), self._group, label=_LABEL)
        runs = ranks.view(self._group.size, *own.shape).movedim(0, 2)  # (B, K, P, n, D + V)
        runs = runs.unflatten(3, (self._order.chunks, self._order.chunk)).flatten(2, 3)
        row = torch.cat([runs[:, :, number] for number in self._order.in_row], 2)
        return row[..., : k.shape[-1]], row[..., k.shape[-1] :]

    def scatter(self, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sum the gradients of all tokens over the ranks, sent in `dtype`, and return those of its own."""
        row, size = torch.cat([dk, dv], -1), self._group.size
        runs = row.split(self._order.chunk, 2)
        full = torch.cat([runs[number].to(dtype) for number in self._order.by_rank], 2)
        full = full.unflatten(2, (size, -1)).movedim(2, 0).flatten()
        own = row.new_empty(full.numel() // size)
        work = start_scattered_sum(full, self._group, label=_LABEL)
        for _ in work.into(own):
            pass
        work.release()
        own = own.view(*row.shape[:2], -1, row.shape[-1])
        return own[..., : dk.shape[-1]], own[..., dk.shape[-1] :]


class _Attention(Function):
    """Attention of blocks. `keys` None: k and v are those of all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        work: Sequence[Work],
        scores: Scores,
        keys: _GatheredKeys | None,
    ) -> Tensor:
        size_B, size_H, size_n, _ = q.shape
        out = q.new_zeros(size_B, size_n, size_H, v.shape[-1]).transpose(1, 2)  # as the next layer reads it
        wide = torch.promote_types(q.dtype, torch.float32)
        lse_BHn = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        for heads, kv_heads in _head_groups(q, k, keys):
            all_k, all_v = k[:, kv_heads], v[:, kv_heads]
            if keys is not None:
                all_k, all_v = keys.gather(all_k, all_v)
            for at in work:
                queries, of_keys = (at.samples, heads, at.rows), (at.samples, slice(None), at.keys)
                block = Block(q[queries], all_k[of_keys], all_v[of_keys], at.causal, at.mask_QN)
                part, part_lse = attend(block, scores)
                target, target_lse = out[queries], lse_BHn[queries]
                if at.is_first:
                    target.copy_(part)
                    target_lse.copy_(part_lse)
                else:
                    merge(target, target_lse, part, part_lse)
        if sinks_H is not None:
            with_sinks = torch.logaddexp(lse_BHn, sinks_H.to(wide)[:, None])
            out *= (lse_BHn - with_sinks).exp_().to(out.dtype).unsqueeze(-1)
            lse_BHn = with_sinks
        lse_BHn.masked_fill_(lse_BHn == -torch.inf, 0.0)  # of queries that see nothing: no gradient either
        ctx.save_for_backward(q, k, v, sinks_H, out, lse_BHn)
        ctx.work, ctx.scores, ctx.keys = work, scores, keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, lse_BHn = ctx.saved_tensors
        wide, keys = lse_BHn.dtype, ctx.keys
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)
        for heads, kv_heads in _head_groups(q, k, keys):
            all_k, all_v = k[:, kv_heads], v[:, kv_heads]
            if keys is not None:
                all_k, all_v = keys.gather(all_k, all_v)
            of_k, of_v = torch.zeros_like(all_k, dtype=wide), torch.zeros_like(all_v, dtype=wide)
            for at in ctx.work:
                queries, of_keys = (at.samples, heads, at.rows), (at.samples, slice(None), at.keys)
                block = Block(q[queries], all_k[of_keys], all_v[of_keys], at.causal, at.mask_QN)
                gradients = attend_backward(
                    gradient[queries], block, out[queries], lse_BHn[queries], ctx.scores
                )
                for sum_of, at_own, part in zip(
                    (dq, of_k, of_v), (queries, of_keys, of_keys), gradients, strict=True
                ):
                    sum_of[at_own] += part
            if keys is not None:
                of_k, of_v = keys.scatter(of_k, of_v, k.dtype)
            dk[:, kv_heads], dv[:, kv_heads] = of_k, of_v
        of_sinks = None
        if sinks_H is not None:
            d_BHn = (gradient.to(wide) * out.to(wide)).sum(-1)
            of_sinks = -((sinks_H.to(wide)[:, None] - lse_BHn).exp() * d_BHn).sum((0, 2)).to(sinks_H.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


def _head_groups(q: Tensor, k: Tensor, keys: _GatheredKeys | None) -> list[tuple[slice, slice]]:
    """Slices of the heads, and of their kv heads, that are computed at the same time."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if keys is None:
        return [(slice(None), slice(None))]
    step, each = gathered_kv_heads(heads, kv_heads, keys.size), heads // kv_heads
    return [(slice(at * each, (at + step) * each), slice(at, at + step)) for at in range(0, kv_heads, step)]


class _Exchange(Function):
    """All-to-all of tensors (B, heads, tokens, width): all heads of this rank's tokens become all tokens of
    this rank's heads (`to_heads`), or the reverse. In one message."""

    @staticmethod
    def forward(ctx: Any, group: Group, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(group, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchanged(ctx.group, not ctx.to_heads, gradients)


def _exchanged(group: Group, to_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    size = group.size
    given, taken = (1, 2) if to_heads else (2, 1)  # the dim that ranks divide before, and after
    parts = [t.unflatten(given, (size, -1)).movedim(given, 0) for t in tensors]
    sent = torch.cat([part.reshape(size, -1) for part in parts], 1).flatten()
    received = torch.empty_like(sent)
    all_to_all(received, sent, group, label=_LABEL)
    lengths = [part.numel() // size for part in parts]
    from_ranks = received.view(size, -1).split(lengths, 1)
    results = []
    for flat, part in zip(from_ranks, parts, strict=True):
        ranks = flat.reshape(size, *part.shape[1:])  # of one rank's heads and tokens each
        results.append(ranks.movedim(0, taken).flatten(taken, taken + 1))
    return tuple(results)


def share_tokens(
    batch: Mapping[str, Tensor],
    of_tokens: Collection[str],
    group: Group,
    method: str,
    numbering: Numbering | None,
) -> SharedTokens:
    """This rank's tokens of a micro-batch. `of_tokens`: entries with tokens in dim 1. `numbering`: of a model
    that takes position ids, which the batch may leave to it. Raises ModelError."""
    share = SequenceShare.of_batch(batch, of_tokens, group, chunks=num_chunks(method))
    rows = dict(batch)
    if numbering is not None and "position_ids" not in rows:
        rows["position_ids"] = numbering.positions(batch, share.order.num_tokens, share.device)
    return SharedTokens(share.own(rows, of_tokens), ContextAttention(group, share, method))
