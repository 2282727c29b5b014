"""The optimizer that scripts hold: one of torch for schedulers, which only the engine steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.engine.build import EngineParts
from plait.errors import CheckpointError, ConfigError, RunError

_SHARDS, _HAS_STATES = "shards", "has_states"  # keys of a state dict: what its states are of; on any rank


class EngineOptimizer(torch.optim.Optimizer):
    """The options and hooks of an engine's optimizer, and the states of this rank's shards.

    param_groups   the dicts of the real optimizer, so that schedulers and scripts set its options; `params`
                   are this rank's parameters of the model
    defaults       as of the optimizer's class
    """

    def __init__(self, parts: EngineParts, drop: Callable[[], object], rank: int) -> None:
        """`drop`: discards gradients that have been accumulated since the last update."""
        self._parts, self._real, self._drop, self._rank = parts, parts.optimizer.optimizer, drop, rank
        real = self._real
        self.__setstate__({"defaults": dict(real.defaults), "param_groups": real.param_groups})
        for group in real.param_groups:  # the stepper has noted the leaves, and sets those that it steps
            group["params"] = []
        for unit in parts.sharded.trained:
            for piece, parameter in zip(unit.layout.params, unit.parameters.values(), strict=True):
                if (index := unit.layout.group_of(piece)) is not None:
                    real.param_groups[index]["params"].append(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise RunError: it would be a second update."""
        raise RunError(
            "an engine steps its optimizer itself",
            given="engine.optimizer.step()" if closure is None else "engine.optimizer.step(closure)",
            expected="engine.step(batch), or engine.backward and engine.update, which update the weights",
            hint="leave the call out; parallelize(clip_norm=...) clips, and precision=fp16 scales the loss",
        )

    step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks: `stepping` runs them

    @contextmanager
    def stepping(self, *, skipped: bool) -> Iterator[None]:
        """Run the hooks of `register_step_pre_hook` and `register_step_post_hook` around a step's update."""
        self._opt_called = True  # torch's schedulers warn if they step before
        hooks: Any = () if skipped else self._optimizer_step_pre_hooks.values()
        for hook in hooks:
            hook(self, (), {})
        yield
        hooks = () if skipped else self._optimizer_step_post_hooks.values()
        for hook in hooks:
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
        raise RunError(
            "an engine's optimizer cannot be pickled or copied",
            given="engine.optimizer",
            expected="its states and options",
            hint="engine.save, or engine.optimizer.state_dict()",
        )

    def state_dict(self) -> dict[str, Any]:
        """The options of all groups and the states of this rank's shards, not copied: for `load_state_dict`
        of the same rank under the same plan. Weights and the number of steps are in `engine.state()` only."""
        self._check_local()
        chunked = self._parts.optimizer.chunked
        return {
            "state": {index: chunked.state(leaf) for index, leaf in enumerate(chunked.leaves)},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            _SHARDS: self._shards(),
            _HAS_STATES: self._parts.optimizer.has_states,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises CheckpointError, before anything changes, for that of
        another rank, plan, model or optimizer."""
        self._check_local()
        chunked, shards = self._parts.optimizer.chunked, self._shards()
        found = state_dict.get(_SHARDS) if isinstance(state_dict, Mapping) else None
        if found != shards:
            raise CheckpointError(
                "the state dict is not of this engine's optimizer",
                given=f"that of {found[0] if found else 'another optimizer'}",
                expected=shards[0],
                hint="engine.save and engine.load, which work from any plan to any other",
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in saved.items():
                if isinstance(present := group.get(key), Tensor):
                    present.fill_(value)  # a captured graph may read it
                else:
                    group[key] = value
        for index, leaf in enumerate(chunked.leaves):
            state = state_dict["state"][index]
            chunked.load(leaf, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
        self._parts.optimizer.has_states = state_dict[_HAS_STATES]

    def _check_local(self) -> None:
        if self._parts.context.plan.num_servers:
            raise ConfigError(
                "the optimizer's states are on the parameter servers",
                given="a state dict of engine.optimizer",
                expected="a plan without servers",
                hint="engine.save and engine.load",
            )

    def _shards(self) -> list[str]:
        """This rank and plan, then what this rank's states are of."""
        optimizer = self._parts.optimizer
        flat = [
            f"{unit.layout.name}: {[shard.name for shard in unit.layout.params]} {part.start}:{part.stop}"
            for unit, parts in optimizer.slices.items()
            for part in parts
        ]
        full = [f"{each.name}: {each.shape}" for each in optimizer.full.owned]
        kind = f"{type(self._real).__name__} with {len(self.param_groups)} groups"
        return [f"rank {self._rank} of {self._parts.context.plan}", kind, *flat, *full]
