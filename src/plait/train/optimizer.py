"""The optimizer and the learning rate schedule of a recipe, as objects of torch and transformers.

Apart from `config.py`, so that a recipe is read and most of its mistakes are reported without torch; and from
`model.py`, as schedules import what commands without an optimizer do not need.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from plait.errors import ConfigError, nearest
from plait.models import (
    default_groups,
)
from plait.optim.adamw_8bit import AdamW8bit
from plait.optim.lion_lamb import LAMB, Lion
from plait.optim.update_kinds import DEFAULT_GROUPS, GroupOptimizer
from plait.train.sections import OptimizerConfig, ScheduleConfig


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    return _class_named(config.name)


def _class_named(name: str) -> type[torch.optim.Optimizer]:
    own: dict[str, type[torch.optim.Optimizer]] = {"AdamW8bit": AdamW8bit, "LAMB": LAMB, "Lion": Lion}
    return own.get(name) or typing.cast(type[torch.optim.Optimizer], getattr(torch.optim, name))


def check_optimizer_args(config: OptimizerConfig) -> None:
    """Check the arguments against the classes in torch. Raises ConfigError."""
    named = [(config.name, config.args, "optimizer.args")]
    named += [
        (group.name, group.args, f"optimizer.groups.{index}.args")
        for index, group in enumerate(config.groups)
        if group.name is not None
    ]
    for name, args, key_of_args in named:
        known = set(inspect.signature(_class_named(name)).parameters) - {"params"}
        for key in args:
            if key not in known:
                raise ConfigError(
                    f"{name} has no argument {key!r}",
                    given=f"{key_of_args}.{key}",
                    expected=", ".join(sorted(known)),
                    hint=nearest(key, known) or "remove it",
                )
    # Runs a step on a tiny parameter: torch rejects some arguments only then.
    groups = _group_options(config)
    for group in GroupOptimizer.of_groups(optimizer_class(config), config.torch_args(), groups):
        group.state_shapes((2, 2))


def param_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]] | None:
    """Return the groups of the model's trainable parameters, for `parallelize`; None: the default groups.

    Raises ConfigError for a pattern that no parameter is left for.
    """
    if not config.groups:
        return None
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group_of = default_groups(model)
    free = dict.fromkeys(named)  # in the model's order
    for index, group in enumerate(config.groups, start=len(DEFAULT_GROUPS)):
        matches = [name for name in free if fnmatchcase(name, group.match)]
        if not matches:
            raise _unmatched(config, group.match, list(named))
        for name in matches:
            group_of[name] = index
            del free[name]
    return [
        {"params": [parameter for name, parameter in named.items() if group_of[name] == index], **options}
        for index, options in enumerate(_group_options(config))
    ]


def _group_options(config: OptimizerConfig) -> list[Mapping[str, Any]]:
    groups: list[Mapping[str, Any]] = [*DEFAULT_GROUPS]
    for group in config.groups:
        options: dict[str, Any] = group.options()
        if group.name is not None:  # `config.args` are for another class
            shared = {"lr": config.lr, "weight_decay": config.weight_decay}
            options = {"optimizer": _class_named(group.name), **group.args, **shared, **options}
        groups.append(options)
    return groups


def _unmatched(config: OptimizerConfig, pattern: str, names: list[str]) -> ConfigError:
    patterns = [group.match for group in config.groups]
    earlier = patterns[: patterns.index(pattern)]
    taken = next((name for name in names if fnmatchcase(name, pattern)), None)
    if taken is not None:
        first = next(other for other in earlier if fnmatchcase(taken, other))
        return ConfigError(
            "earlier groups contain all parameters that a pattern matches",
            given=f"optimizer.groups: match = {pattern!r}, after {first!r}",
            expected="narrow patterns before wide ones: the first match counts",
            hint=f"the group of {pattern!r} before that of {first!r}",
        )
    # The nearest pattern: a name, or its last parts, without the numbers of layers.
    known: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        known |= dict.fromkeys([".".join(parts), *(f"*.{'.'.join(parts[i:])}" for i in range(1, len(parts)))])
    return ConfigError(
        "a pattern matches no trainable parameter",
        given=f"optimizer.groups: match = {pattern!r}",
        expected=f"a name such as {names[-1]}, in which * means any text",
        hint=nearest(pattern, known) or names[-1],
    )


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
