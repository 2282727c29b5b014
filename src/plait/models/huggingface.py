"""Building Hugging Face causal language models: on meta from a configuration, or with their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from plait.errors import ModelError, unknown_key_hint


def causal_lm_on_meta(config: Mapping[str, Any] | Path) -> PreTrainedModel:
    """The unmodified Hugging Face model of a configuration, on the meta device: no bytes yet.

    `config`: keys as in a `config.json`, `model_type` among them, or the path of such a file or its
    directory. Raises ModelError.
    """
    hf_config = _hf_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            "the configuration does not make a causal language model",
            given=f"model_type={hf_config.model_type}: {str(error).splitlines()[0][:200]}",
        ) from error


def pretrained_causal_lm(path: str) -> PreTrainedModel:
    """A model with its weights, from a directory (or a hub's name) in Hugging Face form, in float32.

    Runs no code that comes with the weights. Raises ModelError.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            "the weights to start from cannot be loaded",
            given=f"{path}: {str(error).splitlines()[0][:200]}",
            expected="a directory with config.json and safetensors files",
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def _hf_config(config: Mapping[str, Any] | Path) -> PretrainedConfig:
    values = _decode_floats(read_config(config) if isinstance(config, Path) else config)
    for name in ("dtype", "torch_dtype"):  # of files; the plan decides what is computed in
        values.pop(name, None)
    kind = values.pop("model_type", None)
    if kind is None:
        raise ModelError(
            "the model's configuration names no model_type", given=config, hint='model_type = "llama"'
        )
    try:
        return AutoConfig.for_model(kind, **values)
    except ValueError as error:
        # transformers lists every type that it knows at the end of its message
        known = [word.strip() for word in str(error).split(":")[-1].split(",")]
        if "nrecognized" not in str(error):
            raise ModelError(
                "the model's configuration contradicts itself", given=str(error)[:300]
            ) from error
        raise ModelError(
            "transformers knows no such model type",
            given=f"model_type={kind}",
            hint=unknown_key_hint(kind, known) if len(known) > 1 else None,
        ) from error
    except Exception as error:  # huggingface_hub's strict dataclasses raise classes of their own
        raise ModelError(
            "the model's configuration is not valid",
            given=f"model_type={kind}: {' '.join(str(error).split())[:300]}",
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a `config.json`, or of the one in a directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError("the model's configuration cannot be read", given=f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError("the model's configuration is not a JSON object", given=file)
    return values


def _decode_floats(value: Any) -> Any:
    """JSON has no infinity; transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        said = value.get("__float__") if len(value) == 1 else None
        if said in ("NaN", "Infinity", "-Infinity"):
            return float(said)
        return {key: _decode_floats(inner) for key, inner in value.items()}
    return [_decode_floats(inner) for inner in value] if isinstance(value, list) else value
