"""Pipelines: what travels between stages, backwards in halves, and the executor of schedules."""

from plait.parallel.pipeline.executor import Arrival, Pipeline
from plait.parallel.pipeline.serialize import Parcel, pack, unpack
from plait.parallel.pipeline.split_backward import Halves, RestBytes, split_linears

__all__ = ["Arrival", "Halves", "Parcel", "Pipeline", "RestBytes", "pack", "split_linears", "unpack"]
