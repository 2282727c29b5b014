"""Optimizers over flat storages, and clipping."""

from plait.optim.clip import clip_factor, squared_norm
from plait.optim.flat import FlatSlice, make_optimizer, scaled_step, states_per_element

__all__ = [
    "FlatSlice",
    "clip_factor",
    "make_optimizer",
    "scaled_step",
    "squared_norm",
    "states_per_element",
]
