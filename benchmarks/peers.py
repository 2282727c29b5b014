"""Other people's data parallelism, as its users write it at its fastest, to compare ours with.

Every peer starts from the weights that it is given, and takes the same optimizer with the same groups as ours
(no weight decay on norms and biases), the same loss (the model's own mean over targets) and the same batch.

[Note: differences between peers]
- The gradient's norm: we compute it in every step, and so does DeepSpeed (ZeRO 1 and 2 could leave it out, 3
  cannot). DDP, ZeroRedundancyOptimizer and FSDP2 do not.
- The gradient's dtype: float32 when it travels and is summed with us, DDP, ZeroRedundancyOptimizer and FSDP2
  (`reduce_dtype`). DeepSpeed sends, sums and keeps bfloat16 by default, half the bytes; so it is here
  twice: with its default, and with float32.
- What is bfloat16: under autocast the matrix products are; with FSDP2, DeepSpeed and us every weight is in
  the forward pass. DeepSpeed's float32 master weights start from weights already rounded to bfloat16.
"""

import contextlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from llama import Batch

ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
Step = Callable[[Batch], Tensor | float]  # one optimizer step; returns the loss, this rank's own or the mean
Make = Callable[[nn.Module, int], Step]  # from a model with float32 weights and the number of ranks


@dataclass(frozen=True)
class Peer:
    """A contender that is not ours. `package` is what it needs beyond torch, where it does."""

    name: str
    make: Make
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def peers_of(stage: int) -> list[Peer]:
    """Peers that train with the memory of this ZeRO stage."""
    kept = Peer("FSDP2, parameters kept", fsdp2(reshard=False))
    resharded = Peer("FSDP2, resharded", fsdp2(reshard=True))
    both = [
        Peer(f"DeepSpeed {stage}", deepspeed_stage(stage, "bf16"), "deepspeed"),
        Peer(f"DeepSpeed {stage}, fp32 gradients", deepspeed_stage(stage, "fp32"), "deepspeed"),
    ]
    return {
        0: [Peer("torch DDP", ddp)],
        1: [Peer("ZeroRedundancyOptimizer", zero_redundancy), *both],
        2: [kept, *both],
        3: [kept, resharded, *both],
    }[stage]


def ddp(model: nn.Module, num_ranks: int) -> Step:
    """DDP with gradients as views of its buckets, autocast, fused AdamW. On one rank: plain torch."""
    optimizer = torch.optim.AdamW(groups(model), fused=True, **ADAMW)
    if num_ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return autocast_step(model, optimizer)


def zero_redundancy(model: nn.Module, _: int) -> Step:
    """DDP with ZeroRedundancyOptimizer. Without overlap_with_ddp: with it the first steps train nothing."""
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        groups(model), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
    )
    return autocast_step(model, optimizer)


def fsdp2(*, reshard: bool) -> Make:
    """A unit per block and one for the rest, bfloat16 compute, float32 reduction, fused AdamW.

    `reshard`: `reshard_after_forward`; without it the parameters stay whole until backward is done.
    """

    def make(model: nn.Module, num_ranks: int) -> Step:
        mesh = dist.init_device_mesh(next(model.parameters()).device.type, (num_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
        for block in model.model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(groups(model), fused=True, **ADAMW)

        def step(batch: Batch) -> Tensor:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    return make


def deepspeed_stage(stage: int, gradients: str) -> Make:
    """DeepSpeed with torch's own fused AdamW. `gradients`: in what they travel and are kept, bf16 or fp32."""

    def make(model: nn.Module, num_ranks: int) -> Step:
        optimizer = torch.optim.AdamW(groups(model), fused=True, **ADAMW)
        with _deepspeed(num_ranks) as deepspeed:
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=_deepspeed_config(stage, gradients),
                dist_init_required=False,
            )

        def step(batch: Batch) -> Tensor:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return make


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def autocast_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute: torch.dtype | None = torch.bfloat16
) -> Step:
    """A step of a model that returns its loss. `compute`: its dtype; None for the weights' own."""

    def step(batch: Batch) -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, compute, enabled=compute is not None):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _deepspeed_config(stage: int, gradients: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # nothing here reads it, but it must be there
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is 1.0
        "bf16": {"enabled": True},
        "communication_data_type": gradients,
        "data_types": {"grad_accum_dtype": gradients},
        "zero_allow_untested_optimizer": True,  # its own fused kernel would have to be compiled
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_param_persistence_threshold": 10_000,
        },
    }


@contextlib.contextmanager
def _deepspeed(num_ranks: int) -> Iterator[Any]:
    """The package, configured for ranks that are processes on this CPU, without output while it starts."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(num_ranks)}
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed  # noqa: PLC0415 - an optional peer, and it reads its environment when imported

        deepspeed.utils.logger.setLevel(logging.ERROR)
        # It would compile an operator for shared memory, which only inference uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield deepspeed
