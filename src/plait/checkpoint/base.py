"""The base model of adapters: its identity, which checkpoints hold in its place, and adapters merged into it.

[Note: identity of a base]
A checkpoint of adapters does not hold the frozen base: a run that resumes reads it again, and an export
merges into it. Another base with the same shapes (a later revision, an instruction-tuned sibling) would load
without an error. So a checkpoint holds a hash of the base's configuration, of the headers and sizes of its
files, and of 64 bytes from the middle of each tensor: fast for a model of any size. Its path is for finding
it: a folder that was moved is the same base. Weights that were drawn have a seed instead of files. A base
that a plan with `base=` rounds is another one: its format is part of the identity.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.checkpoint.checkpoint import Checkpoint
from plait.checkpoint.huggingface import HuggingFaceFiles
from plait.errors import CheckpointError
from plait.models import StateNames, blocks_of, initialize_weights
from plait.models.adapters import AdapterFacts, adapter_layers, attach, merged_weights
from plait.parallel.quantized_base import quantized_weights
from plait.parallel.zero.block_codes import rounded
from plait.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLE_BYTES = 64
_OF_WRITER = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")  # of a configuration


def identity_of_files(files: HuggingFaceFiles) -> dict[str, Any]:
    """The identity of a folder's weights, as JSON: see [Note: identity of a base]. Raises CheckpointError."""
    digest = hashlib.sha256()
    config = files.folder / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        digest.update(_config_text(values))
        for path, header in sorted(files.headers.items(), key=lambda each: each[0].name):
            digest.update(f"{header.file_bytes} {header.num_bytes} {header.crc32}".encode())
            with path.open("rb") as file:
                for key, entry in sorted(header.entries.items()):
                    middle = (entry.start + entry.stop) // 2
                    file.seek(header.num_bytes + middle)
                    size = min(_SAMPLE_BYTES, entry.stop - middle)
                    digest.update(f"{key} {entry.dtype} {entry.shape}".encode() + file.read(size))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the base model cannot be read",
            given=f"{files.folder}: {error}",
            expected="config.json and safetensors that this user can read",
            hint=f"ls -l {files.folder}",
        ) from error
    return {"path": str(files.folder.absolute()), "sha256": digest.hexdigest()}


def identity_of_seed(seed: int, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The identity of weights that are drawn: they follow from the seed and the configuration."""
    return {"seed": seed, "sha256": hashlib.sha256(_config_text(config or {})).hexdigest()}


def _config_text(values: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in values.items() if key not in _OF_WRITER}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def check_same_base(saved: Checkpoint, identity: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless adapters were trained on the base of this identity. A checkpoint that
    holds its base belongs to any engine whose names and shapes it has."""
    expected = saved.facts.get("base")
    if not isinstance(expected, dict) or (
        identity is not None
        and all(expected.get(key) == identity.get(key) for key in ("seed", "sha256", "format"))
    ):
        return
    raise CheckpointError(
        "the adapters were trained on another base model",
        given=f"{saved.path}: {_shown(expected)}; here {_shown(identity)}",
        expected="the same configuration and weights",
        hint=f"base={expected.get('format', 'none')} in the plan; "
        + (f"weights='{expected['path']}'" if "path" in expected else f"seed={expected.get('seed')}"),
    )


def _shown(identity: Mapping[str, Any] | None) -> str:
    if identity is None:
        return "a base that was not read from a folder"
    source = identity.get("path") or f"seed {identity.get('seed')}"
    return f"{source} ({str(identity.get('sha256'))[:12]}), base={identity.get('format', 'none')}"


def adapter_configs(saved: Checkpoint) -> dict[str, dict[str, Any]]:
    """PEFT's configurations of the adapters in a checkpoint, by name; none if it is of another model."""
    configs = saved.facts.get("adapter")
    return configs if isinstance(configs, dict) else {}


def choose_adapter(saved: Checkpoint, adapter: str | None) -> str:
    """Return the name of one of the checkpoint's adapters. Raises CheckpointError."""
    configs = adapter_configs(saved)
    if adapter is None and len(configs) == 1:
        return next(iter(configs))
    if adapter in configs:
        return str(adapter)
    raise CheckpointError(
        "not an adapter of the checkpoint" if configs else "the checkpoint has no adapter",
        given=f"{saved.path}, adapter={adapter}",
        expected=" or ".join(configs) or "a checkpoint of a model that PEFT has wrapped",
        hint=f"--adapter {next(iter(configs))}" if configs else "plait checkpoint convert CHECKPOINT FOLDER",
    )


def adapter_tensors(saved: Checkpoint, base: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The tensors of one of the checkpoint's adapters, by PEFT's keys. `base`: the model, on meta. Raises
    CheckpointError, ModelError."""
    adapted = attach(base, adapter_configs(saved)[adapter], adapter=adapter)
    facts = AdapterFacts.from_model(adapted)
    assert facts is not None, "PEFT has attached an adapter"
    with saved.reader() as reader:
        missing = [name for name in facts.keys[adapter] if f"weights/{name}" not in reader.shapes]
        if missing:
            raise _missing(saved, missing[0])
        tensors = {key: reader.read_full(f"weights/{name}") for name, key in facts.keys[adapter].items()}
        reader.finish()
    return tensors


def _missing(saved: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is of another model",
        given=f"{saved.path}: weights/{name} is missing",
        expected="the adapter that the checkpoint's facts describe",
        hint="--config with the base model's own config.json",
    )


class MergedWeights:
    """A context with the tensors of a model, with a checkpoint's adapter merged into them, each when it is
    read: holds one tensor, or those of one layer with an adapter, at a time."""

    def __init__(
        self,
        saved: Checkpoint,
        base: "PreTrainedModel",
        adapter: str,
        folder: Path | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """`base`: the model without adapters, on meta, which PEFT wraps here. `folder`: of the base, if it is
        not where the checkpoint says. `exact`: a quantized base as its files have it, not as the adapter was
        trained on it. Raises CheckpointError, ModelError."""
        _check_ties(saved, base, adapter)
        adapted = attach(base, adapter_configs(saved)[adapter], adapter=adapter)
        facts = AdapterFacts.from_model(adapted)
        assert facts is not None, "PEFT has attached an adapter"
        self._saved = saved
        self._closing = ExitStack()
        self._reader = self._closing.enter_context(saved.reader())
        self._of_base = self._open_base(adapted, folder)
        form = "none" if exact else Plan.parse(str(saved.facts.get("plan", ""))).base
        weights = () if form == "none" else quantized_weights(adapted, blocks_of(adapted))
        self._formats = {name: form for name, _ in weights}
        self._name_of = {plain: name for name, plain in facts.plain.items()}
        own = facts.keys[adapter]
        self._name_of |= {plain: name for name, plain in facts.plain.items() if name in own}
        layers: dict[str, nn.Module] = {}
        for name, layer in adapter_layers(adapted):  # parents first
            if callable(getattr(layer, "merge", None)) and not any(
                name.startswith(f"{of}.") for of in layers
            ):
                layers[name] = layer
        self._layers, self._plain = layers, facts.plain
        self._merged: dict[str, Tensor] = {}  # of the last layer, by plain name

    def __enter__(self) -> Callable[[str], Tensor]:
        return self.read

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._reader.finish()
        self._closing.close()

    def read(self, plain: str) -> Tensor:
        """Return a tensor by its name in the model without adapters."""
        name = self._name_of[plain]
        path = next((path for path in self._layers if name.startswith(f"{path}.")), None)
        if path is None:
            return self._tensor(name)
        if plain not in self._merged:
            layer = self._layers[path]
            named = [*dict(layer.named_parameters()), *dict(layer.named_buffers())]
            merged = merged_weights(layer, {inner: self._tensor(f"{path}.{inner}") for inner in named})
            module = plain.rpartition(".")[0]
            self._merged = {f"{module}.{inner}": tensor for inner, tensor in merged.items()}
        return self._merged.pop(plain)

    def _tensor(self, name: str) -> Tensor:
        for key in (f"weights/{name}", f"buffers/{name}"):
            if key in self._reader.shapes:
                return self._reader.read_full(key)
        values = self._of_base(name)
        return rounded(values.float(), self._formats[name]) if name in self._formats else values

    def _open_base(self, adapted: nn.Module, folder: Path | None) -> Callable[[str], Tensor]:
        """Return a function that reads a tensor of the base, by its name in the model that PEFT wraps."""
        identity = self._saved.facts.get("base")
        if not isinstance(identity, dict):

            def read_missing(name: str) -> Tensor:
                raise _missing(self._saved, name)

            return read_missing
        if "seed" in identity:
            drawn: dict[str, Tensor] = {}

            def store(name: str, values: Tensor) -> None:
                drawn[name] = values.clone()

            initialize_weights(adapted, int(identity["seed"]), torch.device("cpu"), store)
            return drawn.__getitem__
        files = HuggingFaceFiles.open(folder or Path(str(identity.get("path"))))
        check_same_base(self._saved, {**identity, **identity_of_files(files)})
        reader = files.reader(adapted)
        self._closing.enter_context(reader)
        return lambda name: reader.read_full(f"weights/{name}")


def _check_ties(saved: Checkpoint, base: nn.Module, adapter: str) -> None:
    """Raise CheckpointError if an adapter changes one use of a tied weight: merged, it has one value."""
    config, first = adapter_configs(saved)[adapter], StateNames.from_model(base).first
    names = [*(config.get("target_modules") or ()), *(config.get("modules_to_save") or ())]
    for name in (name for name, of in first.items() if of != name):
        uses = [use.rpartition(".")[0] for use, of in first.items() if of == first[name]]
        changed = [use for use in uses if any(use == one or use.endswith(f".{one}") for one in names)]
        is_copied = {*(config.get("modules_to_save") or ())} and config.get("ensure_weight_tying")
        if changed and not (len(changed) == len(uses) and is_copied):
            raise CheckpointError(
                "an adapter of a tied weight cannot be merged: it changes one of its uses",
                given=f"{saved.path}: an adapter of {changed[0]}; tied: {', '.join(uses)}",
                expected="adapters on weights that the model uses once",
                hint="plait export RUN FOLDER --adapter, for PEFT",
            )
