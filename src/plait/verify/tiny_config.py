"""Shrink a Hugging Face configuration: few layers, narrow, the same architecture.

Many keys of a configuration do not fit a small model: lists with an entry per layer, tables for a head dim,
the id of the padding token. The given keys are kept as far as the small model builds and runs with them:
first all, then only flags and names, then only the model type.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from plait.errors import ModelError, PlaitError
from plait.models import causal_lm_on_meta, without_warnings
from plait.verify.tiny_sizes import NOT_OF_TYPE, NUM_HEADS, SIZES, sizes_of_type

_MAX_PARAMETERS = 3_000_000
_WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
_VARIANTS = (
    SIZES,
    {key: value for key, value in _WITHOUT_HEAD_DIM.items() if key != "q_lora_rank"},
    {**_WITHOUT_HEAD_DIM, "num_key_value_heads": NUM_HEADS},
)
_NOT_SHAPES = ("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


def shrink_config(values: Mapping[str, Any], layers: int, length: int = 16) -> dict[str, Any]:
    """Return the configuration of a small model of the same type, for sequences of `length`.

    Raises ModelError if none builds and runs.
    """
    failure: Exception | None = None
    with without_warnings():
        for kept in _kept_keys(values):
            for sizes in _VARIANTS:
                config = {**kept, **sizes, "num_hidden_layers": layers}
                config["attention_types"] = [[["global", "local"], (layers + 1) // 2]]  # GPT-Neo's, in pairs
                config |= sizes_of_type(config["model_type"], layers)
                config["max_position_embeddings"] = max(64, length)
                for key in NOT_OF_TYPE.get(config["model_type"], ()):
                    del config[key]
                try:
                    _try(config, length)
                    return config
                except Exception as error:  # the model's code may raise anything
                    failure = failure or error
    reason = failure.fact if isinstance(failure, PlaitError) else str(failure).strip().split("\n")[0]
    raise ModelError(
        "cannot shrink the model",
        given=f"{values.get('model_type')}: {reason}",
        expected="a configuration that some smaller sizes fit",
        hint="plait verify --model MODULE:FUNCTION, a function that builds a small one",
    ) from failure


def left_out(values: Mapping[str, Any], small: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that are not sizes (flags, names, tables), and that the small configuration does not have."""
    are_more = {key for key, value in values.items() if value and type(value) not in (int, float)}
    return tuple(sorted(key for key in are_more - {*_NOT_SHAPES} if small.get(key) != values[key]))


def _kept_keys(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    model_type = {"model_type": values["model_type"]}
    keys = {key: value for key, value in values.items() if key not in _NOT_SHAPES}
    if len(keys) > 1:
        yield {key: value for key, value in keys.items() if not isinstance(value, list)}
        yield {key: value for key, value in keys.items() if isinstance(value, str | bool)}
    yield model_type


def _try(config: Mapping[str, Any], length: int) -> None:
    """Raise an error unless the model is small and runs."""
    model: Any = causal_lm_on_meta(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ModelError(
            "the model is still large",
            given=f"{num_parameters:,} parameters",
            expected=f"at most {_MAX_PARAMETERS:,}",
            hint="--model MODULE:FUNCTION, a function that builds a small one",
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        type(model)(model.config)(torch.arange(length)[None] % 61 + 3, use_cache=False)
