"""The model of a recipe: on meta, and with its configuration completed from the tokenizer.

Apart from `config.py`, so that a recipe is read and most of its mistakes are reported without torch.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from plait.checkpoint import HuggingFaceFiles
from plait.checkpoint.adapter_files import read_adapter_config
from plait.data.dataset import check_sequence
from plait.engine.adapters import EngineAdapters
from plait.engine.spec import Arguments, validate
from plait.errors import ConfigError, ModelError, RunError, unknown_key_hint
from plait.models import (
    causal_lm_on_meta,
    check_attends_backwards,
    check_config_values,
    check_forward,
    pretrained_causal_lm,
    read_config,
    reward_config,
)
from plait.models.adapters import attach
from plait.plan import Plan
from plait.train.sections import AdapterConfig, ModelConfig

# Keys that configurations accept but store under another name.
_OTHER_SPELLINGS = {"model_type", "rope_theta", "rope_scaling", "torch_dtype", "num_labels"}
# Keys of adapter_config.json that say what the adapter is, or which follow from the model.
_NOT_OF_RECIPES = {
    "peft_type", "task_type", "inference_mode", "peft_version", "auto_mapping", "base_model_name_or_path",
    "revision", "fan_in_fan_out", "megatron_core", "qalora_group_size",
}  # fmt: skip


def complete_config(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, Any]:
    """Return the Hugging Face configuration of the recipe or its file, completed from the tokenizer.

    Adds `vocab_size` and the ids of the special tokens where they are not given. Raises ModelError.
    """
    specials = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = {"vocab_size": vocab_size, **(specials if model.path is None else {}), **config_of(model)}
    if model.head == "reward":  # an id that ends texts would hide their last token from transformers
        pad = tokenizer.pad_token_id
        config["pad_token_id"] = None if pad == tokenizer.eos_token_id else pad
    return config


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
        config = model.config
    else:
        assert model.path is not None, "a recipe's model has a configuration or a path"
        config = read_config(model.path)
    return config if model.head == "tokens" else reward_config(config)


def check_config(
    model: ModelConfig,
    sequence: int,
    plan: Plan,
    adapter: AdapterConfig | None = None,
    *,
    is_saved: bool = False,
) -> nn.Module:
    """Check what does not depend on the tokenizer, before hours are spent on tokenizing; return the model on
    meta, with its adapter.

    `is_saved`: the recipe is a run's, whose keys and weights are those that the run began with. Raises
    ModelError for an invalid configuration or layers that cannot be sharded, PlanError for a grid that they
    cannot be sharded over, DataError for samples longer than the model allows, CheckpointError for unreadable
    pretrained weights.
    """
    if not is_saved:
        check_weights(model)
    values = config_of(model)
    check_config_values(values)
    if not is_saved and model.config is not None:
        _check_keys(values)
    on_meta = model_on_meta(model)
    check_attends_backwards(on_meta)
    check_sequence(sequence, getattr(on_meta.config, "max_position_embeddings", None))
    trained = with_adapter(on_meta, adapter)
    validate(Arguments(trained, plan, tensor_plan=model.tensor_plan, keep_zeros=model.keep_zeros))
    check_forward(values)
    return trained


def check_weights(model: ModelConfig) -> None:
    """Check that the weights to start from can be read. Raises CheckpointError."""
    if model.pretrained and model.path is not None:
        HuggingFaceFiles.open(model.path)


def initial_model(model: ModelConfig, adapter: AdapterConfig | None = None) -> tuple[nn.Module, Path | None]:
    """Return the model on meta, and the directory of the pretrained weights if each rank can read its shards.

    Weights that transformers has to convert are loaded into the returned model instead. Raises ModelError,
    CheckpointError.
    """
    on_meta = with_adapter(model_on_meta(model), adapter)
    if not model.pretrained or model.path is None:
        return on_meta, None
    if HuggingFaceFiles.open(model.path).direct_read_problem(on_meta) is None:
        return on_meta, model.path
    reward = config_of(model) if model.head == "reward" else None
    return with_adapter(pretrained_causal_lm(str(model.path), reward), adapter), None


def with_adapter(model: PreTrainedModel, adapter: AdapterConfig | None) -> nn.Module:
    """Return the model with the recipe's adapter, if there is one. Raises ModelError."""
    if adapter is None:
        return model
    wrapped: nn.Module = attach(model, adapter.lora_config())
    return wrapped


def complete_adapter(adapter: AdapterConfig | None) -> AdapterConfig | None:
    """Return the section with the keys of the adapter to start from. Raises ConfigError for other keys than
    its path or an adapter that recipes do not have, CheckpointError for an unreadable one."""
    if adapter is None or adapter.path is None:
        return adapter
    unset: tuple[object, ...] = (None, [], {}, False)
    saved = {key: of for key, of in read_adapter_config(adapter.path).items() if of not in unset}
    given = adapter.model_fields_set - {"path"}
    unknown = saved.keys() - AdapterConfig.model_fields.keys() - _NOT_OF_RECIPES
    if given or unknown or saved.get("peft_type") != "LORA":
        raise ConfigError(
            "an adapter to start from has its own keys" if given else "recipes have no such adapter",
            given=f"{adapter.path}: {', '.join(sorted(given or unknown)) or saved.get('peft_type')}",
            expected="adapter.path alone" if given else "a LoRA adapter with keys of docs/adapters.md",
            hint=f"--set adapter.{min(given)}= removes the key" if given else "a script: docs/adapters.md",
        )
    own = {key: of for key, of in saved.items() if key in AdapterConfig.model_fields}
    return AdapterConfig.model_validate({"target_modules": None, **own, "path": adapter.path.absolute()})


def adapter_facts(model: ModelConfig, adapter: AdapterConfig | None, seed: int, plan: Plan) -> dict[str, Any]:
    """Return what checkpoints of a recipe's adapter record of it and its base; {} without one. Raises
    ModelError, CheckpointError."""
    if adapter is None:
        return {}
    trained, weights = initial_model(model, adapter)
    given = Arguments(trained, plan, seed=seed, weights=weights)
    return EngineAdapters(trained, given).checkpoint_facts()


def model_on_meta(model: ModelConfig) -> PreTrainedModel:
    """Build the model on meta, without pretrained weights. Raises ModelError."""
    return causal_lm_on_meta(config_of(model), of_architecture=model.head == "reward")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the prompt's tokens; for an empty prompt the end-of-document token, as before a document."""
    ids: list[int] = list(tokenizer(prompt)["input_ids"])
    return ids or [int(tokenizer.eos_token_id)]


def check_prompt(ids: list[int], config: PretrainedConfig) -> int | None:
    """Return how many tokens the model can generate after these; None: no limit. Raises RunError for zero."""
    if max(ids, default=0) >= config.vocab_size:
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
