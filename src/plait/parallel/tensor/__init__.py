"""Tensor parallelism on the grid's row x col axes: cut layers, norms, embeddings; sequence parallelism."""

from plait.parallel.tensor.random import zone_randomness

__all__ = ["zone_randomness"]
