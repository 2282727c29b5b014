"""The optimizer and the learning rate schedule of a recipe, as objects of torch and transformers.

Apart from `config.py`, so that a recipe is read and most of its mistakes are reported without torch.
"""

import inspect
import typing
from collections.abc import Callable

import torch
from transformers import get_scheduler

import plait.optim.lion
from plait.errors import ConfigError, unknown_key_hint
from plait.optim.flat import states_per_element
from plait.train.config import OptimizerConfig, ScheduleConfig


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    home = plait.optim.lion if config.name == "Lion" else torch.optim
    return typing.cast(type[torch.optim.Optimizer], getattr(home, config.name))


def check_optimizer_args(config: OptimizerConfig) -> None:
    """Check `optimizer.args` against the class in torch. Raises ConfigError."""
    known = set(inspect.signature(optimizer_class(config)).parameters) - {"params"}
    for key in config.args:
        if key not in known:
            raise ConfigError(
                f"{config.name} has no argument {key!r}",
                given=f"optimizer.args.{key}",
                hint=unknown_key_hint(key, known),
            )
    # Runs a step on a tiny parameter: torch rejects some arguments only then.
    states_per_element(optimizer_class(config), config.torch_args())


def lr_lambda(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return the factor of optimizer.lr as a pure function of the step number, 0 to `steps` - 1."""
    name = "constant_with_warmup" if config.name == "constant" else config.name
    specific: dict[str, dict[str, object]] = {
        "cosine_with_restarts": {"num_cycles": config.cycles},
        "polynomial": {"power": config.power, "lr_end": 0.0},
        "inverse_sqrt": {"timescale": config.timescale},
        "warmup_stable_decay": {"num_decay_steps": config.decay, "decay_type": config.decay_type},
    }
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # only needed to build the scheduler
    scheduler = get_scheduler(name, unused, config.warmup, steps, specific.get(name))
    to_zero = typing.cast(Callable[[int], float], scheduler.lr_lambdas[0])
    if not config.min_lr_ratio:
        return to_zero
    # As transformers' schedules with a minimum compute it, but warmup always starts at 0.
    floor = config.min_lr_ratio
    return lambda step: to_zero(step) if step < config.warmup else to_zero(step) * (1 - floor) + floor
