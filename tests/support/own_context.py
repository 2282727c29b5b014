"""A GPT of one's own for context parallelism: rotary positions of the batch, and fewer kv heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from support import programs

TENSOR_PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "head",
}


class Attention(nn.Module):
    def __init__(self, width: int, head: int, kv_width: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.head, self.options = head, options
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_width), nn.Linear(width, kv_width)

    def forward(self, x_BSH: Tensor, position_ids: Tensor, sees: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x_BSH).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = self.attend(rotated(q, position_ids), rotated(k, position_ids), v, sees)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        del sees
        return plait.attention(q, k, v, **self.options)


class Dense(Attention):
    """The same by the definition, with a score of every pair. `sees` (B, 1, S, S): documents and padding."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        given = {"causal": True, "window": None, "scale": q.shape[-1] ** -0.5, "softcap": None} | self.options
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * given["scale"]
        if given["softcap"]:
            scores = given["softcap"] * torch.tanh(scores / given["softcap"])
        at = torch.arange(q.shape[2])
        distance = at[:, None] - at
        seen = torch.ones_like(distance, dtype=torch.bool) if sees is None else sees
        seen = seen & (distance >= 0) if given["causal"] else seen
        if given["window"]:
            seen = seen & (distance.abs() < given["window"])
        scores = scores.masked_fill(~seen, -1e30)
        return (scores.softmax(-1) * seen) @ v  # nothing, for a query that sees nothing


def rotated(x_BHSD: Tensor, position_ids: Tensor) -> Tensor:
    half = x_BHSD.shape[-1] // 2
    speeds = 50.0 ** (-torch.arange(half, device=x_BHSD.device, dtype=x_BHSD.dtype) / half)
    angles = position_ids[:, None, :, None] * speeds
    first, second = x_BHSD.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), attention
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x_BSH: Tensor, position_ids: Tensor, sees: Tensor | None) -> Tensor:
        x_BSH = x_BSH + self.attention(self.before(x_BSH), position_ids, sees)
        return x_BSH + self.mlp(self.between(x_BSH))


class GPT(nn.Module):
    def __init__(self, kv_heads: int, head: int, options: dict[str, Any], kind: type[Attention]) -> None:
        super().__init__()
        width = 24
        self.is_dense = kind is Dense
        self.tokens = nn.Embedding(programs.VOCABULARY, width)
        layers = (kind(width, head, head * kv_heads, options) for _ in range(2))
        self.blocks = nn.ModuleList(Block(width, layer) for layer in layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, programs.VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        sees = None
        if self.is_dense:
            sees = _documents(input_ids, position_ids, attention_mask)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x_BSH = self.tokens(input_ids)
        for block in self.blocks:
            x_BSH = block(x_BSH, position_ids, sees)
        return self.head(self.norm(x_BSH))


def _documents(ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """Pairs of the same document; padding is no key, or a document of packed rows."""
    kept = torch.ones_like(ids) if attention_mask is None else attention_mask
    number = torch.zeros_like(ids)
    if position_ids is not None:
        starts = (position_ids.diff(dim=1) != 1) | (kept.diff(dim=1) != 0)
        number[:, 1:] = starts.cumsum(1)
        return (number[:, :, None] == number[:, None])[:, None]
    return kept.bool()[:, None, None].expand(-1, -1, ids.shape[1], -1)


def gpt(*, on_meta: bool = True, kv_heads: int = 6, head: int = 4, **options: Any) -> GPT:
    """`on_meta=False`: the reference, which computes attention by its definition."""
    torch.manual_seed(3)
    return GPT(kv_heads, head, options, Attention if on_meta else Dense)


def builder(**options: Any) -> Callable[..., nn.Module]:
    return partial(gpt, **options)


def shifted(steps: int, *, length: int = 21) -> list[dict[str, Tensor]]:
    """Batches whose labels are those of the next tokens."""
    found = programs.batches(steps, sequences=2, length=length)
    for batch in found:
        batch["labels"] = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return found


def packed(steps: int) -> list[dict[str, Tensor]]:
    """Rows of documents: boundaries inside runs and between them, and padding at the end of one row."""
    found = programs.batches(steps, sequences=3, length=24)
    lengths = ([5, 1, 6, 9, 3], [24], [11, 2, 11])
    for batch in found:
        batch["position_ids"] = torch.stack([torch.cat([*map(torch.arange, row)]) for row in lengths])
        batch["attention_mask"] = torch.ones(3, 24, dtype=torch.long)
        batch["attention_mask"][2, 20:] = 0
    return found


def padded(steps: int) -> list[dict[str, Tensor]]:
    """Rows with padding on the left, on the right, and none."""
    found = programs.batches(steps, sequences=3, length=19)
    for batch in found:
        mask = torch.ones(3, 19, dtype=torch.long)
        mask[0, :7], mask[1, 12:] = 0, 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return found


def summed_loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy of aligned labels, and their number."""
    labels = batch["labels"].flatten()
    total = F.cross_entropy(outputs.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A sum over all tokens, also those without a target, which count less."""
    weights = 1.0 + (batch["labels"] != -100)
    return (outputs.square().mean(-1) * weights).sum(), weights.sum()
