"""Small models whose weights are compressed, and their files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.models import causal_lm_on_meta
from plait.verify import parse_source

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "qwen3_moe": dict(parse_source("qwen3_moe", layers=2).config),
}


def saved(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a model as transformers does; return its tensors."""
    torch.manual_seed(7)
    model: Any = type(causal_lm_on_meta(config))(causal_lm_on_meta(config).config)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")
