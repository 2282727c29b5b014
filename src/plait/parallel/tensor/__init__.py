"""Tensor parallelism on the grid's row x col axes: cut layers, norms, embeddings; sequence parallelism."""

from plait.parallel.tensor.groups import TensorGroups
from plait.parallel.tensor.install import CutLayers, cut_layers

__all__ = ["CutLayers", "TensorGroups", "cut_layers"]
