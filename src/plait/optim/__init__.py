"""Optimizers over flat storages and on full tensors, storage of their states, and gradient clipping."""
