"""The optimizer that scripts hold: one of torch for schedulers, which only the engine steps; and the
hyper-parameters of its groups, as numbers in a checkpoint.

[Note: saved hyper-parameters]
They are restored as by torch's `load_state_dict`, so that a scheduler continues where it stopped: it computes
the next learning rate from the current one. Every option of a group that is a number, or a tuple of numbers,
is saved (lr, betas, weight_decay, and initial_lr or max_lr, which schedulers add), by keys such as `0.lr` and
`1.betas.0`.
"""

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.engine.build import EngineParts
from plait.engine.usage_checks import not_copyable
from plait.errors import CheckpointError, ConfigError, RunError, shown
from plait.parallel.zero.state_io import not_engine_state
from plait.plan import Plan

_KEY = re.compile(r"(?P<group>\d+)\.(?P<option>\w+)(?:\.(?P<index>\d+))?")
# They choose a kernel: they depend on the device, not on the training.
_KERNELS = ("fused", "foreach", "capturable", "differentiable")
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class EngineOptimizer(torch.optim.Optimizer):
    """The options and hooks of an engine's optimizer, and the states of this rank's shards.

    param_groups   the dicts of the real optimizer, so that schedulers and scripts set its options; `params`
                   are this rank's parameters of the model
    defaults       as of the optimizer's class
    """

    def __init__(self, parts: EngineParts, plan: Plan, rank: int, drop: Callable[[], object]) -> None:
        """`drop`: discards gradients that have been accumulated since the last update."""
        self._parts, self._plan, self._rank, self._drop = parts, plan, rank, drop
        self._real = parts.optimizer.optimizer
        real = self._real
        self.__setstate__({"defaults": dict(real.defaults), "param_groups": real.param_groups})
        for group in real.param_groups:  # the stepper has noted the leaves, and sets those that it steps
            group["params"] = []
        for unit in parts.sharded.trained:
            for shard, parameter in zip(unit.layout.params, unit.parameters.values(), strict=True):
                if (index := unit.layout.group_of(shard)) is not None:
                    real.param_groups[index]["params"].append(parameter)
        self._given = [(group["params"], [*group["params"]]) for group in real.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise RunError: it would be a second update."""
        raise RunError(
            "an engine steps its optimizer itself",
            given="engine.optimizer.step()" if closure is None else "engine.optimizer.step(closure)",
            expected="engine.step(batch), or engine.backward and engine.update, which update the weights",
            hint="leave the call out; parallelize(clip_norm=...) clips, and precision=fp16 scales the loss",
        )

    def check(self) -> None:
        """Raise ConfigError for an unusable option, and if a script has changed which parameters are in which
        group: shards are laid out by groups. A group may be another dict with the same list of parameters."""
        groups = [group.get("params") for group in self.param_groups]
        are_given = self.param_groups is self._real.param_groups and len(groups) == len(self._given)
        if not are_given or any(
            own is not given or len(own) != len(parameters)
            for own, (given, parameters) in zip(groups, self._given, strict=True)
        ):
            raise ConfigError(
                "the groups of an engine's optimizer have been exchanged",
                given=f"{len(groups)} groups in param_groups, which have other parameters or another order",
                expected="the groups of parallelize, of which options may change",
                hint="param_groups[i]['lr'] = ...; or parallelize(param_groups=[...]) with these groups",
            )
        check_hyperparameters(self)

    step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks: `stepping` runs them

    @contextmanager
    def stepping(self, *, skipped: bool) -> Iterator[None]:
        """Run the hooks of `register_step_pre_hook` and `register_step_post_hook` around a step's update."""
        self._opt_called = True  # torch's schedulers warn if they step before
        for hook in () if skipped else self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        yield
        for hook in () if skipped else self._optimizer_step_post_hooks.values():
            hook(self, (), {})

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop the gradients that have been accumulated since the last update, as `engine.discard_step`."""
        self._drop()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Raise ConfigError."""
        raise ConfigError(
            "an engine's optimizer takes no further parameters",
            given="add_param_group after parallelize",
            expected="groups that are known when the shards are laid out",
            hint="parallelize(param_groups=[...]) with all groups; lr=0 for one that is to wait",
        )

    @property
    def state(self) -> NoReturn:  # type: ignore[override]
        """Raise RunError: states are of shards, not of parameters."""
        raise RunError(
            "an engine's optimizer has no states by parameter",
            given="engine.optimizer.state",
            expected="states of this rank's shards, which no parameter has",
            hint="engine.state(): full states by name, such as 'exp_avg/<parameter>'",
        )

    def __reduce__(self) -> NoReturn:
        raise not_copyable()

    def state_dict(self) -> dict[str, Any]:
        """The options of all groups and the states of this rank's shards, not copied: for `load_state_dict`
        of the same rank under the same plan. Weights and the number of steps are in `engine.state()` only."""
        chunked = self._parts.optimizer.chunked
        return {
            "state": {index: chunked.state(leaf) for index, leaf in enumerate(chunked.leaves)},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "shards": self._shards(),
            "has_states": self._parts.optimizer.has_states,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises CheckpointError, before anything changes, for that of
        another rank, plan, model or optimizer."""
        chunked, expected = self._parts.optimizer.chunked, self._shards()
        if (given := dict(state_dict).get("shards")) != expected:
            raise CheckpointError(
                "the state dict is not of this engine's optimizer",
                given=given or "of another optimizer",
                expected=expected,
                hint="engine.save and engine.load, which work from any plan to any other",
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in saved.items():
                _set_option(group, key, value)
        for index, leaf in enumerate(chunked.leaves):
            chunked.load(leaf, copy.deepcopy(state_dict["state"][index]))
        self._parts.optimizer.has_states = state_dict["has_states"]

    def _shards(self) -> str:
        """The plan, rank and shards that the states are of. Raises PlanError if servers have them."""
        self._plan.check_no_servers("optimizer.state_dict")
        kind = f"{type(self._real).__name__} with {len(self.param_groups)} groups"
        digest = hashlib.sha256(repr(self._parts.layout).encode()).hexdigest()[:16]
        return f"{kind}, rank {self._rank} of {self._plan}, shards {digest}"


def options_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The options of all groups, by key: see [Note: saved hyper-parameters]."""
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
        else:
            _set_option(group, match["option"], value)
    for (number, option), entries in tuples.items():
        optimizer.param_groups[number][option] = tuple(entries[index] for index in sorted(entries))


def _set_option(group: dict[str, Any], option: str, value: Any) -> None:
    if isinstance(present := group.get(option), Tensor):
        present.fill_(value)  # a captured graph may read it
    else:
        group[option] = value


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
        raise not_engine_state(f"param_groups.{key}", "param_groups.0.lr")
    return match
