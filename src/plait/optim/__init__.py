"""Optimizers over flat storages, storage of their states, gradient clipping, and the loss scale."""
