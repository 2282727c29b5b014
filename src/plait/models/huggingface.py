"""Build Hugging Face causal language models: on meta from a configuration, or with their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plait.errors import ModelError, unknown_key_hint
from plait.fileio import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def causal_lm_on_meta(config: Mapping[str, Any] | Path) -> "PreTrainedModel":
    """Build the unmodified Hugging Face model of a configuration on the meta device.

    `config`: keys as in a `config.json`, including `model_type`, or the path of such a file or its directory.
    Raises ModelError.
    """
    from transformers import AutoModelForCausalLM

    hf_config = _hf_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            "the configuration is not of a causal language model",
            given=f"model_type={hf_config.model_type}: {str(error).splitlines()[0][:200]}",
        ) from error


def pretrained_causal_lm(path: str) -> "PreTrainedModel":
    """Load a model with its weights in float32 from a Hugging Face directory or the name of one on the hub.

    No code that comes with the weights is run. Raises ModelError.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

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


def _hf_config(config: Mapping[str, Any] | Path) -> "PretrainedConfig":
    from transformers import AutoConfig

    values = _decode_floats(read_config(config) if isinstance(config, Path) else config)
    for name in ("dtype", "torch_dtype"):  # of the files; the plan decides the compute dtype
        values.pop(name, None)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ModelError(
            "the model's configuration has no model_type", given=config, hint='model_type = "llama"'
        )
    try:
        return AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        # transformers lists all known types at the end of its message
        known = [word.strip() for word in str(error).split(":")[-1].split(",")]
        if "nrecognized" not in str(error):
            raise ModelError(
                "the model's configuration contradicts itself", given=str(error)[:300]
            ) from error
        raise ModelError(
            "transformers has no such model type",
            given=f"model_type={model_type}",
            hint=unknown_key_hint(model_type, known) if len(known) > 1 else None,
        ) from error
    except Exception as error:  # huggingface_hub's strict dataclasses raise their own exceptions
        raise ModelError(
            "the model's configuration is not valid",
            given=f"model_type={model_type}: {' '.join(str(error).split())[:300]}",
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object of a `config.json`, or of the one in a directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError("the model's configuration cannot be read", given=f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError("the model's configuration is not a JSON object", given=file)
    return values


def _decode_floats(value: Any) -> Any:
    """Decode infinities and NaN, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        text = value.get("__float__") if len(value) == 1 else None
        if text in ("NaN", "Infinity", "-Infinity"):
            return float(text)
        return {key: _decode_floats(inner) for key, inner in value.items()}
    return [_decode_floats(inner) for inner in value] if isinstance(value, list) else value
