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
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import plait
from plait.comm import World, broadcast_text
from plait.models import causal_lm_on_meta

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Llama:
    """A Llama's configuration, and the tokens of a sequence of its batches."""

    config: dict[str, Any]
    sequence: int

    def on_meta(self, **changes: int) -> Any:
        return causal_lm_on_meta(self.config | changes)

    def with_weights(self) -> nn.Module:
        """The Hugging Face model with the weights that ours starts from."""
        alone = World.alone(torch.device("cpu"))
        weights = plait.parallelize(self.on_meta(), "dp=1", world=alone).full_parameters()
        model: nn.Module = AutoModelForCausalLM.from_config(self.on_meta().config)
        model.load_state_dict(weights)
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
