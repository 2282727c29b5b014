"""Models that have no tensor plan, and blocks of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layers(nn.Module):
    """A block of linear layers, and what its forward does with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **widths: tuple[int, int]) -> None:
        super().__init__()
        self.own_forward, self.norm, self.scale = forward, nn.LayerNorm(72), nn.Parameter(torch.ones(72))
        self.conv = nn.Conv1d(24, 24, 3, groups=24, padding=2)
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
    def __init__(self, inside: Callable[..., Tensor], *sinks: int) -> None:
        super().__init__()
        self.attn = FewKeys(inside)
        self.attn.sinks = nn.Parameter(torch.randn(*sinks or (1,)))

    def forward(self, x_BSh: Tensor) -> Tensor:
        return x_BSh + self.attn(x_BSh)


def eager(m: FewKeys, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5) -> Tensor:
    """Every head of keys is repeated for its queries."""
    repeats = m.num_heads // m.num_key_value_heads
    k, v = (t[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -1e9).softmax(-1) @ v


def sink(m: FewKeys, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A learned score for each head, of no key."""
    k, v = (t.repeat_interleave(m.num_heads // m.num_key_value_heads, 1) for t in (k, v))
    scores, sinks = q @ k.transpose(2, 3), m.sinks.reshape(1, -1, 1, 1)
    scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, scores.shape[2], -1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


class Latent(nn.Module):
    """The attention of 6 heads with one rotary key for all of them, as DeepSeek's.

    fills: in memory that is filled; the key is normed, and multiplied with more features. reads: the key is
    in the result, too.
    """

    def __init__(self, *, fills: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.num_heads, self.fills, self.reads = 6, fills, reads
        self.q, self.kv_a, self.kv_b = nn.Linear(24, 36), nn.Linear(24, 12), nn.Linear(8, 48)
        self.norm, self.key_norm, self.out = nn.LayerNorm(8), nn.LayerNorm(2), nn.Linear(24, 24)

    def forward(self, x_BSh: Tensor) -> Tensor:
        more, latent, shared = self.kv_a(x_BSh).split([2, 8, 2], -1)
        q = self.q(x_BSh).unflatten(-1, (-1, 6)).transpose(1, 2)
        kv = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 8)).transpose(1, 2)
        k, v = kv.split([4, 4], -1)
        shared = self.key_norm(shared) * more if self.fills else shared
        of_heads = shared[:, None].expand(-1, k.shape[1], -1, -1)
        if self.fills:
            keys = k.new_empty((*k.shape[:-1], 6))
            keys[..., :4].copy_(k)
            keys[..., 4:] = of_heads
        else:
            keys = torch.cat([k, of_heads], -1)
        found = F.scaled_dot_product_attention(q, keys, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(found) + (shared.mean(-1, keepdim=True) if self.reads else 0)


class LatentBlock(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attn = Latent(**options)

    def forward(self, x_BSh: Tensor) -> Tensor:
        return x_BSh + self.attn(x_BSh)


def fused(_: FewKeys, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def short_convolution(m: Any, x: Tensor) -> Tensor:
    """The mixer of LFM2."""
    gate, scale, x = m.mix(x).transpose(1, 2).chunk(3, 1)
    return m.out((gate * m.conv(scale * x)[..., : x.shape[-1]]).transpose(1, 2))


def packed(m: Any, x: Tensor) -> Tensor:
    """An attention with another name, of as many heads as there are features for."""
    q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in m.mix(x).chunk(3, -1))
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Packed projections, and numbers that it counts itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.width = num_heads, width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BSh: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BSh).split(self.width, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attn, self.norm = Attention(width, num_heads), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x_BSh: Tensor) -> Tensor:
        x_BSh = x_BSh + self.attn(self.norm(x_BSh))
        return x_BSh + self.fc2(torch.tanh(self.fc1(x_BSh)))


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self, width: int = 24, num_heads: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(2))
        self.head = nn.Linear(width, 101)
        self.double()

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        x_BSh = self.embed(input_ids)
        for block in self.blocks:
            x_BSh = block(x_BSh)
        return SimpleNamespace(logits=self.head(x_BSh))


class Derived(Plain):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2)).double()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return super().forward(input_ids, use_cache)
