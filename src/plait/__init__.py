"""plait trains PyTorch models that have outgrown one device.

`parallelize(model, plan)` returns an `Engine`; `launch(function, ranks)` runs a function on local ranks.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.api import parallelize
    from plait.comm.launch_function import launch
    from plait.data.documents import PaddingCollator
    from plait.engine.distillation import with_teacher
    from plait.engine.engine import Engine
    from plait.engine.generation import Conversation, Generated
    from plait.engine.preferences import with_reference
    from plait.engine.totals import EvalResult, StepResult
    from plait.errors import DDPError, PlaitError
    from plait.models import Chain
    from plait.models.attention import attention
    from plait.optim.adamw_8bit import AdamW8bit
    from plait.optim.lion_lamb import LAMB, Lion
    from plait.parallel.all_samples import all_gather
    from plait.parallel.ddp import DistributedDataParallel
    from plait.plan import Plan
    from plait.plan.distillation import Distillation
    from plait.plan.loss_scaling import LossScaling
    from plait.plan.preference import Preference
    from plait.plan.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "AdamW8bit",
    "Chain",
    "Conversation",
    "DDPError",
    "Distillation",
    "DistributedDataParallel",
    "Engine",
    "EvalResult",
    "Generated",
    "Lion",
    "LossScaling",
    "PaddingCollator",
    "PlaitError",
    "Plan",
    "Preference",
    "Sampling",
    "StepResult",
    "__version__",
    "all_gather",
    "attention",
    "launch",
    "parallelize",
    "with_reference",
    "with_teacher",
]

# Imported on first use: torch takes a second that the launcher, plans and help texts do not need.
_HOMES = {
    "Chain": "plait.models",
    "DDPError": "plait.errors",
    "DistributedDataParallel": "plait.parallel.ddp",
    "Engine": "plait.engine.engine",
    "EvalResult": "plait.engine.totals",
    "Conversation": "plait.engine.generation",
    "Generated": "plait.engine.generation",
    "StepResult": "plait.engine.totals",
    "AdamW8bit": "plait.optim.adamw_8bit",
    "LAMB": "plait.optim.lion_lamb",
    "Lion": "plait.optim.lion_lamb",
    "LossScaling": "plait.plan.loss_scaling",
    "launch": "plait.comm.launch_function",
    "all_gather": "plait.parallel.all_samples",
    "attention": "plait.models.attention",
    "PaddingCollator": "plait.data.documents",
    "parallelize": "plait.api",
    "PlaitError": "plait.errors",
    "Plan": "plait.plan",
    "Distillation": "plait.plan.distillation",
    "Preference": "plait.plan.preference",
    "Sampling": "plait.plan.sampling",
    "with_reference": "plait.engine.preferences",
    "with_teacher": "plait.engine.distillation",
}


if not TYPE_CHECKING:  # a type checker that saw it would take any name for one of the package

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'plait' has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib", "_HOMES"})
