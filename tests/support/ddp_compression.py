"""Helpers of the gradient compression tests: a model in float32, its wrapper, the reference."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.parallel.ddp import Compression, compression_hook
from support.ddp import assert_same, gradients, rows

KINDS = ("bf16", "fp16", "int8", "powersgd:2")


def compressed(
    module: nn.Module, kind: str, transport: str, **arguments: Any
) -> plait.DistributedDataParallel:
    ddp = plait.DistributedDataParallel(module, transport=transport, **arguments)
    ddp.register_comm_hook(Compression(ddp, kind), compression_hook)
    return ddp


def model_of_blocks() -> nn.Module:
    """Larger than a compression block, with sizes that are not multiples of it; in float32."""
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 33), nn.Tanh(), nn.Linear(33, 3)).float()


def loss32(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = model(rows(rank, step).float())
    return out.square().mean()


def mean_by_one(module: nn.Module, step: int = 0, loss: Callable[..., Tensor] = loss32) -> dict[str, Tensor]:
    """Gradients of the mean over ranks of their losses, computed on one process."""
    parameters = dict(module.named_parameters())
    ranks = dist.get_world_size()
    total = torch.stack([loss(module, rank, step) for rank in range(ranks)]).mean()
    return dict(zip(parameters, torch.autograd.grad(total, [*parameters.values()]), strict=True))


def worst_error(module: nn.Module, expected: dict[str, Tensor]) -> float:
    """Largest error of any gradient, relative to the largest element; checks that ranks have the same
    bits."""
    found = gradients(module)
    for gradient in found.values():
        assert gradient is not None
        assert_same(gradient)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = [float((found[name] - gradient).abs().max()) for name, gradient in expected.items()]  # type: ignore[operator]
    return max(errors) / largest
