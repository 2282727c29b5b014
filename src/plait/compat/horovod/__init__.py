"""Horovod's interface for PyTorch: `import plait.compat.horovod as hvd`, for `import horovod.torch as hvd`.

The same program runs on torchrun, `mpirun` or `srun`. Every public name of horovod.torch 0.28 exists. What
cannot be had (Adasum, process sets, timelines) raises CompatError when it is used.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from plait.compat.horovod import elastic
from plait.compat.horovod.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    job,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from plait.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from plait.compat.horovod.optimizer import DistributedOptimizer
from plait.compat.horovod.verbs import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    global_process_set,
    grouped,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from plait.errors import CommError, CompatError
from plait.parallel.all_samples import SyncedBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "job",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

HorovodInternalError = CommError

grouped_allreduce, grouped_allreduce_ = grouped(allreduce), grouped(allreduce_)
grouped_allreduce_async, grouped_allreduce_async_ = grouped(allreduce_async), grouped(allreduce_async_)
grouped_allgather, grouped_allgather_async = grouped(allgather), grouped(allgather_async)
grouped_reducescatter, grouped_reducescatter_async = grouped(reducescatter), grouped(reducescatter_async)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of all ranks, for inputs (B, C, ...)."""

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.ndim >= 2, f"BatchNorm of a tensor of {x.ndim} dims"

    def forward(self, x: Tensor) -> Tensor:
        return SyncedBatchNorm(super().forward, job().group)(self, x)


def _refusal(name: str, hint: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise CompatError(
            f"hvd.{name} is not supported",
            given=f"a call of {name}",
            expected="a program without it",
            hint=hint,
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


ProcessSet = _refusal("ProcessSet", "hvd.global_process_set")
add_process_set = _refusal("add_process_set", "hvd.global_process_set")
remove_process_set = _refusal("remove_process_set", "hvd.global_process_set")
start_timeline = _refusal("start_timeline", "torch.profiler")
stop_timeline = _refusal("stop_timeline", "torch.profiler")
sparse_allreduce_async = _refusal("sparse_allreduce_async", "tensor.to_dense() and hvd.allreduce_async")


def _says(name: str, answer: bool) -> Any:
    def says() -> bool:
        return answer

    says.__name__ = says.__qualname__ = name
    return says


_no = ("mpi_threads_supported", "mpi_enabled", "mpi_built", "ddl_built", "ccl_built")
mpi_threads_supported, mpi_enabled, mpi_built, ddl_built, ccl_built = (_says(name, False) for name in _no)
gloo_enabled, gloo_built = _says("gloo_enabled", True), _says("gloo_built", True)
nccl_built = _says("nccl_built", torch.version.cuda is not None)
cuda_built = _says("cuda_built", torch.version.cuda is not None)
rocm_built = _says("rocm_built", torch.version.hip is not None)
