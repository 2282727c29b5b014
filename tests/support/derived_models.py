"""Blocks of models that have no tensor plan."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layers(nn.Module):
    """A block of linear layers, and what its forward does with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **widths: tuple[int, int]) -> None:
        super().__init__()
        self.own_forward, self.norm, self.scale = forward, nn.LayerNorm(72), nn.Parameter(torch.ones(72))
        for name, (inp, out) in widths.items():
            setattr(self, name, nn.Linear(inp, out))

    def forward(self, x_BSh: Tensor) -> Tensor:
        return x_BSh + self.own_forward(self, x_BSh)


class FewKeys(nn.Module):
    """An attention of 6 heads with 2 heads of keys and values, 4 features each, whose inside is given."""

    def __init__(self, inside: Callable[..., Tensor]) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.inside = 6, 2, inside
        self.norm = nn.LayerNorm(4)
        self.q, self.k, self.v, self.out = (
            nn.Linear(*sizes) for sizes in ((24, 24), (24, 8), (24, 8), (24, 24))
        )

    def forward(self, x_BSh: Tensor) -> Tensor:
        q, k, v = (layer(x_BSh).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(self.inside(self, q, k, v).transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self, inside: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attn = FewKeys(inside)

    def forward(self, x_BSh: Tensor) -> Tensor:
        return x_BSh + self.attn(x_BSh)


def eager(m: FewKeys, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5) -> Tensor:
    """Every head of keys is repeated for its queries."""
    repeats = m.num_heads // m.num_key_value_heads
    k, v = (t[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -1e9).softmax(-1) @ v


def fused(_: FewKeys, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def packed(m: Any, x: Tensor) -> Tensor:
    """An attention with another name, of as many heads as there are features for."""
    q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in m.mix(x).chunk(3, -1))
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
