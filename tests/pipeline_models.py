"""Small models of any depth, to be cut into stages."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import programs
from plait.models import causal_lm_on_meta

WIDTH = 16


def llama(*, layers: int, on_meta: bool = True, tied: bool = False, exact: bool = True) -> nn.Module:
    return programs.llama(on_meta=on_meta, tied=tied, exact=exact, hidden=WIDTH, ffn=24, layers=layers)


def tied_llama(*, layers: int, on_meta: bool = True) -> nn.Module:
    return llama(layers=layers, on_meta=on_meta, tied=True)


def gpt2(*, layers: int, on_meta: bool = True) -> nn.Module:
    """Tied, with learned positions; its linear layers are Conv1D. It computes in its weights' dtype."""
    model: Any = causal_lm_on_meta(
        {
            "model_type": "gpt2",
            "vocab_size": programs.VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": layers,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    )
    return model if on_meta else type(model)(model.config)


class PairBlock(nn.Module):
    """Takes and returns two tensors, of different widths: what is said, and what is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH + 8, 24)
        self.down = nn.Linear(24, WIDTH)
        self.keep = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(torch.cat([x, memory], -1)))
        return x + self.down(inner), 0.5 * memory + self.keep(inner)


class Pair(nn.Module):
    """Blocks that pass two tensors. The head reads both, and the embedding's own weight."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([PairBlock() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(8, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        memory = torch.cumsum(x[..., :8], 1)
        for block in self.blocks:
            x, memory = block(x, memory)
        return F.linear(self.norm(x), self.embedding.weight) + self.head(memory)


def pair(*, layers: int, on_meta: bool = True) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        return Pair(layers)


def frozen(*, layers: int, on_meta: bool = True) -> nn.Module:
    """The head trains, and the second half of the blocks; stages before that have nothing to train. The
    embedding is also part of the head."""
    model = pair(layers=layers, on_meta=on_meta)
    for module in (model.embedding, *list(model.blocks)[: layers // 2]):  # type: ignore[arg-type]
        module.requires_grad_(False)
    return model


def frozen_tied_llama(*, layers: int, on_meta: bool = True) -> nn.Module:
    """The embedding that is the head too does not train, nor does the last block."""
    model: Any = tied_llama(layers=layers, on_meta=on_meta)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[-1].requires_grad_(False)
    return model


MODELS = {"llama": llama, "tied_llama": tied_llama, "gpt2": gpt2, "pair": pair}
