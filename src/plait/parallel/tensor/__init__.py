"""Tensor parallelism on the grid's row x col axes: cut layers, norms, embeddings; sequence parallelism."""

from plait.parallel.tensor.apply import CutLayers, cut_layers
from plait.parallel.tensor.groups import TensorGroups
from plait.parallel.tensor.replicated import take_own_heads
from plait.parallel.tensor.rng import zone_randomness

__all__ = ["CutLayers", "TensorGroups", "cut_layers", "take_own_heads", "zone_randomness"]
