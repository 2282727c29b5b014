"""The recipe: what a run is, as a frozen value read from TOML.

Every section belongs to the part that uses it. A key that nobody knows is an error that names the
nearest known one, a value of the wrong type one that names its key.
"""

import inspect
import json
import tomllib
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import get_scheduler

from plait.data import DataConfig, TokenizerConfig
from plait.errors import ConfigError, nearest, unknown_key_hint
from plait.optim import LossScaling, states_per_element

# The engine updates flat storages, in which a matrix is no longer a matrix: an optimizer has to treat
# every element alike. (Adafactor, Muon and LBFGS do not.) Rprop does, but it has no weight decay, and steps
# of its own that no schedule moves: two keys of the recipe would say what does not happen.
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip

MONTH_S = 30 * 86400.0


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """`[run]`: where, how long, how often. Every `*_every` is in steps; 0 is never."""

    dir: Path
    steps: int = Field(ge=1)
    batch: int = Field(ge=1, description="sequences per step, over all ranks")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="of initial weights, dropout and order of samples"
    )
    log_every: int = Field(default=10, ge=1)
    evaluate_every: int = Field(
        default=100, ge=0, description="also before the first step and after the last"
    )
    evaluate_batches: int = Field(
        default=8, ge=1, description="batches of validation sequences per evaluation"
    )
    checkpoint_every: int = Field(
        default=100, ge=0, description="also after the last step, and when told to stop"
    )
    checkpoint_minutes: float = Field(
        default=0.0, ge=0, le=MONTH_S / 60, description="since the last save, by rank 0's clock; 0 is never"
    )
    keep_last: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0, description="checkpoints of steps that it divides stay too")
    keep_best: bool = Field(default=False, description="and the one with the lowest validation loss")
    save_in_background: bool = Field(default=False, description="steps wait for a copy, not for the disk")
    max_failed_saves: int = Field(default=3, ge=1, description="in a row, which end the run; see saving.py")
    check_replicas_every: int = Field(
        default=100, ge=0, description="also before each save: ranks with the same weights compare them"
    )
    check_stragglers_every: int = Field(
        default=50, ge=0, description="ranks compare how long their own work takes"
    )
    straggler_factor: float = Field(
        default=1.5, gt=1, description="times the median of the others: what is slow"
    )
    spike_factor: float = Field(
        default=0.0, ge=0, description="a loss spikes that is so many usual spreads above the median; 0: off"
    )
    spike_window: int = Field(default=100, ge=4, description="steps whose losses are usual; see spikes.py")
    spike_skip: int = Field(default=100, ge=0, description="batches after a spike's that are skipped too")
    max_spikes: int = Field(default=3, ge=0, description="times that a run goes back before it stops")
    max_skipped: int = Field(
        default=10, ge=1, description="steps in a row without a finite gradient before it stops; see loop.py"
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=MONTH_S, description="how long a rank waits for another in a step"
    )
    hang_s: float = Field(
        default=300.0,
        ge=0,
        le=MONTH_S,
        description="without a step, after which all ranks write their stacks and end",
    )
    save_s: float = Field(
        default=60.0, gt=0, le=MONTH_S, description="from a signal to stop until local ranks are killed"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    transport: Literal["auto", "host", "gloo", "nccl"] = Field(
        default="auto", description="what ranks talk through: on a CPU shared memory (host) or Gloo"
    )
    offload_dir: Path | None = Field(
        default=None, description="of plans with offload=disk: a folder on a disk of each host"
    )
    trace: Path | None = Field(
        default=None, description="a file: when the ranks of a pipeline did what in steps 3 to 5"
    )
    probe: bool = Field(
        default=False,
        description="compare gradients with the whole model's in one process before the first step",
    )


class ModelConfig(Section):
    """`[model]`: either `config`, the keys of a Hugging Face configuration with its `model_type`, or
    `path`, a directory or JSON file that holds one. `pretrained` starts from the weights in `path`.
    """

    config: dict[str, Any] | None = None
    path: Path | None = None
    pretrained: bool = False
    tensor_plan: dict[str, str] | None = Field(
        default=None, description="how `tp` cuts layers, over what the model says of itself"
    )


class OptimizerConfig(Section):
    """`[optimizer]`: a class of torch.optim. `args` are its other arguments, by torch's names."""

    name: str = "AdamW"
    lr: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="not applied to norms and biases")
    clip_norm: float | None = Field(default=None, gt=0)
    clip_value: float | None = Field(default=None, gt=0)
    args: dict[str, Any] = {}

    def torch_class(self) -> type[torch.optim.Optimizer]:
        return typing.cast(type[torch.optim.Optimizer], getattr(torch.optim, self.name))

    def torch_args(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, **self.args}


class ScheduleConfig(Section):
    """`[schedule]`: the learning rate's course, one of transformers.get_scheduler's."""

    name: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    warmup: int = Field(default=0, ge=0, description="steps from 0 up to optimizer.lr")
    decay: int | None = Field(
        default=None, ge=1, description="of warmup_stable_decay: its last steps, down to 0"
    )

    def course(self, steps: int) -> Callable[[int], float]:
        """What multiplies optimizer.lr in step number 0, 1, ... of `steps`: a pure function."""
        name = "constant_with_warmup" if self.name == "constant" else self.name
        specific = {"num_decay_steps": self.decay} if self.name == "warmup_stable_decay" else None
        unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the course is asked for, not stepped along
        return typing.cast(
            Callable[[int], float], get_scheduler(name, unused, self.warmup, steps, specific).lr_lambdas[0]
        )


class LossScaleConfig(Section):
    """`[loss_scale]`: how fp16's loss scale moves; its keys are those of plait.optim.LossScaling."""

    initial: float = LossScaling.initial
    growth: float = LossScaling.growth
    backoff: float = LossScaling.backoff
    interval: int = LossScaling.interval
    hysteresis: int = LossScaling.hysteresis
    minimum: float = LossScaling.minimum

    def scaling(self) -> LossScaling:
        """Raises ConfigError for what a loss scale cannot be."""
        return LossScaling(**self.model_dump())


class SampleConfig(Section):
    """`[sample]`: the text that the trained model writes at the end. No tokens, no sample."""

    prompt: str = ""
    tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.8, ge=0, description="0 takes the likeliest token")
    top_k: int = Field(default=50, ge=1)


class Recipe(Section):
    """All of a run. `plan` is text, e.g. "dp=2 precision=bf16"."""

    plan: str
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    sample: SampleConfig = SampleConfig()


def read_recipe(path: Path, sets: Iterable[str] = (), plan: str | None = None) -> Recipe:
    """The recipe in a TOML file (JSON: one that a run has saved), `key=value` texts and plan put over it.

    Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError("there is no such recipe", given=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the recipe cannot be read", given=f"{path}: {error}") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("the recipe is not TOML", given=f"{path}: {error}") from error
    source = str(path)
    for assignment in sets:
        _set(values, assignment)
        source = f"{path} and the command line"
    if plan is not None:
        values["plan"] = plan
    return parse_recipe(values, source=source)


def parse_recipe(values: dict[str, Any], *, source: str) -> Recipe:
    """Checks `values`; ConfigError names the key and `source`."""
    try:
        # By way of JSON because strict types are then those of TOML: text is a Path, but never a number.
        recipe = Recipe.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise _letter(error, source) from error
    _check_model(recipe.model)
    _check_optimizer(recipe.optimizer)
    _check_schedule(recipe.schedule, recipe.run.steps)
    if recipe.run.keep_best and not recipe.run.evaluate_every:
        raise ConfigError(
            "the best checkpoint is the one with the lowest validation loss, which nobody computes",
            given="run.keep_best = true, run.evaluate_every = 0",
            hint="--set run.evaluate_every=100, or run.keep_best=false",
        )
    recipe.loss_scale.scaling()
    return recipe


def differences(one: Recipe, other: Recipe) -> list[str]:
    """The keys in which two recipes differ, `run.dir` apart."""
    ours, theirs = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return [key for key in {**ours, **theirs} if key != "run.dir" and ours.get(key) != theirs.get(key)]


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(values: dict[str, Any], assignment: str) -> None:
    """Puts `key=value` over a recipe; `key=` takes the key out of it, and the default holds."""
    key, equals, text = assignment.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise ConfigError("--set needs key=value", given=assignment, hint="--set run.steps=100")
    table = values
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{parent} holds a value, no keys", given=f"--set {assignment}")
    if not text.strip():
        table.pop(last, None)
        return
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = text.strip()  # a bare word is text: nobody wants to quote twice in a shell


def _letter(error: ValidationError, source: str) -> ConfigError:
    """The first of pydantic's findings, an unknown key before others: it often explains them."""
    found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[0]
    path = [str(part) for part in found["loc"]]
    name = ".".join(path)
    if found["type"] == "extra_forbidden":
        where, known = ".".join(path[:-1]), _keys(path[:-1])
        hint = unknown_key_hint(path[-1], known)
        return ConfigError(
            f"{where or 'a recipe'} has no key {path[-1]!r}",
            given=f"{name} in {source}",
            hint=f"{where}.{hint}" if where and not hint.startswith("one of") else hint,
        )
    if found["type"] == "missing":
        return ConfigError(f"the recipe does not say {name}", given=source, hint=f"--set {name}=...")
    message = found["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ConfigError(
        f"{name or 'the recipe'} is not what it can be",
        given=f"{name} = {found['input']!r} in {source}",
        expected=message,
    )


def _keys(path: list[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in path:
        model = typing.cast(type[BaseModel], model.model_fields[part].annotation)
    return list(model.model_fields)


def _check_model(model: ModelConfig) -> None:
    if (model.config is None) == (model.path is None):
        raise ConfigError(
            "a model is either a configuration or a path",
            given=f"model.config {_given(model.config)}, model.path {_given(model.path)}",
            expected="one of the two",
        )
    if model.pretrained and model.path is None:
        raise ConfigError(
            "weights to start from need a path", given="model.pretrained = true", hint="model.path"
        )


def _given(value: object) -> str:
    return "not given" if value is None else "given"


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.name not in OPTIMIZERS:
        raise ConfigError(
            "not an optimizer that updates each element by itself",
            given=f"optimizer.name = {optimizer.name!r}",
            expected="one of " + ", ".join(OPTIMIZERS),
            hint=nearest(optimizer.name, OPTIMIZERS),
        )
    if optimizer.clip_norm is not None and optimizer.clip_value is not None:
        raise ConfigError(
            "gradients are clipped by their norm or by value",
            given=f"optimizer.clip_norm = {optimizer.clip_norm}, clip_value = {optimizer.clip_value}",
            expected="one of the two",
            hint="--set optimizer.clip_norm= takes a key out of the recipe",
        )
    known = set(inspect.signature(optimizer.torch_class()).parameters) - {"params"}
    for key in optimizer.args:
        if key in ("lr", "weight_decay"):
            raise ConfigError(f"{key} is a key of [optimizer] itself", given=f"optimizer.args.{key}")
        if key not in known:
            raise ConfigError(
                f"torch.optim.{optimizer.name} has no argument {key!r}",
                given=f"optimizer.args.{key}",
                hint=unknown_key_hint(key, known),
            )
    # Takes a step on a tiny parameter: some arguments are found wrong only there.
    states_per_element(optimizer.torch_class(), optimizer.torch_args())


def _check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    if (schedule.name == "warmup_stable_decay") != (schedule.decay is not None):
        raise ConfigError(
            "schedule.decay is for warmup_stable_decay, and that needs it",
            given=f"schedule.name = {schedule.name!r}, decay {_given(schedule.decay)}",
        )
    if schedule.warmup + (schedule.decay or 0) > steps:
        raise ConfigError(
            "the learning rate's course is longer than the run",
            given=f"schedule.warmup = {schedule.warmup}, schedule.decay {schedule.decay or 'not given'}",
            expected=f"at most run.steps = {steps} together",
            hint=f"--set schedule.warmup={steps // 10}",
        )
