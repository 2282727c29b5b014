"""Attention of a block of keys, with the log-sum-exp of its scores; and its backward.

# B batch  H heads  K kv heads (H is a multiple)  Q queries  N keys  D, V head sizes

[Note: backward of a part]
With p = exp(s - lse), where lse is over all keys of a query, and D = sum of gradient times output over all
keys, the gradient of the scores of any block of keys is p (dP - D). So the gradients of blocks are computed
apart, each from the full output and the full log-sum-exp, and those of the queries are added (Dao
2307.08691, section 3.1; Liu et al. 2310.01889).

The fused kernel of the CPU computes both, in all dtypes, with fewer kv heads, and a log-sum-exp of float32 or
wider. FlashAttention computes them on GPUs, in 16 bits and without a mask. Both support one head size: the
narrower tensors are filled up with zeros. Everything else, such as soft caps and dropout, is computed
by `_plain` in tiles of queries: only the scores of one tile are in memory.

[Note: FlashAttention is compared first]
torch gives the log-sum-exp, and the backward of a part, only by functions of ATen that it does not document.
So a process compares them with `_plain` before it uses them: once for each dtype and head size.

[Note: dropout of a part]
Dropout multiplies the normalized probabilities by factors, of which the log-sum-exp knows nothing. So outputs
of parts are merged as without it; the gradient of a probability is multiplied by its factor; and D remains
the sum of gradient times output, because the factors are in the output.
"""

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.parallel.context.dropout import Dropout

_ATEN = torch.ops.aten
_TILE = 256  # queries whose scores are in memory at the same time
_FLASH_SIZE = 256  # the largest head size of FlashAttention
_FLASH_TOLERANCE = 0.05  # of the largest result: bfloat16 has 8 bits


@dataclass(frozen=True)
class Scores:
    """How scores follow from queries and keys.

    scale    of their products
    softcap  scores are softcap * tanh(scores / softcap); None: as they are
    """

    scale: float
    softcap: float | None = None


class BlockTensors(NamedTuple):
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


def attend(block: BlockTensors, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, V) and the log-sum-exp (B, H, Q) over these keys: -inf of a query that sees
    none."""
    if _is_flash(block, scores):
        return _flash(block, scores.scale)
    if not _is_fused(block, scores):
        return _plain(block, scores)
    (q, k, v), width = _one_size(block.q, block.k, block.v), block.v.shape[-1]
    out, lse_BHQ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.causal, attn_mask=block.additive_mask, scale=scores.scale
    )
    if block.mask_QN is not None:  # the kernel has 0 where there is no key
        lse_BHQ = lse_BHQ.masked_fill(~block.mask_QN.any(-1), -torch.inf)
    return out[..., :width], lse_BHQ


def attend_backward(
    gradient: Tensor, block: BlockTensors, out: Tensor, lse_BHQ: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through these keys: see [Note: backward of a part]. `out` and
    `lse_BHQ` are over all keys."""
    if _is_flash(block, scores):
        return _flash_backward(gradient, block, out, lse_BHQ, scores.scale)
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


def _is_fused(block: BlockTensors, scores: Scores) -> bool:
    return block.q.device.type in ("cpu", "meta") and scores.softcap is None and block.dropout is None


def _one_size(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """Tensors as fused kernels read them: of one head size, whose elements are neighbours in memory."""
    size = -(-max(tensor.shape[-1] for tensor in tensors) // multiple) * multiple
    full = [F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in full]


def _is_flash(block: BlockTensors, scores: Scores) -> bool:
    q, size = block.q, max(block.q.shape[-1], block.v.shape[-1])
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or size > _FLASH_SIZE:
        return False
    is_plain = scores.softcap is block.mask_QN is block.dropout is None
    return is_plain and _flash_is_right(q.device, q.dtype, size)


def _flash(block: BlockTensors, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _one_size(block.q, block.k, block.v, multiple=8)
    out, lse_BHQ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal, scale=scale)[:2]
    return out[..., : block.v.shape[-1]], lse_BHQ


def _flash_backward(
    gradient: Tensor, block: BlockTensors, out: Tensor, lse_BHQ: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [tensor.shape[-1] for tensor in (block.q, block.k, block.v)]
    q, k, v, gradient, out = _one_size(block.q, block.k, block.v, gradient, out, multiple=8)
    lengths, seed = (q.shape[2], k.shape[2]), torch.empty(0, dtype=torch.int64, device=q.device)
    gradients = _ATEN._scaled_dot_product_flash_attention_backward(
        gradient.contiguous(), q, k, v, out, lse_BHQ.contiguous(), None, None, *lengths, 0.0, block.causal,
        seed, seed, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (of[..., :size] for of, size in zip(gradients, sizes, strict=True))
    return dq, dk, dv


@functools.cache
def _flash_is_right(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """See [Note: FlashAttention is compared first]. Synchronises with the device, in the first step."""
    generator, scores = torch.Generator().manual_seed(0), Scores(size**-0.5)
    q, gradient, k, v = (
        torch.randn(1, heads, 64, size, generator=generator).to(device, dtype) for heads in (4, 4, 2, 2)
    )
    for block in (BlockTensors(q, k, v, causal=True), BlockTensors(q, k[:, :, :40], v[:, :, :40])):
        out, lse_BHQ = _plain(block, scores)
        given = gradient, block, out, lse_BHQ + 0.5  # as if there were other keys
        expected = (out, lse_BHQ, *_plain_backward(*given, scores))
        try:
            found = (*_flash(block, scores.scale), *_flash_backward(*given, scores.scale))
        except torch.OutOfMemoryError:  # says nothing of the kernel
            raise
        except RuntimeError as error:  # a device, or a build of torch, without it
            _warn_of_slow_attention(f"{error}".partition("\n")[0])
            return False
        apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
        if not max(apart) < _FLASH_TOLERANCE:
            _warn_of_slow_attention(f"its results differ by {max(apart):.1e}")
            return False
    return True


def _warn_of_slow_attention(reason: str) -> None:
    warnings.warn(
        f"attention over ranks is computed without FlashAttention, and takes longer: {reason}", stacklevel=2
    )


def _plain(block: BlockTensors, scores: Scores) -> tuple[Tensor, Tensor]:
    parts = list(_plain_tiles(block, scores))
    return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 2)


def _plain_tiles(block: BlockTensors, scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
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
    gradient: Tensor, block: BlockTensors, out: Tensor, lse_BHQ: Tensor, scores: Scores
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
