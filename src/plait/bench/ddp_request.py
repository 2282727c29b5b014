"""Which steps of DistributedDataParallel are taken apart: checked, with letters, before a rank starts."""

from dataclasses import dataclass
from typing import Any

import torch

from plait.bench.request import check_known, format_bytes, size_or_none
from plait.errors import ConfigError
from plait.models import causal_lm_on_meta

_POSITIONS = 4096
_LLAMA = {"model_type": "llama", "max_position_embeddings": _POSITIONS, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "small": _LLAMA
    | {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "medium": _LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}  # what autocast computes in; gradients are float32
TRANSPORT_CHOICES = {"host": ("host",), "group": ("group",), "both": ("group", "host")}

ONE, EACH = None, 1  # caps: no bucket is ever full, every gradient fills its own
CAPS = "one,each,1M,5M,25M,50M"
_WORDS = {"one": ONE, "each": EACH}

Cap = int | None  # bytes at which a bucket closes


@dataclass(frozen=True)
class DdpRequest:
    """A breakdown. `caps` by `parse_caps`; a batch is `sequences` of `length` tokens, on each rank.

    Raises ConfigError for what cannot be.
    """

    caps: tuple[Cap, ...]
    transport: str = "both"
    model: str = "small"
    precision: str = "fp32"
    sequences: int = 2
    length: int = 256
    rounds: int = 9

    def __post_init__(self) -> None:
        check_known("--transport", self.transport, TRANSPORT_CHOICES)
        check_known("--model", self.model, MODELS)
        check_known("--precision", self.precision, PRECISIONS)
        for flag, number in (
            ("--batch", self.sequences),
            ("--sequence", self.length),
            ("--rounds", self.rounds),
        ):
            if number < 1:
                raise ConfigError(
                    "there is nothing to measure", given=f"{flag} {number}", expected="1 or more"
                )
        if self.length > _POSITIONS:
            raise ConfigError(
                "the model knows no such position",
                given=f"--sequence {self.length}",
                expected=f"up to {_POSITIONS}",
            )

    @property
    def variants(self) -> tuple[tuple[str, Cap], ...]:
        """What is measured: carriers of gradients, and caps."""
        return tuple((carrier, cap) for carrier in TRANSPORT_CHOICES[self.transport] for cap in self.caps)


def parse_caps(text: str) -> tuple[Cap, ...]:
    """The caps of "one,each,1M,25M", once: "one" bucket has all gradients, or "each" gradient has its own."""
    caps: list[Cap] = []
    for word in (word.strip() for word in text.split(",")):
        size = size_or_none(word)
        if word not in _WORDS and size is None:
            raise ConfigError(
                "these are no caps of buckets",
                given=f"--caps {text}",
                expected="a list with commas, of bytes, K, M or G, above 0, or of the words one and each",
                hint=f"--caps {CAPS}",
            )
        caps.append(_WORDS.get(word, size))
    return tuple(dict.fromkeys(caps))


def cap_label(cap: Cap) -> str:
    """What people call it."""
    if cap is ONE:
        return "no overlap"
    return "per parameter" if cap == EACH else format_bytes(cap)


def check_ddp_memory(request: DdpRequest, local_ranks: int, available: int | None) -> None:
    """Raises ConfigError where the host has less `available` memory than the model and all buckets take."""
    model = causal_lm_on_meta(MODELS[request.model])
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Weights, two states of AdamW, gradients of two passes; and buckets, which every variant keeps.
    needed = local_ranks * weights * (5 + len(request.variants))
    if available is not None and needed > available:
        raise ConfigError(
            "the host has too little memory for the model and its buckets",
            given=f"--model {request.model}, {len(request.variants)} variants on {local_ranks} ranks need "
            f"{shown_bytes(needed)}; {shown_bytes(available)} are available",
            hint="fewer --caps, or --model tiny",
        )
