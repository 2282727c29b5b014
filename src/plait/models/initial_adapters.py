"""Initial values of peft's adapters in a model on meta, where peft's own are lost.

[Note: initial adapters]
They are peft's by default: A uniform with the fan of the full matrix, B zero (LoRA, Hu et al. 2106.09685,
section 4.1), of embeddings the reverse; magnitudes are the norms of the layer's weight (DoRA, Liu et al.
2402.09353, section 4). Matrices are full while they are drawn, and seeded by the layer's name, so that values
do not depend on a plan. A layer comes after the ones in it: it replaces what the model has given to these.
"""

import math
from typing import Any

from torch import nn

from plait.errors import ModelError


def is_adapted(module: nn.Module) -> bool:
    """Return whether it is a layer of peft with LoRA."""
    return type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_embedding_A")


def reset_adapters(module: Any) -> None:
    """Set the adapters of a layer: [Note: initial adapters]."""
    for key, factor in module.lora_A.items():
        nn.init.kaiming_uniform_(factor.weight, a=math.sqrt(5))
        for values in module.lora_B[key].parameters():
            nn.init.zeros_(values)
    for key, values in module.lora_embedding_A.items():
        nn.init.zeros_(values)
        nn.init.normal_(module.lora_embedding_B[key])
    for magnitudes in module.lora_magnitude_vector.values():
        weight = module.get_base_layer().weight
        magnitudes.weight.copy_(weight.norm(dim=0 if magnitudes.fan_in_fan_out else 1))


def check_initial_adapters(model: nn.Module) -> None:
    """Raise ModelError for adapters that are to have other initial values."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            if (given := getattr(config, "init_lora_weights", True)) is not True:
                raise ModelError(
                    "a model on meta cannot have these initial adapters",
                    given=f"init_lora_weights={given!r}",
                    expected="init_lora_weights=True: A uniform, B zero",
                    hint="the model with its weights, in place of one on meta",
                )
