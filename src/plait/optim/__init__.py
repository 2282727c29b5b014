"""Optimizers over flat storages, and clipping."""

from plait.optim.clip import clip_factor, squared_norm
from plait.optim.flat import FlatSlice, make_optimizer, scaled_step, state_kinds, states_per_element

__all__ = [
    "FlatSlice",
    "clip_factor",
    "make_optimizer",
    "scaled_step",
    "squared_norm",
    "state_kinds",
    "states_per_element",
]
