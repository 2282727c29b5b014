"""Tensor parallelism on the grid's row x col axes (layers, norms, embeddings), and sequence parallelism."""
