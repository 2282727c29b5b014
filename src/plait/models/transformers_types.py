"""Instance checks against classes of transformers that do not import it, as that takes seconds.

An object can only be an instance of a class whose module has been imported.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.pytorch_utils import Conv1D
    from transformers.utils import ModelOutput


def is_pretrained_model(model: object) -> TypeGuard["PreTrainedModel"]:
    return isinstance(model, _loaded_class("modeling_utils", "PreTrainedModel"))


def has_pretrained_model(model: nn.Module) -> bool:
    return any(is_pretrained_model(module) for module in model.modules())


def input_embedding(model: "PreTrainedModel") -> nn.Module | None:
    """The model's embedding of token ids; None if it has none, as for images."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def vocabulary_size(model: nn.Module) -> int | None:
    """The number of token ids, by the model's configuration or the one of its text model; None if unknown."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if is_pretrained_config(config) else None
    sizes = [getattr(holder, "vocab_size", None) for holder in (config, text)]
    return next((size for size in sizes if isinstance(size, int)), None)


def is_pretrained_config(value: object) -> TypeGuard["PreTrainedConfig"]:
    return isinstance(value, _loaded_class("configuration_utils", "PreTrainedConfig"))


def is_conv1d(module: object) -> TypeGuard["Conv1D"]:
    return isinstance(module, _loaded_class("pytorch_utils", "Conv1D"))


def is_model_output_class(value: object) -> TypeGuard[type["ModelOutput"]]:
    return isinstance(value, type) and issubclass(value, _loaded_class("utils.generic", "ModelOutput"))


def linear_forwards() -> dict[Any, bool]:
    """The forwards of linear layers, and whether their weights are transposed."""
    falcon = _loaded_class("models.falcon.modeling_falcon", "FalconLinear")
    conv = _loaded_class("pytorch_utils", "Conv1D")
    return {
        nn.Linear.forward: False,
        **({falcon.forward: False} if falcon else {}),
        **({conv.forward: True} if conv else {}),
    }


def has_linear_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) in linear_forwards()


def _loaded_class(module: str, name: str) -> Any:
    """The class if its module has been imported, else (), of which nothing is an instance."""
    return getattr(sys.modules.get(f"transformers.{module}"), name, ())
