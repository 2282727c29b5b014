"""Pipeline parallelism: the executor of schedules, point-to-point channels, and split backwards."""

from plait.parallel.pipeline.executor import Pipeline, StageInput
from plait.parallel.pipeline.serialize import PackedOutput, pack, unpack
from plait.parallel.pipeline.split_backward import BackwardSplitter, DeferredBytes, split_linears

__all__ = [
    "BackwardSplitter",
    "DeferredBytes",
    "PackedOutput",
    "Pipeline",
    "StageInput",
    "pack",
    "split_linears",
    "unpack",
]
