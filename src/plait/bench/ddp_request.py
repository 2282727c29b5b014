"""Request of a DistributedDataParallel breakdown: validated before any rank starts."""

from dataclasses import dataclass
from typing import Any

from plait.bench.request import check_known, format_bytes, size_or_none
from plait.errors import ConfigError

_POSITIONS = 4096


def _llama(vocabulary: int, hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


MODELS = {
    "tiny": _llama(256, 64, 176, layers=2, heads=2),
    "small": _llama(8192, 512, 1376, layers=8, heads=8),
    "medium": _llama(32000, 768, 2048, layers=12, heads=12),
}
PRECISIONS = {"fp32": None, "bf16": "bfloat16"}  # autocast dtype in torch; gradients are float32
TRANSPORT_CHOICES = {"host": ("host",), "group": ("group",), "both": ("group", "host")}

ONE_BUCKET, PER_PARAMETER = None, 1  # caps: a bucket never fills; every gradient fills one
CAPS = "one,each,1M,5M,25M,50M"
_NAMED_CAPS = {"one": ONE_BUCKET, "each": PER_PARAMETER}

Cap = int | None  # bytes at which a bucket closes


def check_positions(length: int) -> None:
    """Raise ConfigError for a sequence that is longer than the models' positions."""
    if length > _POSITIONS:
        raise ConfigError(
            "the sequence is longer than the model's positions",
            given=f"--sequence {length}",
            expected=f"up to {_POSITIONS}",
            hint=f"--sequence {_POSITIONS}",
        )


@dataclass(frozen=True)
class DdpRequest:
    """A breakdown. `caps` by `parse_caps`; a batch is `sequences` of `length` tokens, on each rank.

    Raises ConfigError for invalid values.
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
                    "nothing to measure", given=f"{flag} {number}", expected="1 or more", hint=f"{flag} 1"
                )
        check_positions(self.length)

    @property
    def variants(self) -> tuple[tuple[str, Cap], ...]:
        """Transports of gradients, and caps, to measure."""
        return tuple((transport, cap) for transport in TRANSPORT_CHOICES[self.transport] for cap in self.caps)


def parse_caps(text: str) -> tuple[Cap, ...]:
    """Return the distinct caps of "one,each,1M,25M": "one" bucket for all gradients, or one for "each"."""
    caps: list[Cap] = []
    for item in (item.strip() for item in text.split(",")):
        size = size_or_none(item)
        if item not in _NAMED_CAPS and size is None:
            raise ConfigError(
                "invalid bucket caps",
                given=f"--caps {text}",
                expected="a comma-separated list of sizes above 0, in bytes, K, M or G, or of one and each",
                hint=f"--caps {CAPS}",
            )
        caps.append(_NAMED_CAPS.get(item, size))
    return tuple(dict.fromkeys(caps))


def cap_label(cap: Cap) -> str:
    """Return the name of a cap for people."""
    if cap is ONE_BUCKET:
        return "no overlap"
    return "per parameter" if cap == PER_PARAMETER else format_bytes(cap)
