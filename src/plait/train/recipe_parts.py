"""The parts of a recipe as objects of torch and transformers: the model, on meta and with its configuration
completed from the tokenizer; the optimizer; the learning rate schedule.

Apart from `config.py`, so that a recipe is read and most of its mistakes are reported without torch.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from plait.checkpoint import HuggingFaceFiles
from plait.data.dataset import check_sequence
from plait.engine.spec import Arguments, validate
from plait.errors import ConfigError, ModelError, RunError, nearest, unknown_key_hint
from plait.models import (
    causal_lm_on_meta,
    check_attends_backwards,
    check_config_values,
    check_forward,
    default_groups,
    pretrained_causal_lm,
    read_config,
)
from plait.optim.lion_lamb import LAMB, Lion
from plait.optim.update_kinds import DEFAULT_GROUPS, GroupOptimizer
from plait.plan import Plan
from plait.train.config import ModelConfig, OptimizerConfig, ScheduleConfig

# Keys that configurations accept but store under another name.
_OTHER_SPELLINGS = {"model_type", "rope_theta", "rope_scaling", "torch_dtype", "num_labels"}


def complete_config(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, Any]:
    """Return the Hugging Face configuration of the recipe or its file, completed from the tokenizer.

    Adds `vocab_size` and the ids of the special tokens where they are not given. Raises ModelError.
    """
    specials = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    return {"vocab_size": vocab_size, **(specials if model.path is None else {}), **config_of(model)}


def generation_of(model: ModelConfig) -> dict[str, Any] | None:
    """Return the keys of a generation_config.json: the recipe's, else those next to its config.json, if there
    are any. Raises ModelError."""
    if model.generation is not None or model.path is None:
        return model.generation
    file = model.path / "generation_config.json"
    return read_config(file) if file.is_file() else None


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Return the Hugging Face configuration of the recipe or its file. Raises ModelError."""
    if model.config is not None:
        return model.config
    assert model.path is not None, "a recipe's model has a configuration or a path"
    return read_config(model.path)


def check_config(model: ModelConfig, sequence: int, plan: Plan, *, is_saved: bool = False) -> PreTrainedModel:
    """Check what does not depend on the tokenizer, before hours are spent on tokenizing; return the model on
    meta.

    `is_saved`: the recipe is a run's, whose keys and weights are those that the run began with. Raises
    ModelError for an invalid configuration or layers that cannot be sharded, PlanError for a grid that they
    cannot be sharded over, DataError for samples longer than the model allows, CheckpointError for unreadable
    pretrained weights.
    """
    values = config_of(model)
    check_config_values(values)
    if not is_saved:
        if model.config is not None:
            _check_keys(values)
        check_weights(model)
    on_meta = model_on_meta(model)
    check_attends_backwards(on_meta)
    check_sequence(sequence, getattr(on_meta.config, "max_position_embeddings", None))
    validate(Arguments(on_meta, plan, tensor_plan=model.tensor_plan))
    check_forward(values)
    return on_meta


def check_weights(model: ModelConfig) -> None:
    """Check that the weights to start from can be read. Raises CheckpointError."""
    if model.pretrained and model.path is not None:
        HuggingFaceFiles.open(model.path)


def initial_model(model: ModelConfig) -> tuple[PreTrainedModel, Path | None]:
    """Return the model on meta, and the directory of the pretrained weights if each rank can read its shards.

    Weights that transformers has to convert are loaded into the returned model instead. Raises ModelError,
    CheckpointError.
    """
    on_meta = model_on_meta(model)
    if not model.pretrained or model.path is None:
        return on_meta, None
    if HuggingFaceFiles.open(model.path).direct_read_problem(on_meta) is None:
        return on_meta, model.path
    return pretrained_causal_lm(str(model.path)), None


def model_on_meta(model: ModelConfig) -> PreTrainedModel:
    """Build the model on meta, without pretrained weights. Raises ModelError."""
    source = model.config if model.config is not None else model.path
    assert source is not None, "a recipe's model has a configuration or a path"
    return causal_lm_on_meta(source)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the prompt's tokens; for an empty prompt the end-of-document token, as before a document."""
    ids: list[int] = list(tokenizer(prompt)["input_ids"])
    return ids or [int(tokenizer.eos_token_id)]


def check_prompt(ids: list[int], config: PretrainedConfig) -> int | None:
    """Return how many tokens the model can generate after these; None: no limit. Raises RunError for zero."""
    if max(ids) >= config.vocab_size:
        raise RunError(
            "the prompt has tokens outside the model's vocabulary",
            given=f"token id {max(ids)}, model with vocab_size={config.vocab_size}",
            expected=f"ids below {config.vocab_size}",
            hint="a run whose model.config.vocab_size is at least the tokenizer's",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    if len(ids) >= longest:
        raise RunError(
            "the prompt leaves no space for new tokens",
            given=f"{len(ids)} tokens, model with max_position_embeddings={longest}",
            expected=f"a prompt of fewer than {longest} tokens",
            hint="a shorter prompt",
        )
    return int(longest) - len(ids)


def _check_keys(config: dict[str, Any]) -> None:
    """Reject unknown keys: transformers accepts any key and ignores those that it does not know."""
    default = AutoConfig.for_model(config["model_type"])
    known = {*default.to_dict(), *default.attribute_map, *_OTHER_SPELLINGS}
    for key in config:
        if key not in known:
            raise ModelError(
                f"a {config['model_type']} configuration has no key {key!r}",
                given=f"model.config.{key}",
                expected=f"a key of transformers' {type(default).__name__}",
                hint=f"model.config.{unknown_key_hint(key, known)}",
            )


# --- optimizer and learning rate


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    return _class_named(config.name)


def _class_named(name: str) -> type[torch.optim.Optimizer]:
    own: dict[str, type[torch.optim.Optimizer]] = {"LAMB": LAMB, "Lion": Lion}
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
