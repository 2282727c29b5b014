"""Pipelines: what travels between stages, backwards in halves, and the executor of schedules."""

from plait.parallel.pipeline.halves import split_linears
from plait.parallel.pipeline.parcel import Parcel, pack, unpack
from plait.parallel.pipeline.run import Pipeline

__all__ = ["Parcel", "Pipeline", "pack", "split_linears", "unpack"]
