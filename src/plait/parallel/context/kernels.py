"""Attention of a block of keys, with the log-sum-exp of its scores; and its backward.

# B batch  H heads  K kv heads (H is a multiple)  Q queries  N keys  D, V head sizes

[Note: backward of a part]
With p = exp(s - lse), where lse is over all keys of a query, and D = sum of gradient times output over all
keys, the gradient of the scores of any block of keys is p (dP - D). So the gradients of blocks are computed
apart, each from the full output and the full log-sum-exp, and those of the queries are added (Dao
2307.08691, section 3.1; Liu et al. 2310.01889).

The fused kernel of the CPU computes both, in all dtypes, with fewer kv heads, and a log-sum-exp of float32 or
wider. It supports one head size: the narrower tensors are filled up with zeros. Scores with a soft cap,
dropout, and other devices are computed by `_plain` in tiles of queries, so that scores of a tile alone are in
memory.

[Note: dropout of a part]
Dropout multiplies the normalized probabilities by factors, of which the log-sum-exp knows nothing. So outputs
of parts are merged as without it; the gradient of a probability is multiplied by its factor; and D remains
the sum of gradient times output, because the factors are in the output.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.parallel.context.dropout import Dropout

_ATEN = torch.ops.aten
_TILE = 256  # queries whose scores are in memory at the same time


@dataclass(frozen=True)
class Scores:
    """How scores follow from queries and keys.

    scale    of their products
    softcap  scores are softcap * tanh(scores / softcap); None: as they are
    """

    scale: float
    softcap: float | None = None


class Block(NamedTuple):
    """Queries and some of their keys and values.

    causal    query i sees keys up to i, of as many
    mask_QN   True where a query sees a key; None: all
    dropout   of its probabilities; None: none
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    mask_QN: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def additive_mask(self) -> Tensor | None:
        """The mask as the fused kernel takes it."""
        if self.mask_QN is None:
            return None
        zeros = torch.zeros(self.mask_QN.shape, dtype=self.q.dtype, device=self.q.device)
        return zeros.masked_fill_(~self.mask_QN, -torch.inf)[None, None]

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Rows of queries, the first keys that some see, and what they see of these; None: all."""
        num_queries = self.q.shape[2]
        for start in range(0, num_queries, _TILE):
            rows = slice(start, min(start + _TILE, num_queries))
            if self.causal:
                at = torch.arange(rows.stop, device=self.q.device)
                yield rows, slice(rows.stop), at[rows, None] >= at
            else:
                yield rows, slice(None), None if self.mask_QN is None else self.mask_QN[rows]


def attend(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, V) and the log-sum-exp (B, H, Q) over these keys: -inf of a query that sees
    none."""
    if not _is_fused(block, scores):
        parts = list(_plain(block, scores))
        return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 2)
    (q, k, v), width = _one_size(block.q, block.k, block.v), block.v.shape[-1]
    out, lse_BHQ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.causal, attn_mask=block.additive_mask, scale=scores.scale
    )
    if block.mask_QN is not None:  # the kernel has 0 where there is no key
        lse_BHQ = lse_BHQ.masked_fill(~block.mask_QN.any(-1), -torch.inf)
    return out[..., :width], lse_BHQ


def attend_backward(
    gradient: Tensor, block: Block, out: Tensor, lse_BHQ: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through these keys: see [Note: backward of a part]. `out` and
    `lse_BHQ` are over all keys."""
    if not _is_fused(block, scores):
        return _plain_backward(gradient, block, out, lse_BHQ, scores)
    sizes = [tensor.shape[-1] for tensor in (block.q, block.k, block.v)]
    q, k, v, gradient, out = _one_size(block.q, block.k, block.v, gradient, out)
    gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, lse_BHQ, 0.0, block.causal, attn_mask=block.additive_mask, scale=scores.scale
    )
    dq, dk, dv = (of[..., :size] for of, size in zip(gradients, sizes, strict=True))
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add to the result over some keys, in place, that over others; either may see none (-inf). `out`: in
    float32 or wider, as `lse`."""
    share = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def _is_fused(block: Block, scores: Scores) -> bool:
    return block.q.device.type in ("cpu", "meta") and scores.softcap is None and block.dropout is None


def _one_size(*tensors: Tensor) -> list[Tensor]:
    size = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors]


def _plain(block: Block, scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
    groups = block.q.shape[1] // block.k.shape[1]
    k, v = block.k.repeat_interleave(groups, 1), block.v.repeat_interleave(groups, 1)
    for rows, keys, mask in block.tiles():
        s_BHQN = _scores(block.q[:, :, rows], k[:, :, keys], scores, mask)[0]
        lse_BHQ = s_BHQN.logsumexp(-1)
        finite_BHQ1 = lse_BHQ.masked_fill(lse_BHQ == -torch.inf, 0.0).unsqueeze(-1)
        p_BHQN = (s_BHQN - finite_BHQ1).exp_()
        if block.dropout is not None:
            p_BHQN *= block.dropout.factors(rows, keys, p_BHQN.dtype)
        yield p_BHQN.to(v.dtype) @ v[:, :, keys], lse_BHQ


def _scores(q: Tensor, k: Tensor, scores: Scores, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The scores in float32 or wider, and the derivative of the soft cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s_BHQN, slope = (q @ k.mT).to(wide) * scores.scale, None
    if scores.softcap is not None:
        capped = torch.tanh(s_BHQN / scores.softcap)
        s_BHQN, slope = capped * scores.softcap, 1 - capped.square()
    return (s_BHQN if mask is None else s_BHQN.masked_fill(~mask, -torch.inf)), slope


def _plain_backward(
    gradient: Tensor, block: Block, out: Tensor, lse_BHQ: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    q, wide, kv_heads = block.q, lse_BHQ.dtype, block.k.shape[1]
    groups = q.shape[1] // kv_heads
    k, v = block.k.repeat_interleave(groups, 1), block.v.repeat_interleave(groups, 1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, keys, mask in block.tiles():
        s_BHQN, slope = _scores(q[:, :, rows], k[:, :, keys], scores, mask)
        p_BHQN = (s_BHQN - lse_BHQ[:, :, rows, None]).exp_()
        of_out = gradient[:, :, rows]
        dp_BHQN, used_BHQN = (of_out @ v[:, :, keys].mT).to(wide), p_BHQN
        if block.dropout is not None:
            factors_BHQN = block.dropout.factors(rows, keys, wide)
            dp_BHQN, used_BHQN = dp_BHQN * factors_BHQN, p_BHQN * factors_BHQN
        dv[:, :, keys] += (used_BHQN.mT.to(of_out.dtype) @ of_out).to(wide)
        d_BHQ1 = (of_out.to(wide) * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        ds_BHQN = p_BHQN * (dp_BHQN - d_BHQ1) * scores.scale
        ds_BHQN = (ds_BHQN if slope is None else ds_BHQN * slope).to(q.dtype)
        dq[:, :, rows] = ds_BHQN @ k[:, :, keys]
        dk[:, :, keys] += (ds_BHQN.mT @ q[:, :, rows]).to(wide)
    dk, dv = (g.unflatten(1, (kv_heads, groups)).sum(2) for g in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(v.dtype)
