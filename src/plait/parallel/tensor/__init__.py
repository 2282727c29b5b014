"""Tensor parallelism on the grid's row x col axes: cut layers, norms, embeddings; sequence parallelism."""

from plait.parallel.tensor.apply import ParallelLayers, apply_tp_plan
from plait.parallel.tensor.groups import TensorGroups
from plait.parallel.tensor.replicated import take_own_heads
from plait.parallel.tensor.rng import zone_randomness

__all__ = ["ParallelLayers", "TensorGroups", "apply_tp_plan", "take_own_heads", "zone_randomness"]
