"""Models with frozen weights of which every shard of a small grid has complete blocks of 64 elements."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support import hf_models, programs

SIZES = {"hidden": 128, "ffn": 256}


def frozen_llama(on_meta: bool = True) -> nn.Module:
    """Without adapters: norms, the embedding and the head train."""
    model = programs.llama(on_meta=on_meta, **SIZES)
    for block in model.model.layers:  # type: ignore[union-attr,attr-defined]
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.requires_grad_(False)
    return model


def lora_llama(
    *, on_meta: bool = False, targets: str = "all-linear", layers: int = 2, **options: Any
) -> nn.Module:
    """With adapters of rank 4, and values of its own."""
    assert not on_meta, "adapters have values"
    torch.manual_seed(5)
    model = programs.llama(on_meta=False, layers=layers, **SIZES)
    return adapted(model, targets, **options)


def adapted(model: nn.Module, targets: Any, **options: Any) -> nn.Module:
    import peft  # noqa: PLC0415 - takes seconds

    names = targets if targets == "all-linear" else targets.split()
    config = peft.LoraConfig(
        r=4, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of transformers and PEFT, about names
        found: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.get_default_dtype())
    return found


def lora_mixtral(*, on_meta: bool = False) -> nn.Module:
    """With frozen experts in tensors of three dims, and adapters of attention."""
    assert not on_meta, "adapters have values"
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    model = hf_models.model_of("mixtral", on_meta=False, **sizes, num_key_value_heads=2)
    return adapted(model, "q_proj k_proj v_proj o_proj")


def task(build: Callable[..., nn.Module], **options: Any) -> programs.Task:
    """Three steps of a model; `options` of the task."""
    return programs.Task(build, steps=3, **options)
