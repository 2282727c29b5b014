"""Optimizers over flat storages, storage of their states, gradient clipping, and the loss scale."""

from plait.optim.clip import NORM_BLOCK, clip_factor, clip_values, squared_norm
from plait.optim.flat import (
    DEFAULT_GROUPS,
    FlatSlice,
    make_optimizer,
    scaled_step,
    state_kinds,
    states_per_element,
)
from plait.optim.mapped import MappedFile, mapped_bytes
from plait.optim.scale import LossScale
from plait.optim.stepper import CHUNK, ChunkedOptimizer

__all__ = [
    "CHUNK",
    "DEFAULT_GROUPS",
    "NORM_BLOCK",
    "ChunkedOptimizer",
    "FlatSlice",
    "LossScale",
    "MappedFile",
    "clip_factor",
    "clip_values",
    "make_optimizer",
    "mapped_bytes",
    "scaled_step",
    "squared_norm",
    "state_kinds",
    "states_per_element",
]
