"""Initial values of PEFT's adapters in a model on meta, where PEFT's own are lost.

[Note: initial adapters]
They are PEFT's: A uniform with the fan of the full matrix, or normal, B zero (LoRA, Hu et al. 2106.09685,
section 4.1), of embeddings the reverse; magnitudes are the norms of the layer's weight (DoRA, Liu et al.
2402.09353, section 4). Matrices are full while they are drawn, and seeded by the layer's name, so that values
do not depend on a plan. A layer comes after the ones in it: it replaces what the model has given to these.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.adapters import adapter_layers

_KNOWN = (True, False, "gaussian")


def adapter_resets(
    model: nn.Module, stored: Callable[[str, Tensor], Tensor] | None = None
) -> dict[nn.Module, Callable[[Any], None]]:
    """Return what sets the adapters of each layer: see [Note: initial adapters]. `stored`: returns the values
    that a frozen weight has in forward. Raises ModelError for adapters that are to have other initial
    values."""
    inits = {
        adapter: getattr(config, "init_lora_weights", True)
        for module in model.modules()
        if isinstance(configs := getattr(module, "peft_config", None), dict)
        for adapter, config in configs.items()
    }
    for init in inits.values():
        if init not in _KNOWN:
            raise ModelError(
                "a model on meta cannot have these initial adapters",
                given=f"init_lora_weights={init!r}",
                expected="True (A uniform, B zero), 'gaussian' (A normal, B zero) or False (both random)",
                hint="the model with its weights, in place of one on meta",
            )

    paths = {layer: path for path, layer in adapter_layers(model)}

    def reset(layer: Any) -> None:
        for adapter, init in inits.items():
            layer.reset_lora_parameters(adapter, init)
            if init is False and adapter in layer.lora_embedding_A:  # no layer, which draws its own
                nn.init.normal_(layer.lora_embedding_A[adapter])
                nn.init.normal_(layer.lora_embedding_B[adapter])
        for magnitudes in layer.lora_magnitude_vector.values():
            weight = layer.get_base_layer().weight
            weight = weight if stored is None else stored(f"{paths[layer]}.base_layer.weight", weight)
            magnitudes.weight.copy_(weight.norm(dim=0 if magnitudes.fan_in_fan_out else 1))

    return {layer: reset for _, layer in adapter_layers(model) if hasattr(layer, "reset_lora_parameters")}
