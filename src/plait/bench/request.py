"""Requests of measurements: validated before any rank starts."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, nearest
from plait.plan.collectives import ALGORITHMS, is_power_of_two
from plait.plan.cost_model import COLLECTIVES, TCP_LINK, TRANSPORTS, best_segments

# Algorithms of each collective besides "auto", the transport's own. Halving needs a power of two of ranks,
# except for an all-reduce.
ALGORITHMS_OF = {
    "all-reduce": ALGORITHMS,
    "reduce-scatter": ("ring", "halving"),
    "all-gather": ("ring", "halving"),
    "broadcast": ("naive", "tree", "chain"),
}
ALGORITHM_CHOICES = ("auto", *ALGORITHMS, "chain")
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32")  # names in torch
STORAGES = {"owned": ("owned",), "foreign": ("foreign",), "both": ("owned", "foreign")}

BUDGET_S = 30.0  # under a minute with startup and shutdown

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SEGMENTS = re.compile(r"chain:[1-9]\d{0,5}")
_STEP = 4  # from one size to the next


@dataclass(frozen=True)
class Request:
    """A measurement. Sizes are bytes of full tensors; `rounds` None: as many as `budget_s` allows.

    Raises ConfigError for invalid values.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str = "auto"
    dtype: str = "float32"
    storage: str = "owned"
    rounds: int | None = None
    budget_s: float = BUDGET_S
    algorithms: tuple[str, ...] = ("auto",)

    def __post_init__(self) -> None:
        for flag, value, choices in (
            ("--transport", self.backend, TRANSPORTS),
            ("--dtype", self.dtype, DTYPES),
            ("--storage", self.storage, STORAGES),
        ):
            check_known(flag, value, choices)
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(
                "at least one round must be measured",
                given=f"--rounds {self.rounds}",
                expected="1 or more",
                hint="--rounds 1",
            )
        if not 0 < self.budget_s < float("inf"):
            raise ConfigError(
                "the time budget must be positive",
                given=f"--budget {self.budget_s}",
                expected="a number of seconds above 0",
                hint="--budget 60",
            )

    def algorithms_of(self, collective: str, num_ranks: int) -> tuple[str, ...]:
        """The requested algorithms of a collective of `num_ranks`; if it has none, the transport's own."""
        if collective not in ALGORITHMS_OF:
            return ("auto",)
        known = ALGORITHMS_OF[collective]
        if collective != "all-reduce" and not is_power_of_two(num_ranks):
            known = tuple(name for name in known if name != "halving")
        return tuple(name for name in self.algorithms if name == "auto" or name.split(":")[0] in known)

    @property
    def storages(self) -> tuple[str, ...]:
        return STORAGES[self.storage]


def check_num_ranks(num_ranks: int, least: int = 2) -> None:
    if num_ranks < least:
        raise ConfigError(
            "a benchmark of communication needs several ranks"
            if least > 1
            else "there is no rank to measure",
            given=f"{num_ranks} ranks",
            expected=f"{least} or more",
            hint=f"--ranks {least}",
        )


def parse_collectives(values: Sequence[str]) -> tuple[str, ...]:
    """Return the named collectives (separate or comma-separated) in canonical order; all if none is named."""
    items = [item.strip() for text in values for item in text.split(",")]
    for item in items:
        check_known("--collective", item, COLLECTIVES)
    return tuple(collective for collective in COLLECTIVES if collective in items or not items)


def parse_algorithms(text: str) -> tuple[str, ...]:
    """Return the algorithms of "auto,ring,chain:8", each once."""
    items = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
    for item in items:
        check_known("--algorithm", "chain" if _SEGMENTS.fullmatch(item) else item, ALGORITHM_CHOICES)
    return items


def split_algorithm(name: str, num_bytes: int, num_ranks: int) -> tuple[str, int]:
    """Return an algorithm, and the segments of a chain: of "chain:8" eight, of "chain" as many as are best
    between hosts."""
    kind, _, segments = name.partition(":")
    best = best_segments(num_bytes, num_ranks, TCP_LINK.latency_s, TCP_LINK.bytes_per_s)
    return kind, int(segments) if segments else best


def check_algorithms(request: Request, num_ranks: int, device: str) -> None:
    """Raise ConfigError if a named algorithm cannot run there, or there is nothing to measure."""
    named = [name for name in request.algorithms if name != "auto"]
    if named and device != "cpu":
        raise ConfigError(
            "named algorithms are for CPU ranks",
            given=f"--algorithm {','.join(named)} on {device}",
            expected="CPU ranks for a named algorithm; NCCL selects its own",
            hint="no --algorithm, or --transport gloo",
        )
    known = [each for each in request.collectives if each in ALGORITHMS_OF]
    if "auto" not in request.algorithms and not any(request.algorithms_of(each, num_ranks) for each in known):
        raise ConfigError(
            "no requested collective has a requested algorithm",
            given=f"--algorithm {','.join(named)}, {num_ranks} ranks, {', '.join(request.collectives)}",
            expected="; ".join(f"{each}: {', '.join(ALGORITHMS_OF[each])}" for each in known)
            or f"one of {', '.join(ALGORITHMS_OF)}",
            hint="no --algorithm",
        )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the bytes of "1K,64K,3M", or of "1K:256M": powers of 4 from the first, and the last. K: 1024."""
    is_range = ":" in text
    items = text.split(":" if is_range else ",")
    sizes = [size for item in items if (size := size_or_none(item)) is not None]
    if len(sizes) < len(items) or (is_range and len(items) != 2):
        raise ConfigError(
            "invalid sizes",
            given=f"--sizes {text}",
            expected="MIN:MAX or a comma-separated list, in bytes, K, M or G, above 0",
            hint="--sizes 1K:256M or --sizes 1K,64K,3M",
        )
    if not is_range:
        return tuple(sorted(set(sizes)))
    size, max_bytes = sizes
    if size > max_bytes:
        raise ConfigError(
            "the last size is less than the first",
            given=f"--sizes {text}",
            expected="MIN:MAX",
            hint=f"{items[1]}:{items[0]}",
        )
    sizes = []
    while size < max_bytes:
        sizes.append(size)
        size *= _STEP
    return (*sizes, max_bytes)


def size_or_none(item: str) -> int | None:
    """Return the bytes of "64K" or "3MiB"; None for anything but a size above 0."""
    match = _SIZE.fullmatch(item.strip())
    return (int(match[1]) * _UNITS[match[2].upper()] or None) if match else None


def check_known(flag: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError unless the value of `flag` is one of the choices."""
    if value not in choices:
        raise ConfigError(
            f"unknown value of {flag}",
            given=repr(value),
            expected="one of " + ", ".join(sorted(choices)),
            hint=nearest(value, choices) or min(choices),
        )


def check_memory(request: Request, local_ranks: int, available: int | None) -> None:
    """Raise ConfigError if the largest size needs more than the host's `available` memory."""
    # Inputs and outputs, of each storage; as much again in Gloo's buffers.
    copies = local_ranks * (2 * len(request.storages) + 2)
    max_bytes = max(request.sizes)
    if request.collectives == ("barrier",) or available is None or copies * max_bytes <= available:
        return
    fitting = max((power for power in range(10, 60, 2) if copies << power <= available), default=10)
    raise ConfigError(
        "too little memory for the largest size",
        given=f"{format_bytes(max_bytes)} on {local_ranks} ranks need {format_bytes(copies * max_bytes)}; "
        f"{format_bytes(available)} are available",
        expected="inputs, outputs and buffers of all local ranks in memory",
        hint=f"--sizes 1K:{format_bytes(1 << fitting)}",
    )


def available_bytes() -> int | None:
    """Return the memory available on this host and in this container. None if unknown."""
    limits = []
    for line in _read_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    limit, used = (
        _read_text("/sys/fs/cgroup/memory.max").strip(),
        _read_text("/sys/fs/cgroup/memory.current").strip(),
    )
    if limit.isdigit() and used.isdigit():
        limits.append(max(0, int(limit) - int(used)))
    return min(limits, default=None)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def format_bytes(num_bytes: int) -> str:
    """Format in the units of `--sizes`: 64K, 1.5G."""
    unit = next((unit for unit in ("T", "G", "M", "K") if num_bytes >= _UNITS[unit]), "")
    return f"{num_bytes / _UNITS[unit]:.4g}{unit}"


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
