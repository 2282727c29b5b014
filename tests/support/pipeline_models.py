"""Small models of any depth, to split into stages."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models import causal_lm_on_meta
from support import programs

WIDTH = 16


def llama(*, layers: int, on_meta: bool = True, tied: bool = False, exact: bool = True) -> nn.Module:
    return programs.llama(on_meta=on_meta, tied=tied, exact=exact, hidden=WIDTH, ffn=24, layers=layers)


def tied_llama(*, layers: int, on_meta: bool = True) -> nn.Module:
    return llama(layers=layers, on_meta=on_meta, tied=True)


def gpt2(*, layers: int, on_meta: bool = True, tied: bool = True) -> nn.Module:
    """With learned positions; linear layers are Conv1D. Computes in its weights' dtype."""
    model: Any = causal_lm_on_meta(
        {
            "model_type": "gpt2",
            "vocab_size": programs.VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": tied,
        }
    )
    return model if on_meta else type(model)(model.config)


class PairBlock(nn.Module):
    """Takes and returns two tensors of different widths: hidden states and a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH + 8, 24)
        self.down = nn.Linear(24, WIDTH)
        self.keep = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(torch.cat([x, memory], -1)))
        return x + self.down(inner), 0.5 * memory + self.keep(inner)


class Pair(nn.Module):
    """Blocks that pass two tensors. The head reads both, and the embedding's weight."""

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
    """The head and the second half of the blocks are trained; earlier stages have no trained parameters. The
    embedding is also part of the head."""
    model = pair(layers=layers, on_meta=on_meta)
    for module in (model.embedding, *list(model.blocks)[: layers // 2]):  # type: ignore[arg-type]
        module.requires_grad_(False)
    return model


def frozen_tied_llama(*, layers: int, on_meta: bool = True) -> nn.Module:
    """The embedding, which is also the head, and the last block are frozen."""
    model: Any = tied_llama(layers=layers, on_meta=on_meta)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[-1].requires_grad_(False)
    return model


class Turn(nn.Module):
    """A block. Its layer and its buffer may be shared with other blocks."""

    def __init__(self, linear: nn.Linear | None = None, gain: Tensor | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH) if linear is None else linear
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.linear(self.norm(x)))
        return x + (inner if self.gain is None else inner * self.gain)


class Turns(nn.Module):
    """Four blocks that pass one tensor, or a tuple that begins with it."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[0] if isinstance(x, tuple) else x)


def half_frozen(on_meta: bool = True) -> nn.Module:
    """The embedding and the first two of four blocks are frozen."""
    with torch.device("meta" if on_meta else "cpu"):
        model = Turns([Turn() for _ in range(4)])
    for module in (model.embedding, *list(model.blocks)[:2]):
        module.requires_grad_(False)
    return model


def one_layer(on_meta: bool = True) -> nn.Module:
    """All blocks share one linear layer."""
    with torch.device("meta" if on_meta else "cpu"):
        linear = nn.Linear(WIDTH, WIDTH)
        return Turns([Turn(linear) for _ in range(4)])


def one_buffer(on_meta: bool = False) -> nn.Module:
    """All blocks share one persistent buffer."""
    torch.manual_seed(7)
    gain = torch.arange(WIDTH) / WIDTH + 0.5  # exact in any dtype
    return Turns([Turn(gain=gain) for _ in range(4)])


class _Within(nn.Module):
    """Contains the blocks, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Turn() for _ in range(4)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.proj(self.embedding(input_ids)) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


class Enclosed(nn.Module):
    """The blocks belong to a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.within = _Within()
        self.head = nn.Linear(WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.within(input_ids))


def enclosed(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return Enclosed()


class _Advised(Turn):
    """Returns an auxiliary output, which it only computes in training."""

    def forward(self, x: Any) -> Any:
        x = super().forward(x[0] if isinstance(x, tuple) else x)
        return x, x.square().mean(-1) if self.training else None


def advised(on_meta: bool = True) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        return Turns([_Advised() for _ in range(4)])


MODELS = {"llama": llama, "tied_llama": tied_llama, "gpt2": gpt2, "pair": pair}
