"""plait trains PyTorch models that have outgrown one device."""

__version__ = "0.1.0"
