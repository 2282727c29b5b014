"""Ulysses written by hand over torch.distributed, and a step that does not communicate.

Both load the same folder as one process does, and divide the tokens that all ranks are given: a rank has one
run of each row, with its positions, and labels that were shifted before. Attention is a function in
transformers' `AttentionInterface`.

# B batch  H heads of q, k and v together (of a rank: h)  N tokens of the row (of a rank: n)  D head size

[Note: differences between contenders]
- The message: q, k and v are sent in one all-to-all, as with us. DeepSpeed's Ulysses sends three.
- What is bfloat16: as in `tensor_peers.py`, everything is, also the gradients that are summed over ranks.
  Ours keeps float32 weights and moments.
- The gradient's norm: we compute it in every step.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface

from llama import Batch
from plait.comm import World
from plait.models import IGNORED_LABEL
from tensor_peers import Backward, Contender, contender, load

ULYSSES = "Ulysses by hand"
NO_COMMUNICATION = "no communication"


def ulysses(folder: Path, precision: str, world: World) -> Contender:
    """All-to-alls over Gloo around torch's attention, and an all-reduce of all gradients. `world`: its clock
    measures the communication."""

    def attention(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        k, v = (_with_copies(t, 1, world.size) for t in (k, v))
        parts = [t.unflatten(1, (world.size, -1)).movedim(1, 0) for t in (q, k, v)]  # (P, B, h, n, D)
        sizes = [part.shape[2] for part in parts]
        ranks = _AllToAll.apply(torch.cat(parts, 2), world)
        row_BhND = ranks.movedim(0, 2).flatten(2, 3)
        out = _causal(*row_BhND.split(sizes, 1), scaling)
        ranks = _AllToAll.apply(out.unflatten(2, (world.size, -1)).movedim(2, 0), world)
        return ranks.movedim(0, 1).flatten(1, 2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ulysses_by_hand", attention)
    model = load(folder, precision, attn_implementation="ulysses_by_hand")
    return contender(ULYSSES, model, _summed_backward(model, world))


def no_communication(folder: Path, precision: str, world: World) -> Contender:
    """The work of a rank without messages: its tokens, and an equal share of one process' attention, which is
    that of fewer heads. The numbers are of no use."""

    def attention(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        tokens = [t.transpose(1, 2) for t in (q, k, v)]  # as in memory
        tokens[1:] = [_with_copies(t, 2, world.size) for t in tokens[1:]]
        shares = [t.reshape(t.shape[0], -1, t.shape[2] // world.size, t.shape[3]) for t in tokens]
        out = _causal(*(share.transpose(1, 2) for share in shares), scaling)
        return out.transpose(1, 2).reshape(tokens[0].shape), None

    AttentionInterface.register("equal_share", attention)
    model = load(folder, precision, attn_implementation="equal_share")
    return contender(NO_COMMUNICATION, model, lambda model, batch: _backward(model, batch, world))


class _AllToAll(Function):
    """The i-th of the first dim goes to rank i, and one comes from each; and back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, world: World) -> Tensor:
        ctx.world = world
        received = torch.empty(sent.shape, dtype=sent.dtype)
        with world.clock.during(ULYSSES):
            dist.all_to_all_single(received, sent.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, gradient, ctx.world), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


def _with_copies(t: Tensor, dim: int, size: int) -> Tensor:
    """Copies of kv heads, if ranks would have less than one each."""
    copies = math.lcm(t.shape[dim], size) // t.shape[dim]
    return t if copies == 1 else t.repeat_interleave(copies, dim)


def _backward(model: nn.Module, batch: Batch, world: World) -> Tensor:
    """Gradients of this rank's tokens; returns its part of the mean loss."""
    ids = batch["input_ids"]
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    own = [t.chunk(world.size, 1)[world.rank] for t in (ids, positions, labels)]
    logits = model(input_ids=own[0], position_ids=own[1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), own[2].flatten(), reduction="sum")
    loss = loss / (labels != IGNORED_LABEL).sum()
    loss.backward()
    return loss.detach()


def _summed_backward(model: nn.Module, world: World) -> Backward:
    """`_backward` with gradients in one tensor, which is summed over the ranks at once."""
    parameters = list(model.parameters())
    flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
    parts = flat.split([p.numel() for p in parameters])
    views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    def backward(model: nn.Module, batch: Batch) -> Tensor:
        flat.zero_()
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        loss = _backward(model, batch, world)
        with world.clock.during(ULYSSES):
            dist.all_reduce(flat)
            dist.all_reduce(loss)
        return loss

    return backward
