"""Hyper-parameters of an optimizer's groups, as numbers in a checkpoint.

They are restored as by torch's `load_state_dict`, so that a scheduler continues where it stopped: it computes
the next learning rate from the current one. Every option of a group that is a number, or a tuple of numbers,
is saved (lr, betas, weight_decay, and initial_lr or max_lr, which schedulers add), by keys such as `0.lr` and
`1.betas.0`.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from plait.errors import CheckpointError, ConfigError, shown

_KEY = re.compile(r"(?P<group>\d+)\.(?P<option>\w+)(?:\.(?P<index>\d+))?")
# They choose a kernel: they depend on the device, not on the training.
_KERNELS = ("fused", "foreach", "capturable", "differentiable")
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def options_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The options of all groups, by key."""
    state = {}
    for number, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option in ("params", *_KERNELS):
                continue
            is_tuple = isinstance(value, tuple | list)
            numbers = [_number(entry) for entry in (value if is_tuple else [value])]
            if numbers and None not in numbers:
                for index, entry in enumerate(numbers):
                    key = f"{number}.{option}.{index}" if is_tuple else f"{number}.{option}"
                    state[key] = torch.tensor(entry, dtype=_DTYPES[type(entry)])
    return state


def check_hyperparameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if an option of a group is not finite and at least 0, where its default is: torch
    checks options only when it builds the optimizer. Tensors on a GPU are not read, which would synchronize
    with it."""
    for number, group in enumerate(optimizer.param_groups):
        for option, default in optimizer.defaults.items():
            expected = _real_numbers(default)
            if not expected or not all(map(_is_sound, expected)):
                continue
            value = group.get(option)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                continue
            is_tuple = isinstance(value, tuple | list)
            numbers = _real_numbers(value) if is_tuple == isinstance(default, tuple | list) else []
            if len(numbers) != len(expected) or not all(map(_is_sound, numbers)):
                raise ConfigError(
                    f"the optimizer cannot step with this {option}",
                    given=f"param_groups[{number}][{option!r}] = {shown(value)}",
                    expected="finite numbers of 0 or more",
                    hint=f"param_groups[{number}][{option!r}] = {default}",
                )


def _real_numbers(value: object) -> list[Any]:
    """The value, or the entries of a tuple; [] if one is not a real number."""
    entries = value if isinstance(value, tuple | list) else [value]
    numbers = [
        entry.item() if isinstance(entry, Tensor) and entry.numel() == 1 else entry for entry in entries
    ]
    is_real = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    return numbers if is_real else []


def _is_sound(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def check_options(optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> None:
    """Raise CheckpointError if options are saved of another number of groups than the optimizer has."""
    saved, present = {int(_match(key)["group"]) for key in keys}, len(optimizer.param_groups)
    if saved and saved != set(range(present)):
        raise CheckpointError(
            "the checkpoint is of another optimizer",
            given=f"{len(saved)} param_groups, here {present}",
            expected="the param_groups that it was saved with",
            hint="weights_only=True loads only the weights",
        )


def load_options(
    optimizer: torch.optim.Optimizer, keys: Iterable[str], read: Callable[[str], Tensor]
) -> None:
    """Set the options with these keys. Others keep their values. Call `check_options` before."""
    tuples: dict[tuple[int, str], dict[int, Any]] = {}
    for key in keys:
        match, value = _match(key), read(key).item()
        group = optimizer.param_groups[int(match["group"])]
        if match["index"] is not None:
            tuples.setdefault((int(match["group"]), match["option"]), {})[int(match["index"])] = value
        elif isinstance(present := group.get(match["option"]), Tensor):
            present.fill_(value)  # a captured graph may read it
        else:
            group[match["option"]] = value
    for (number, option), entries in tuples.items():
        optimizer.param_groups[number][option] = tuple(entries[index] for index in sorted(entries))


def _number(value: object) -> bool | int | float | None:
    """The value as a Python number; None if it is not a number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, int) and abs(value) >= 2**63:
        return float(value) if abs(value) < 2**1023 else None
    return value if isinstance(value, bool | int | float) else None


def _match(key: str) -> re.Match[str]:
    """The parts of a key. Raises CheckpointError."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise CheckpointError(
            "this is not the state of an engine",
            given=f"param_groups.{key}",
            expected="param_groups.0.lr",
            hint="engine.state(), or the files of engine.save",
        )
    return match
