"""Build Hugging Face causal language models: on meta from a configuration, or with their weights."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models.huggingface_config import build_on_meta, check_config_values, read_config
from plait.models.init_weights import RecordedConstruction
from plait.models.transformers_types import is_pretrained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def causal_lm_on_meta(config: Mapping[str, Any] | Path) -> "PreTrainedModel":
    """Build the unmodified Hugging Face model of a configuration on the meta device.

    `config`: keys as in a `config.json`, including `model_type`, or the path of such a file or its directory.
    Raises ModelError, which names the key at fault where it can be found.
    """
    return build_on_meta(read_config(config) if isinstance(config, Path) else config)


def saved_model_on_meta(config: Mapping[str, Any] | Path) -> "PreTrainedModel":
    """Build the model that a saved configuration is of on the meta device: of the class in its
    `architectures`, or else as `causal_lm_on_meta`. Raises ModelError."""
    return build_on_meta(read_config(config) if isinstance(config, Path) else config, of_architecture=True)


def config_of_model(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a Hugging Face model, with its class, as JSON; None for other modules."""
    if not is_pretrained_model(model):
        return None
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return values | {"architectures": [type(model).__name__]}


def buffers_like_weights(model: nn.Module) -> set[int]:
    """The ids of buffers that have the dtype of the weights: those that are saved with them. In a model of
    transformers, those that have it where the class is built for such weights: tables of angles have not."""
    found, seen = set(), set[nn.Module]()
    for module in model.modules():
        if is_pretrained_model(module) and module not in seen:
            seen.update(module.modules())
            dtypes = _built_for_bfloat16(module)
            found |= {id(b) for name, b in module.named_buffers() if dtypes.get(name) == torch.bfloat16}
        elif module not in seen:
            kept = module._non_persistent_buffers_set
            found |= {id(b) for key, b in module._buffers.items() if b is not None and key not in kept}
    return found


def _built_for_bfloat16(model: "PreTrainedModel") -> dict[str, torch.dtype]:
    """Dtypes of buffers of a model built for weights in bfloat16; none if it cannot be built again."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with RecordedConstruction(), torch.device("meta"):
            rebuilt = type(model)(copy.deepcopy(model.config))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return {}  # a class of the user's, with other arguments
    finally:
        torch.set_default_dtype(default)
    wide = set(model._keep_in_fp32_modules_strict or ())
    return {name: b.dtype for name, b in rebuilt.named_buffers() if wide.isdisjoint(name.split("."))}


def pretrained_causal_lm(path: str) -> "PreTrainedModel":
    """Load a model with its weights in float32 from a Hugging Face directory.

    No code that comes with the weights is run, nor any that they name. Raises ModelError.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

    values = read_config(Path(path))
    check_config_values(values)
    if values.get("quantization_config") is not None:  # which also names kernels to download
        raise ModelError(
            "quantized weights cannot be trained",
            given=f"{path}: quantization_config",
            expected="weights in float32, bfloat16 or float16",
            hint="the model's weights before quantization",
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # of the model's code, too
        raise ModelError(
            "the weights to start from cannot be loaded",
            given=f"{path}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}",
            expected="a directory with config.json and safetensors files",
            hint=f"ls {path}",
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model
