"""Small causal language models that AutoModelForCausalLM does not build, for `plait verify`.

plait verify --model causal_kinds:musicgen --plan "pp=2"      (in this folder)
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from other_kinds import VOCABULARY, WIDTH, Entry, Kind, integers, numbers, targets

LAYERS, TOKENS, HEADS, CODEBOOKS = 4, 12, 4, 2

# --- models of codebooks of audio: (samples x codebooks) sequences


def _per_codebook(entry: Entry) -> Entry:
    return lambda generator, samples: entry(generator, samples * CODEBOOKS)


def _of_codebooks(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    logits = outputs.logits[:, -labels.shape[1] :]  # Melody puts what it is conditioned on before them
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def _codebooks(name: str) -> Kind:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "ffn_dim": 48, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_codebooks": CODEBOOKS, "max_position_embeddings": 64}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id"), VOCABULARY)  # the last row of the embedding

    def model() -> nn.Module:
        config = getattr(transformers, f"{name}DecoderConfig")(**sizes)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    entries: dict[str, Entry] = {
        "input_ids": _per_codebook(integers(0, VOCABULARY, TOKENS)),
        "encoder_hidden_states": numbers(5, WIDTH),
        "labels": _per_codebook(targets(TOKENS)),
    }
    return Kind("", name, model, entries, _of_codebooks)


KINDS = {
    "musicgen": _codebooks("Musicgen"),
    "musicgen_melody": _codebooks("MusicgenMelody"),
}


def __getattr__(name: str) -> Kind:
    """Return the function `causal_kinds:NAME`."""
    if name in KINDS:
        return KINDS[name]
    raise AttributeError(name)
