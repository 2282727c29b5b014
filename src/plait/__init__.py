"""plait trains PyTorch models that have outgrown one device."""

from plait.engine import Engine, EvalResult, StepResult, parallelize
from plait.errors import PlaitError
from plait.plan import Plan

__version__ = "0.1.0"

__all__ = ["Engine", "EvalResult", "PlaitError", "Plan", "StepResult", "__version__", "parallelize"]
