"""The adapters of an engine's model: switched off, switched, saved and loaded.

[Note: adapters in checkpoints]
If the engine knows where the frozen base came from (a folder given as `weights=`, or a seed), its state is
that of the trained tensors, and a checkpoint records the base's identity instead of the base: see
[Note: identity of a base] in checkpoint/base.py. A base whose values came with the model is unknown, and is
saved: the checkpoint would otherwise be incomplete. A source may lack the base, or all of an adapter: what it
lacks keeps its values.

[Note: trained adapters]
Units are built for the parameters that require a gradient when `parallelize` is called: those of the adapters
that are active then. Another one can be switched on for outputs and evaluations. A step under it would update
the trained one with zeros, so it is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from plait.checkpoint import Checkpoint, HuggingFaceFiles
from plait.checkpoint.adapter_files import (
    adapter_folder,
    check_same_function,
    read_adapter,
    read_adapter_config,
    write_adapter,
)
from plait.checkpoint.base import adapter_configs, check_same_base, identity_of_files, identity_of_seed
from plait.comm import World, raise_on_all
from plait.engine.spec import Arguments
from plait.errors import CheckpointError, ModelError, PlaitError, PlanError, RunError
from plait.fileio import to_path
from plait.models import config_of_model
from plait.models.adapters import AdapterFacts, adapter_layers, disabled
from plait.parallel.zero.state_io import StateShard, collect_shards

if TYPE_CHECKING:
    from plait.engine.build import EngineParts


class EngineAdapters:
    """The adapters of a model that PEFT has wrapped; of any other model, none.

    facts   None for models without a wrapper
    base    the identity of the frozen base, as JSON; None if it is unknown
    frozen  keys of the weights that a checkpoint does not hold; empty if `base` is None
    active  the adapters that the model computes with
    """

    def __init__(self, model: nn.Module, given: Arguments) -> None:
        """`model`: before it is sharded. Raises CheckpointError."""
        self.facts = AdapterFacts.from_model(model)
        self.base: dict[str, Any] | None = None
        self.frozen: frozenset[str] = frozenset()
        self.active: tuple[str, ...] = ()
        self._is_off = False
        self._is_served = given.plan.num_servers > 0
        self._modules: list[nn.Module] = [model]
        if self.facts is None:
            return
        self.active = self.facts.trained
        if given.weights is not None:
            self.base = identity_of_files(HuggingFaceFiles.open(Path(given.weights)))
        elif all(parameter.is_meta for parameter in model.parameters()):
            self.base = identity_of_seed(given.seed, config_of_model(model))
        if self.base is not None:
            self.base |= {} if given.plan.base == "none" else {"format": given.plan.base}
            frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
            self.frozen = frozenset(f"weights/{name}" for name in frozen & self.facts.base)

    def watch(self, parts: "EngineParts") -> None:
        """Use the modules of the stages that this rank holds."""
        self._modules = [stage.module_part.module for stage in parts.stages.values()]

    @property
    def in_use(self) -> tuple[str, ...]:
        """The adapters that the model computes with now: none within `off`."""
        return () if self._is_off else self.active

    def checkpoint_facts(self) -> dict[str, Any]:
        """The facts that a checkpoint records of the adapters; {} for other models."""
        if self.facts is None:
            return {}
        return {"adapter": dict(self.facts.configs), **({} if self.base is None else {"base": self.base})}

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        for module in self._modules:
            yield from adapter_layers(module)

    def check_can_train(self) -> None:
        """Raise ModelError unless the adapters that the units were built for are on."""
        if self.facts is not None and (self._is_off or self.active != self.facts.trained):
            raise ModelError(
                "a step needs the adapters that are trained",
                given="adapters_off()" if self._is_off else f"the adapter {', '.join(self.active)}",
                expected=f"{', '.join(self.facts.trained)}, active when parallelize was called",
                hint="the step after the context"
                if self._is_off
                else f"engine.set_adapter({self.facts.trained[0]!r})",
            )

    @contextmanager
    def off(self, micros_done: int = 0) -> Iterator[None]:
        """Compute without adapters in the context. `micros_done`: of a step that has begun. Raises PlanError
        within a step, ModelError if the model without adapters is not the base."""
        _check_between_steps("adapters_off", micros_done)
        configs = {} if self.facts is None else self.facts.configs
        for name, config in configs.items():
            if config.get("bias", "none") != "none":
                raise ModelError(
                    "trained biases are no adapters, and cannot be switched off",
                    given=f"adapter {name} with bias={config['bias']!r}",
                    expected="bias='none', the default",
                    hint="bias='none', or lora_bias=True for biases of the adapter's own",
                )
        was, self._is_off = self._is_off, True
        try:
            with disabled(self._layers()):
                yield
        finally:
            self._is_off = was

    def use(self, adapter: str, micros_done: int = 0) -> None:
        """Compute with this adapter. Raises PlanError within a step, ModelError for an unknown adapter."""
        _check_between_steps("set_adapter", micros_done)
        self._check_known(adapter)
        for _, layer in self._layers():
            layer._active_adapter = [adapter]  # type: ignore[assignment]
        self.active = (adapter,)

    def _check_known(self, adapter: str | None) -> str:
        """Return the name, by default of the first trained adapter. Raises ModelError for an unknown one."""
        if self.facts is None:
            raise ModelError(
                "the model has no adapters",
                given="a model that PEFT has not wrapped",
                expected="a model of peft.get_peft_model",
                hint="peft.get_peft_model(model, peft.LoraConfig(target_modules='all-linear'))",
            )
        if adapter is None:
            return self.facts.trained[0]
        if adapter not in self.facts.configs:
            raise ModelError(
                "the model has no adapter of this name",
                given=repr(adapter),
                expected=" or ".join(self.facts.configs),
                hint=repr(self.facts.trained[0]),
            )
        return adapter

    def check(self, saved: Checkpoint) -> None:
        """Raise CheckpointError for a checkpoint of another base, or of adapters that compute otherwise."""
        check_same_base(saved, self.base)
        for name, config in adapter_configs(saved).items() if self.facts is not None else ():
            if self.facts is not None and name in self.facts.configs:
                check_same_function(saved.path, config, self.facts.configs[name])

    def kept(self, saved: Mapping[str, Any], *, weights_only: bool) -> frozenset[str]:
        """The keys of weights that a source of these keys leaves as they are: of the base, or of adapters,
        if it has none of them. See [Note: adapters in checkpoints]."""
        if self.facts is None:
            return frozenset()
        groups = [frozenset(f"weights/{name}" for name in keys) for keys in self.facts.keys.values()]
        kept = set[str]()
        if self.frozen.isdisjoint(saved) and not all(group.isdisjoint(saved) for group in groups):
            kept |= self.frozen
        copies = {f"weights/{name}" for name in self.facts.plain}  # of the base's values, in its files
        derived = {key for key in saved if ".lora_magnitude_vector." in key}  # of the base's weights
        for group in groups if weights_only else ():
            own = group - copies
            kept |= own - derived if (own - derived).isdisjoint(saved) else set()
            kept |= group if group.isdisjoint(saved) else set()
        return frozenset(kept)

    def save(
        self, folder: str | Path, adapter: str | None, shards: Sequence[StateShard], world: World
    ) -> None:
        """Save one adapter, of which these are this rank's shards among others. Raises RunError."""
        name = self._check_known(adapter)
        assert self.facts is not None, "an adapter of this name exists"
        keys = {f"weights/{of}": key for of, key in self.facts.keys[name].items()}
        tensors = collect_shards([s for s in shards if s.key in keys], world.group, world.device)
        problem: PlaitError | None = None
        if world.rank == 0:
            try:
                named = {keys[key]: tensor.cpu() for key, tensor in tensors.items()}
                base = None if self.base is None else self.base.get("path")
                target = adapter_folder(to_path(folder, "folder"), name)
                write_adapter(target, named, self.facts.configs[name], base)
            except RunError as error:
                problem = error
        raise_on_all(problem, world.group, world.device)

    def read(
        self,
        folder: str | Path,
        adapter: str | None,
        shapes: Mapping[str, tuple[int, ...]],
        num_steps: int,
        world: World,
    ) -> dict[str, Tensor]:
        """Return the weights of an adapter in PEFT's files, by their keys in a state, on all ranks. `shapes`:
        of all weights. Raises CheckpointError on all ranks, also if the adapter, trained for `num_steps`,
        would be left with another one's optimizer states."""
        name = self._check_known(adapter)
        assert self.facts is not None, "an adapter of this name exists"
        problem, found = None, dict[str, Tensor]()
        keys = self.facts.keys[name]
        try:
            if num_steps and (name in self.facts.trained or self._is_served):
                is_trained = name in self.facts.trained
                raise CheckpointError(
                    "the optimizer's states belong to the adapter that has been trained"
                    if is_trained
                    else "parameter servers have newer weights than their workers",
                    given=f"load_adapter of {name!r} after {num_steps} steps",
                    expected=f"{'an adapter that is not trained, or ' * is_trained}no steps before",
                    hint="engine.load(checkpoint), which loads the states too; or another engine",
                )
            expected = {key: shapes[f"weights/{of}"] for of, key in keys.items()}
            source = adapter_folder(to_path(folder, "folder"), name)
            check_same_function(source, read_adapter_config(source), self.facts.configs[name])
            found = read_adapter(source, expected, self.facts.base)
        except CheckpointError as error:
            problem = error
        raise_on_all(problem, world.group, world.device)
        return {f"weights/{of}": found[key] for of, key in keys.items()}


def _check_between_steps(method: str, micros_done: int) -> None:
    if micros_done:
        raise PlanError(
            "a step has begun with the adapters as they are",
            given=f"engine.{method} after {micros_done} micro-batches of a step",
            expected="a call between two steps",
            hint="engine.update() first, or engine.discard_step()",
        )
