"""Tensor parallelism on the grid's row x col axes (layers, norms, embeddings), and sequence parallelism."""

from plait.parallel.tensor.apply import ParallelLayers, apply_tp_plan
from plait.parallel.tensor.groups import TensorGroups
from plait.parallel.tensor.replicated import slice_head_arguments
from plait.parallel.tensor.rng import install_rng_streams

__all__ = ["ParallelLayers", "TensorGroups", "apply_tp_plan", "install_rng_streams", "slice_head_arguments"]
