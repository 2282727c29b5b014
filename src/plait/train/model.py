"""The model of a recipe: on meta, and with its configuration completed from the tokenizer.

Apart from `config.py`, so that a recipe is read and most of its mistakes are reported without torch.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from plait.checkpoint import HuggingFaceFiles
from plait.data.dataset import check_sequence
from plait.engine.spec import Arguments, validate
from plait.errors import ModelError, RunError, unknown_key_hint
from plait.models import (
    causal_lm_on_meta,
    check_attends_backwards,
    check_config_values,
    check_forward,
    pretrained_causal_lm,
    read_config,
)
from plait.plan import Plan
from plait.train.sections import ModelConfig

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
    if not is_saved:
        check_weights(model)
    values = config_of(model)
    check_config_values(values)
    if not is_saved and model.config is not None:
        _check_keys(values)
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
