"""A GPT of one's own, and its tensor plan."""

import torch.nn.functional as F
from torch import Tensor, nn

from support import programs

CUTS = {
    "tokens": "embedding_rowwise",
    "blocks.*.attention.qkv": "packed_colwise:3/8",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.attention": "local:heads",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "head",
}


class Attention(nn.Module):
    """A packed projection, and a count of heads that the code reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSh: Tensor) -> Tensor:
        parts = self.qkv(x_BSh).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x_BSh: Tensor) -> Tensor:
        x_BSh = x_BSh + self.attention(self.before(x_BSh))
        return x_BSh + self.mlp(self.between(x_BSh))


class NormedEmbedding(nn.Embedding):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(super().forward(ids))


class GPT(nn.Module):
    """`heads` of 8 features; the head's weight is that of an embedding with a norm, if it is `tied`."""

    def __init__(
        self, heads: int = 4, *, tied: bool = False, layers: int = 2, block: type[Block] = Block
    ) -> None:
        super().__init__()
        width = 8 * heads
        self.tokens = (NormedEmbedding if tied else nn.Embedding)(programs.VOCABULARY, width)
        self.places = nn.Embedding(programs.LENGTH, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, programs.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSh = self.embed(input_ids)
        for block in self.blocks:
            x_BSh = block(x_BSh)
        return self.head(self.norm(x_BSh))
