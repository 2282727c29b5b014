"""Small checkpoints of one rank, and ways to damage them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait import checkpoint
from plait.checkpoint import Saver, step_path
from plait.comm import World
from plait.parallel.zero.state_io import StateShard

FACTS = {"tokens": 77, "model": {"config": {"hidden_size": 4}}, "data": "ab12"}
FILE = "rank-00000.0.safetensors"


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Tensors like an engine's: views into flat storage, a scalar, several dtypes."""
    flat = torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "weights/a": flat[:12].view(3, 4),
        "weights/b": flat[12:].float(),
        "exp_avg/a": torch.full((3, 4), float(seed), dtype=torch.bfloat16),
        "buffers/empty": torch.empty(0, 7),
        "step": torch.tensor(seed, dtype=torch.int64),
    }


def save(directory: Path, step: int, tensors: Mapping[str, Tensor], **options: Any) -> Path:
    saver = Saver(directory, World.alone(torch.device("cpu")), **options)
    saver.save(step, [StateShard.from_tensor(*each) for each in tensors.items()], FACTS)
    saver.finish()
    return step_path(directory, step)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def read_newest(directory: Path) -> dict[str, Tensor]:
    found = checkpoint.newest(directory)
    assert found is not None
    return found.read()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def values_of(path: Path) -> dict[str, Any]:
    """Contents of a manifest, without its hash."""
    values: dict[str, Any] = json.loads(path.read_text())
    del values["sha256"]
    return values


def seal(path: Path, values: dict[str, Any] | str) -> None:
    """Write a manifest with a valid hash for any contents."""
    body = values if isinstance(values, str) else json.dumps(values)
    body = body.removesuffix("}")
    path.write_text(f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')
