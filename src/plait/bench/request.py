"""What is to be measured: checked, with letters, before a rank starts."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.comm import TRANSPORTS
from plait.errors import ConfigError, unknown_key_hint
from plait.plan.cost_model import COLLECTIVES

DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32")
}
STORAGES = {"owned": ("owned",), "foreign": ("foreign",), "both": ("owned", "foreign")}

BUDGET_S = 30.0  # with the start of the ranks and what comes after, under a minute

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_STEP = 4  # from one size to the next


@dataclass(frozen=True)
class Request:
    """A measurement. Sizes are bytes of whole tensors; `rounds` None: as many as `budget_s` allows.

    Raises ConfigError for what cannot be.
    """

    verbs: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str = "auto"
    dtype: str = "float32"
    storage: str = "owned"
    rounds: int | None = None
    budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("--backend", self.backend, TRANSPORTS),
            ("--dtype", self.dtype, DTYPES),
            ("--storage", self.storage, STORAGES),
        ):
            check_known(flag, given, known)
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError("nothing is measured in no round", given=f"--rounds {self.rounds}", hint="1")
        if not 0 < self.budget_s < float("inf"):
            raise ConfigError("no time to measure in", given=f"--budget {self.budget_s}", expected="seconds")

    @property
    def storages(self) -> tuple[str, ...]:
        return STORAGES[self.storage]


def check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 2:
        raise ConfigError(
            "one rank communicates with nobody", given=f"{num_ranks} ranks", expected="2 or more"
        )


def parse_verbs(given: Sequence[str]) -> tuple[str, ...]:
    """The verbs named, by themselves or with commas between them, in the usual order; all without any."""
    words = [word.strip() for text in given for word in text.split(",")]
    for word in words:
        check_known("--verb", word, COLLECTIVES)
    return tuple(verb for verb in COLLECTIVES if verb in words or not words)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of "1K,64K,3M", or of "1K:256M": from the first by powers of 4, and the last. 1K is 1024."""
    if ":" not in text:
        return tuple(sorted({_parse_size(word, text) for word in text.split(",")}))
    words = text.split(":")
    if len(words) != 2:
        raise _bad_sizes(text)
    least, most = (_parse_size(word, text) for word in words)
    if least > most:
        raise ConfigError(
            "the sizes end before they begin", given=f"--sizes {text}", hint=f"{words[1]}:{words[0]}"
        )
    sizes = []
    while least < most:
        sizes.append(least)
        least *= _STEP
    return (*sizes, most)


def size_of(word: str) -> int | None:
    """Bytes of "64K" or "3MiB"; None for a word that says no size above 0."""
    match = _SIZE.fullmatch(word.strip())
    return (int(match[1]) * _UNITS[match[2].upper()] or None) if match else None


def _parse_size(word: str, text: str) -> int:
    size = size_of(word)
    if size is None:
        raise _bad_sizes(text)
    return size


def _bad_sizes(text: str) -> ConfigError:
    return ConfigError(
        "these are no sizes",
        given=f"--sizes {text}",
        expected="MIN:MAX or a list with commas, of bytes, K, M or G, above 0",
        hint="--sizes 1K:256M or --sizes 1K,64K,3M",
    )


def check_known(flag: str, given: str, known: Collection[str]) -> None:
    """Raises ConfigError for a value of `flag` that is none of the known ones."""
    if given not in known:
        raise ConfigError(
            f"{flag} has a value that nobody knows", given=repr(given), hint=unknown_key_hint(given, known)
        )


def device_for(backend: str, local_ranks: int) -> str:
    """ "cuda" where the ranks of this host get a GPU each, or have to."""
    num_gpus = torch.cuda.device_count()
    if backend == "nccl" and num_gpus < local_ranks:
        raise ConfigError(
            "NCCL takes a GPU per rank",
            given=f"{local_ranks} ranks on a host with {num_gpus} GPUs",
            hint="--backend gloo" if num_gpus < 2 else f"--ranks {num_gpus}",
        )
    may = backend in ("auto", "nccl") and num_gpus >= local_ranks
    return "cuda" if may else "cpu"


def check_memory(request: Request, local_ranks: int, available: int | None) -> None:
    """Raises ConfigError where the host has less `available` memory than the largest size will take."""
    # What is given and what is got, of each storage; as much again in Gloo's buffers.
    tensors = local_ranks * (2 * len(request.storages) + 2)
    largest = max(request.sizes)
    if request.verbs == ("barrier",) or available is None or tensors * largest <= available:
        return
    fitting = max((power for power in range(10, 60, 2) if tensors << power <= available), default=10)
    raise ConfigError(
        "the host has too little memory for the largest size",
        given=f"{shown_bytes(largest)} on {local_ranks} ranks need {shown_bytes(tensors * largest)}; "
        f"{shown_bytes(available)} are available",
        hint=f"--sizes 1K:{shown_bytes(1 << fitting)}",
    )


def available_bytes() -> int | None:
    """Memory that this host, and this container, can still give. None where there is no way to know."""
    found = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def shown_bytes(num_bytes: int) -> str:
    """In the unit that `--sizes` takes: 64K, 1.5G."""
    unit = next((unit for unit in ("T", "G", "M", "K") if num_bytes >= _UNITS[unit]), "")
    return f"{num_bytes / _UNITS[unit]:.4g}{unit}"
