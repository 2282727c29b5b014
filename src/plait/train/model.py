"""The model of a recipe: its configuration made whole by the tokenizer, and the model on meta."""

from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from plait.errors import ModelError, unknown_key_hint
from plait.models import causal_lm_on_meta, pretrained_causal_lm, read_config
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


def check_config(model: ModelConfig) -> None:
    """Raises ModelError for what is wrong with the configuration whatever the tokenizer will be."""
    if model.config is not None:
        _check_keys(model.config)
    if not model.pretrained:
        build_model(model)


def build_model(model: ModelConfig) -> PreTrainedModel:
    """The model: on meta, or with the weights that it starts from. Raises ModelError."""
    if model.pretrained:
        return pretrained_causal_lm(str(model.path))
    source = model.config if model.config is not None else model.path
    assert source is not None, "a recipe's model has a configuration or a path"
    return causal_lm_on_meta(source)


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
