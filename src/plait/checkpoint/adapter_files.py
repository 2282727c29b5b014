"""PEFT's files of an adapter: `adapter_model.safetensors` and `adapter_config.json`.

Files whose keys have the name of the adapter, a prefix of torch.compile, or lack PEFT's prefix are loaded by
PEFT with a warning at most, and change nothing. So keys are compared with those that PEFT gives the model.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from plait.errors import CheckpointError, RunError, nearest
from plait.fileio import WRITABLE, disk_hint, read_json, sync_folder, write_json
from plait.models.adapters import ADAPTER, PREFIX

# What changes an adapter's effect on a layer, with PEFT's defaults.
_OF_FUNCTION = {
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_folder(folder: Path, adapter: str) -> Path:
    """The folder of an adapter's files: as in PEFT, a folder in `folder` for all names but `default`."""
    return folder if adapter == ADAPTER else folder / adapter


def check_new_adapter(folder: Path) -> None:
    """Raise RunError if the folder has an adapter."""
    if (folder / CONFIG).exists() or (folder.exists() and not folder.is_dir()):
        raise RunError(
            "the folder has an adapter already",
            given=folder / CONFIG if folder.is_dir() else folder,
            expected="a folder without one",
            hint=f"{folder}-2",
        )


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], base: str | None
) -> None:
    """Write an adapter that PeftModel.from_pretrained loads. Its configuration is written last, so that a
    folder that has one is complete. `tensors`: by PEFT's keys. `base`: the folder of the base model. Raises
    RunError."""
    check_new_adapter(folder)
    values = {**config, "base_model_name_or_path": base, "inference_mode": True}
    partial = folder / f"{WEIGHTS}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(save({key: of.contiguous() for key, of in tensors.items()}, {"format": "pt"}))
            os.fsync(file.fileno())
        partial.rename(folder / WEIGHTS)
        write_json(folder / CONFIG, values)
        sync_folder(folder)
    except OSError as error:
        raise RunError(
            "the adapter cannot be written",
            given=f"{folder}: {error}",
            expected=WRITABLE,
            hint=disk_hint(folder.parent),
        ) from error


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json. Raises CheckpointError."""
    try:
        values = read_json(folder / CONFIG)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the adapter's configuration cannot be read",
            given=f"{folder / CONFIG}: {error}",
            expected=f"a folder of PEFT, with {CONFIG} and {WEIGHTS}",
            hint=f"ls {folder}",
        ) from error
    return values


def check_same_function(source: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless both configurations give the same factors the same effect: these have the
    same keys and shapes with another `lora_alpha`."""
    for key, default in _OF_FUNCTION.items():
        own, other = (config.get(key) or default for config in (expected, found))
        if own != other:
            raise CheckpointError(
                "the adapter computes something else with its weights",
                given=f"{source}: {key}={other}",
                expected=f"{key}={own}, as in the model's adapter",
                hint=f"LoraConfig({key}={other!r}) for the model",
            )


def read_adapter(
    folder: Path, expected: Mapping[str, tuple[int, ...]], ignored: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file by its keys. `expected`: the keys and shapes of the model's
    adapter. `ignored`: keys of weights of the base, which PEFT may save too. Raises CheckpointError."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            _check_keys(path, {k: of for k, of in shapes.items() if k not in ignored}, expected)
            return {key: file.get_tensor(key) for key in expected}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the adapter's weights cannot be read",
            given=f"{path}: {error}",
            expected=f"a folder of PEFT, with {CONFIG} and {WEIGHTS}",
            hint=f"ls {folder}",
        ) from error


def _check_keys(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for key in [*found, *expected]:
        if found.get(key) != expected.get(key):
            near = nearest(key, expected) or next(iter(expected))
            raise CheckpointError(
                "the adapter is of another model or configuration",
                given=f"{path}: {key} {found.get(key, 'missing')}",
                expected=f"{key if key in expected else near} {expected.get(key, expected[near])}",
                hint=_hint(key),
            )


def _hint(key: str) -> str:
    if "_orig_mod." in key:
        return "the keys without _orig_mod., which torch.compile has added"
    if f".{ADAPTER}." in key or key.endswith(f".{ADAPTER}"):
        return f"the keys without the adapter's name .{ADAPTER}, as PEFT's save_pretrained writes them"
    if not key.startswith(PREFIX):
        return f"the keys with the prefix {PREFIX}, as PEFT's save_pretrained writes them"
    return f"the model and the [adapter] that {CONFIG} describes"
