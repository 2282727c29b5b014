"""BatchNorm with the statistics of all data ranks' micro-batches (Ioffe and Szegedy 1502.03167, algorithm 1).

# N samples and positions of this rank  C channels

torch's SyncBatchNorm, for accelerators, gathers a mean, a variance and a count of each rank. Here sums are
all-reduced: first of the values, then of the squared distances from the mean, which avoids cancellation.
Their backward is an all-reduce too, as every rank's output depends on every rank's input.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plait.comm import Group
from plait.parallel.tensor.functional import differentiable_all_reduce


def batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the modules that will compute with the statistics of a batch, with their names.

    A model in evaluation mode will be trained completely; otherwise parts of it may be frozen on purpose.
    """
    for name, module in model.named_modules():
        is_trained = module.training or not model.training
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and is_trained:
            yield name, module


def sync_batch_norms(model: nn.Module, group: Group) -> None:
    """Replace the forward of each BatchNorm, in place. `group`: the data ranks."""
    modules: list[nn.Module] = [module for _, module in batch_norms(model)]
    for module in modules:
        module.forward = MethodType(SyncedBatchNorm(module.forward, group), module)


class SyncedBatchNorm:
    """The forward of a BatchNorm over all ranks of a group; bound to the module by `types.MethodType`."""

    def __init__(self, forward: Callable[[Tensor], Tensor], group: Group) -> None:
        self._local: Any = getattr(forward, "__func__", forward)
        self._group = group

    @torch.compiler.disable(reason="a synchronized BatchNorm")
    def __call__(self, module: _BatchNorm, x: Tensor) -> Tensor:
        """Normalize `x` (B, C, ...), in its dtype; statistics are in float32 at least."""
        if not module.training:
            return self._local(module, x)
        wide = x.transpose(0, 1).flatten(1).to(torch.promote_types(x.dtype, torch.float32))  # (C, N)
        count = torch.full((1,), wide.shape[1], dtype=wide.dtype, device=x.device)
        sums = differentiable_all_reduce(torch.cat([wide.sum(1), count]), self._group)
        count, mean_C = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        centered = wide - mean_C[:, None]
        variance_C = differentiable_all_reduce(centered.square().sum(1), self._group) / count
        _update_running_statistics(
            module, mean_C.detach(), variance_C.detach() * (count / (count - 1).clamp(min=1))
        )
        y = centered * torch.rsqrt(variance_C + module.eps)[:, None]
        if module.affine:
            y = y * module.weight[:, None] + module.bias[:, None]
        return y.to(x.dtype).unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)


@torch.no_grad()
def _update_running_statistics(module: _BatchNorm, mean_C: Tensor, variance_C: Tensor) -> None:
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked += 1
    momentum: Any = module.momentum
    factor = 1.0 / module.num_batches_tracked.to(mean_C) if momentum is None else momentum
    module.running_mean += factor * (mean_C.to(module.running_mean) - module.running_mean)
    module.running_var += factor * (variance_C.to(module.running_var) - module.running_var)
