"""The model of a recipe: its configuration made whole by the tokenizer, and the model on meta."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from plait.api import check_shardable
from plait.checkpoint import HuggingFaceFiles
from plait.data import check_sequence
from plait.errors import ModelError, RunError, unknown_key_hint
from plait.models import causal_lm_on_meta, pretrained_causal_lm, read_config
from plait.plan import Plan
from plait.train.config import ModelConfig

# Keys that configurations take but do not keep under this name.
_OTHER_SPELLINGS = {"model_type", "rope_theta", "rope_scaling", "torch_dtype", "num_labels"}


def whole_config(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """The Hugging Face configuration: what the recipe or its file says, the tokenizer's facts added.

    Added, where not given: `vocab_size` and the ids of the special tokens. Raises ModelError.
    """
    if model.config is not None:
        specials = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
        return {"vocab_size": vocab_size, **specials, **model.config}
    assert model.path is not None, "a recipe's model has a configuration or a path"
    return {"vocab_size": vocab_size, **read_config(model.path)}


def check_config(model: ModelConfig, sequence: int, plan: Plan) -> None:
    """Checks what does not depend on the tokenizer, before hours go into tokens.

    Raises ModelError for the configuration or for layers that cannot be cut, PlanError for a grid that they
    cannot be cut on, DataError for samples longer than the model allows, CheckpointError for weights to start
    from that cannot be read.
    """
    if model.config is not None:
        _check_keys(model.config)
    if model.pretrained and model.path is not None:
        HuggingFaceFiles.open(model.path)
    on_meta = model_on_meta(model)
    check_sequence(sequence, getattr(on_meta.config, "max_position_embeddings", None))
    check_shardable(on_meta, plan, model.tensor_plan)


def starting_model(model: ModelConfig) -> tuple[PreTrainedModel, Path | None]:
    """The model; on meta, and with it the directory of the weights that it starts from, of which each rank
    reads its part. Where transformers has to convert them, it has them already. Raises ModelError,
    CheckpointError."""
    on_meta = model_on_meta(model)
    if not model.pretrained:
        return on_meta, None
    assert model.path is not None, "weights to start from have a path"
    if HuggingFaceFiles.open(model.path).misfit(on_meta) is None:
        return on_meta, model.path
    return pretrained_causal_lm(str(model.path)), None


def model_on_meta(model: ModelConfig) -> PreTrainedModel:
    """The model of the configuration, whatever weights it starts from. Raises ModelError."""
    source = model.config if model.config is not None else model.path
    assert source is not None, "a recipe's model has a configuration or a path"
    return causal_lm_on_meta(source)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The prompt's tokens; of none, the mark that ends the document before: a document follows on it."""
    ids: list[int] = list(tokenizer(prompt)["input_ids"])
    return ids or [int(tokenizer.eos_token_id)]


def check_prompt(ids: list[int], config: PretrainedConfig) -> int | None:
    """How many tokens the model can write after these; None: no limit. Raises RunError where it can none."""
    if max(ids) >= config.vocab_size:
        raise RunError(
            "the prompt has tokens that the model does not know",
            given=f"token id {max(ids)}, model with vocab_size={config.vocab_size}",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    if len(ids) >= longest:
        raise RunError(
            "the prompt leaves no room for more",
            given=f"{len(ids)} tokens, model with max_position_embeddings={longest}",
            expected=f"a prompt of fewer than {longest} tokens",
        )
    return int(longest) - len(ids)


def _check_keys(config: dict[str, Any]) -> None:
    """transformers takes any key and ignores what it does not know; a recipe's may not be misspelt."""
    try:
        default = AutoConfig.for_model(config.get("model_type", ""))
    except ValueError:
        return  # causal_lm_on_meta names the nearest model type
    known = {*default.to_dict(), *default.attribute_map, *_OTHER_SPELLINGS}
    for key in config:
        if key not in known:
            raise ModelError(
                f"a {config['model_type']} configuration has no key {key!r}",
                given=f"model.config.{key}",
                hint=f"model.config.{unknown_key_hint(key, known)}",
            )
