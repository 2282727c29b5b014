"""Pipelines: what travels between stages, backwards in halves, and the executor of schedules."""

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
