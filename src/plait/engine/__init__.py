"""The engine: trains a model under a plan, with `.step()`."""
