"""The model that the benchmarks train, the same for us and for other libraries."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from plait.comm import World, broadcast_text
from plait.engine.reference import copy_with_values
from plait.models import causal_lm_on_meta, initialize_weights

Batch = dict[str, Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Llama:
    """A Llama's configuration, and the tokens of a sequence of its batches."""

    config: dict[str, Any]
    sequence: int

    def on_meta(self, **changes: int) -> Any:
        return causal_lm_on_meta(self.config | changes)

    def with_weights(self, device: torch.device = CPU) -> nn.Module:
        """The Hugging Face model on the device, with the float32 weights that ours starts from there."""
        model, weights = self.on_meta(), {}
        initialize_weights(model, 0, device, lambda name, values: weights.update({name: values.clone()}))
        model = copy_with_values(model, weights, dict(model.named_buffers()), torch.float32, device)
        model.config.use_cache = False
        return model

    def batch(self, sequences: int) -> Batch:
        """Random tokens, from torch's generator."""
        ids = torch.randint(0, self.config["vocab_size"], (sequences, self.sequence))
        return {"input_ids": ids, "labels": ids}


# 33.7 M parameters; and a toy for --smallest.
LLAMA = Llama(
    {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    sequence=256,
)
TOY = Llama(
    LLAMA.config
    | {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    },
    sequence=16,
)


def llama_of(arguments: argparse.Namespace) -> Llama:
    return TOY if arguments.smallest else LLAMA


@contextlib.contextmanager
def weights_folder(model: Llama, world: World) -> Iterator[Path]:
    """A folder with the model and the weights that ours starts from, for libraries that load them."""
    logging.disable_progress_bar()  # of weights that are written and read
    with contextlib.ExitStack() as stack:
        name = ""
        if world.rank == 0:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-bench-"))
            model.with_weights().save_pretrained(name)
        yield Path(broadcast_text(0, name, world.group, world.device))
        world.barrier()
