"""The engine: a plan, a model and an optimizer as something with .step()."""
