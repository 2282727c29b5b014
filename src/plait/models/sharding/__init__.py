"""Tensor-parallel sharding of a model's layers: plans by architecture, by rules and by hand."""
