"""DistributedDataParallel, ours and torch's, on two models: what `data_parallel.py --ddp` measures.

Contenders have the same model, optimizer (fused AdamW), autocast and batch, and differ in the class and its
options alone. Those of a group take turns in one run; ours are compared with torch's class with the same
options.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import common
import peers
import plait
from llama import Batch
from peers import ADAMW, Step
from plait.comm import World, all_reduce

TORCH = "torch DDP"
COMPUTE = {"bf16": torch.bfloat16, "fp32": None}  # what autocast computes in
NUM_LAYERS, WIDTH = 750, 32  # of the small model: 1,500 parameters

Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Contender:
    """`like`: torch's class with the same options, by name."""

    name: str
    wrap: Wrap
    like: str | None = None


def ours(transport: str, **options: bool) -> Wrap:
    return partial(plait.DistributedDataParallel, transport=transport, **options)


def groups() -> dict[str, list[Contender]]:
    """Contenders that are measured in one run; all are compared with the step without communication."""
    views, unused = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
    torch_views, torch_unused = f"{TORCH}, bucket views", f"{TORCH}, find unused"
    return {
        "": [
            Contender(TORCH, TorchDDP),
            Contender(torch_views, partial(TorchDDP, **views)),
            Contender("plait DDP, group", ours("group"), TORCH),
            Contender("plait DDP, host", ours("host"), TORCH),
            Contender("plait DDP, host, bucket views", ours("host", **views), torch_views),
        ],
        ", unused": [
            Contender(torch_unused, partial(TorchDDP, **unused)),
            Contender("plait DDP, group, find unused", ours("group", **unused), torch_unused),
            Contender("plait DDP, host, find unused", ours("host", **unused), torch_unused),
        ],
    }


def a_step(model: nn.Module, precision: str, wrap: Wrap = lambda module: module) -> Step:
    """The step of a contender."""
    optimizer = torch.optim.AdamW(peers.groups(model), fused=True, **ADAMW)
    return peers.autocast_step(wrap(model), optimizer, COMPUTE[precision])


def averaged_by_hand(model: nn.Module, precision: str, world: World) -> Step:
    """The necessary work of every DDP: each gradient summed over ranks and divided, after backward."""
    optimizer = torch.optim.AdamW(peers.groups(model), fused=True, **ADAMW)

    def average(*_: object) -> None:
        for parameter in model.parameters():
            all_reduce(parameter.grad, world.group)
            parameter.grad /= world.size

    optimizer.register_step_pre_hook(average)
    return peers.autocast_step(model, optimizer, COMPUTE[precision])


@dataclass
class Outcome:
    loss: Tensor


class Small(nn.Module):
    """Parameters of 1,024 and 32 elements, in layers that are each added to their input."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Outcome:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + layer(hidden) / len(self.layers) ** 0.5
        return Outcome(nn.functional.mse_loss(hidden.float(), targets))


def small(num_layers: int) -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small(num_layers)


def small_batch(num_rows: int) -> Batch:
    """From torch's generator: different ones on every rank."""
    return {"inputs": torch.randn(num_rows, WIDTH), "targets": torch.randn(num_rows, WIDTH)}


def rows_with_torch(
    case: str, times: common.Times, contenders: list[Contender], *, yardstick: str
) -> list[common.Row]:
    """A row per contender; ours have their ratio to torch's class with the same options, if it took part."""
    like = {contender.name: contender.like for contender in contenders}
    rows = []
    for row in common.rows(case, times, yardstick=yardstick, peers=()):
        name = row["contender"]
        peer = like.get(name)
        if peer in times:
            row |= {"fastest_other": peer, "faster_than_it": common.ratio(times[peer], times[name])}
        rows.append(row)
    return rows
