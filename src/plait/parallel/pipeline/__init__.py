"""Pipelines: what travels between stages, backwards in halves, and the executor of schedules."""

from plait.parallel.pipeline.arrival import Arrival
from plait.parallel.pipeline.halves import Halves, RestBytes, split_linears
from plait.parallel.pipeline.parcel import Parcel, pack, unpack
from plait.parallel.pipeline.run import Pipeline

__all__ = ["Arrival", "Halves", "Parcel", "Pipeline", "RestBytes", "pack", "split_linears", "unpack"]
