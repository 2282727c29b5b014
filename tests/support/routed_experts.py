"""Mixtures of experts whose routers choose by a rule, so that it is known who gets how many tokens."""

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import hf_models


def model_with(
    routing: str, *, on_meta: bool = True, exact: bool = True, experts_implementation: str = "eager"
) -> nn.Module:
    """A mixture whose routers choose by a token's number in the batch, or by a rule."""
    model: Any = hf_models.model_of("mixtral", on_meta=on_meta, exact=exact)
    model.set_experts_implementation(experts_implementation)
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.forward = types.MethodType(functools.partial(_routed, routing), module)
    return model


def _routed(routing: str, router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choices by a rule, with the weights that the router's logits give them."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), router.weight)
    if logits.is_meta:  # which tells whether tokens meet: by their contents
        return logits, *torch.softmax(logits, -1).topk(2, -1)
    number = torch.arange(len(logits), device=logits.device)[:, None]
    chosen = {
        "balanced": torch.cat([number, number + 2], 1) % 4,  # each rank of two or four gets as many
        "one": torch.cat([number * 0 + 3, number * 0 + 1], 1),  # experts 0 and 2 get none
        "first rank": torch.cat([number * 0, number * 0 + 1], 1),
        "one rank": torch.cat([number * 0 + 2, number * 0 + 3], 1),  # the first half of experts gets none
        "all": (number + torch.arange(4, device=logits.device)) % 4,
    }[routing]
    weights = torch.softmax(logits, -1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


class _Listed(nn.ModuleList):
    """Experts in a list of modules, each with a bias, and one with more parameters than others."""

    def forward(self, x_TH: Tensor, choices_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        for number, expert in enumerate(self):
            tokens, places = (choices_Tk == number).nonzero(as_tuple=True)
            if len(tokens):
                y_TH = y_TH.index_add(0, tokens, expert(x_TH[tokens]) * weights_Tk[tokens, places, None])
        return y_TH


class _Plain(nn.Module):
    """Experts in tensors of three dims, without the decorator of transformers."""

    def __init__(self, number: int, hidden: int, width: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, hidden, width) / 8)
        self.down = nn.Parameter(torch.randn(number, width, hidden) / 8)

    def forward(self, x_TH: Tensor, choices_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        up, down = self.up[choices_Tk], self.down[choices_Tk]
        hidden = torch.einsum("th,tkhf->tkf", x_TH, up).tanh()
        return torch.einsum("tkf,tkfh,tk->th", hidden, down, weights_Tk)


def model_of(form: str, *, on_meta: bool = False) -> nn.Module:
    """A mixture with experts of a user's own in each block, in a `list` or `plain`; or with those of the
    first block in the last one, too (`shared`)."""
    torch.manual_seed(0)
    del on_meta  # they have values
    model: Any = hf_models.model_of("mixtral", on_meta=False)
    hidden, width = model.config.hidden_size, 24
    if form == "shared":
        model.model.layers[-1].mlp.experts = model.model.layers[0].mlp.experts
        return model
    for block in model.model.layers:
        mlps = [
            nn.Sequential(nn.Linear(hidden, wide), nn.Tanh(), nn.Linear(wide, hidden))
            for wide in (width, width, width + 8, width)
        ]
        block.mlp.experts = _Listed(mlps) if form == "list" else _Plain(4, hidden, width)
        block.mlp.experts.to(model.dtype)
    return model
