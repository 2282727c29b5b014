"""Recompute (activation checkpointing): a block keeps its input only and runs again in backward.

Chen et al. 1604.06174. torch's non-reentrant checkpoint does the work; it restores the random state, so
dropout masks are the same both times.
"""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.errors import PlanError


def recompute_blocks(blocks: list[nn.Module]) -> None:
    """Wraps each block's forward. Raises PlanError when there is no block to wrap."""
    if not blocks:
        raise PlanError(
            "recompute=full needs the model's repeated blocks, and none were found",
            expected="an nn.ModuleList or nn.Sequential of blocks",
            hint="recompute=none",
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
