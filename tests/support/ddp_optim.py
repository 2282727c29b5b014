"""torch's distributed optimizers and related helpers, whose import warns."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the import scripts functions that no test calls
    from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer,
        _apply_optimizer_in_backward,
        _get_in_backward_optimizers,
    )
    from torch.distributed.optim.zero_redundancy_optimizer import _OverlapStatus

__all__ = [
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "_OverlapStatus",
    "_apply_optimizer_in_backward",
    "_get_in_backward_optimizers",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "optimizer_overlap",
    "post_localSGD_hook",
]
