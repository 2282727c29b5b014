"""Hugging Face directories: into an engine, each rank its part, and out of a checkpoint, piece by piece.

[Note: what is in memory]
Reading, a rank's own part of one tensor at a time. Writing, what belongs together in the files' form: one
tensor, or what transformers makes several of. Headers are made of shapes alone, before a byte is read.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.checkpoint.checkpoint import Checkpoint
from plait.checkpoint.manifest import FORMAT, Chunk, FileFacts, Manifest, TensorFacts
from plait.checkpoint.reader import Reader
from plait.checkpoint.safetensors_format import DTYPES, Entry, Header, encode_header, read_header
from plait.checkpoint.writer import bytes_of
from plait.errors import CheckpointError, RunError
from plait.fileio import sync_folder, sync_tree
from plait.models import SavedGroup, SaveFormat, StateNames, map_file_keys

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
SHARD_BYTES = 5 * 10**9
_INDEX_LIMIT_BYTES = 2**28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")


# --- in


@dataclass(frozen=True)
class HuggingFaceFiles:
    """The safetensors of a directory, whose headers are valid. `entries`: (file, tensor) by key."""

    folder: Path
    headers: Mapping[Path, Header]
    entries: Mapping[str, tuple[Path, Entry]]

    @classmethod
    def open(cls, folder: Path) -> "HuggingFaceFiles":
        """One file, or several with their index. Raises CheckpointError."""
        if not folder.exists():
            raise CheckpointError("no weights to start from", given=f"{folder}, which is not there")
        folder = folder if folder.is_dir() else folder.parent  # a recipe may name the config.json
        if (folder / ONE_FILE).exists():
            shards: dict[str, set[str] | None] = {ONE_FILE: None}
        elif (folder / INDEX).exists():
            shards = dict(_read_index(folder / INDEX))
        else:
            raise CheckpointError(
                "no safetensors to start from", given=folder, expected=f"{ONE_FILE}, or {INDEX} and its files"
            )
        headers, entries = {}, {}
        for name, said in shards.items():
            # A hub's cache is a folder of links: they lead where its owner has let them lead.
            path = (folder / name).resolve()
            headers[path] = read_header(path)
            for key, entry in headers[path].entries.items():
                if said is None or key in said:
                    entries[key] = path, entry
            absent = sorted((said or set()) - headers[path].entries.keys())
            if absent:
                raise CheckpointError("a weight is not where the index says", given=f"{absent[0]} in {path}")
        return cls(folder, headers, entries)

    def direct_read_problem(self, model: nn.Module) -> str | None:
        """Why ranks cannot read their parts of the model where they lie; None: they can."""
        found = self._manifest(model)
        return found if isinstance(found, str) else None

    def reader(self, model: nn.Module) -> Reader:
        """A source of the model's weights and buffers. Raises CheckpointError."""
        found = self._manifest(model)
        if isinstance(found, str):
            raise CheckpointError(
                "these weights cannot be read piece by piece",
                given=f"{self.folder}: {found}",
                expected="every tensor of the model, in the form that the model has it in",
                hint="AutoModelForCausalLM.from_pretrained, and parallelize what it returns",
            )
        return Reader(self.folder, found, has_checksums=False)

    def _manifest(self, model: nn.Module) -> Manifest | str:
        """What the files hold of the model, as if it were a checkpoint; or why it is not so simple."""
        config = getattr(model, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            return "the weights are quantized"
        keys, names = map_file_keys(model, self.entries), StateNames.from_model(model)
        if isinstance(keys, str):
            return keys
        number = {path: place for place, path in enumerate(self.headers)}
        tensors = {}
        for name, key in keys.items():
            path, entry = self.entries[key]
            ours = names.tensors[name]
            if entry.shape != tuple(ours.shape):
                return f"{key} has the shape {entry.shape}, in the model {tuple(ours.shape)}"
            if DTYPES[entry.dtype].is_floating_point != ours.is_floating_point():
                return f"{key} is of dtype {entry.dtype}, in the model {ours.dtype}"
            start, offset = (0,) * len(entry.shape), self.headers[path].num_bytes + entry.start
            chunks = (Chunk(number[path], offset, start, entry.shape, 0),) if ours.numel() else ()
            tensors[names.checkpoint_key(name)] = TensorFacts(
                shape=entry.shape, dtype=entry.dtype, chunks=chunks
            )
        files = {
            str(path): FileFacts(
                bytes=header.file_bytes, header_bytes=header.num_bytes, header_crc32=header.crc32
            )
            for path, header in self.headers.items()
        }
        return Manifest(format=FORMAT, step=0, facts={}, files=files, tensors=tensors)


def _read_index(path: Path) -> Iterator[tuple[str, set[str]]]:
    """The files that an index names, each with its keys."""
    try:
        if path.stat().st_size > _INDEX_LIMIT_BYTES:
            raise CheckpointError("an index of that size is none", given=path)
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        found: dict[str, set[str]] = {}
        for key, name in places:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.100} is not the name of a file in this directory")
            found.setdefault(name, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("the index of weights cannot be read", given=f"{path}: {error}") from error
    yield from found.items()


# --- out


@dataclass(frozen=True)
class _Shard:
    name: str
    groups: Sequence[SavedGroup]

    @property
    def entries(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        at = 0
        for group in self.groups:
            for name, tensor in group.tensors.items():
                found[name] = entry = Entry.of(tensor.dtype, tuple(tensor.shape), at)
                at = entry.stop
        return found


def write_hugging_face(
    found: Checkpoint,
    model: PreTrainedModel,
    out: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
) -> None:
    """Writes a directory from which `AutoModelForCausalLM.from_pretrained` loads the checkpoint's weights.

    `model`: the checkpoint's, on meta. `dtype`: of what is floating, but for what the model keeps in
    float32. `tokenizer`: a directory that is copied into it. Files are of at most `shard_bytes`, or of what
    cannot be divided. All of it or nothing. Raises CheckpointError for another model's checkpoint or a
    damaged one, RunError when `out` exists or cannot be written.
    """
    if out.exists():
        raise RunError("the export's directory exists", given=out, hint="another directory")
    names = StateNames.from_model(model)
    _check_same(found, names)
    form = SaveFormat(model, dtype)
    shards = _shards(form.groups(), shard_bytes)
    partial = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        if tokenizer is not None:
            shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
        _write_configuration(model, dtype, partial)
        with found.reader() as reader:
            for shard in shards:
                _write_shard(partial, shard, form, names, reader)
            reader.finish()
        if len(shards) > 1:
            _write_index(partial / INDEX, shards, model)
        sync_tree(partial)
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise RunError("the export cannot be written", given=f"{out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_same(found: Checkpoint, names: StateNames) -> None:
    theirs = {key: shape for key, shape in found.shapes.items() if key.startswith(("weights/", "buffers/"))}
    ours = {names.checkpoint_key(name): tuple(tensor.shape) for name, tensor in names.tensors.items()}
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key) and 0 not in ours.get(key, ()):
            raise CheckpointError(
                "the checkpoint is of another model",
                given=f"{found.path}: {key} {theirs.get(key, 'missing')}",
                expected=f"{key} {ours.get(key, 'missing')}",
            )


def _shards(groups: Sequence[SavedGroup], limit: int) -> list[_Shard]:
    """Files that hold as many groups as they may."""
    number, used = 0, 0
    placed: list[tuple[int, SavedGroup]] = []
    for group in groups:
        size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in group.tensors.values())
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        placed.append((number, group))
    count = number + 1
    if count == 1:
        return [_Shard(ONE_FILE, groups)]
    return [
        _Shard(f"model-{number + 1:05d}-of-{count:05d}.safetensors", [group for _, group in members])
        for number, members in groupby(placed, lambda each: each[0])
    ]


def _write_configuration(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    """As save_pretrained does it."""
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _write_shard(folder: Path, shard: _Shard, form: SaveFormat, names: StateNames, reader: Reader) -> None:
    entries = shard.entries
    with (folder / shard.name).open("xb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for group in shard.groups:
            for name, data in _convert_group(group, form, names, reader):
                assert len(data) == entries[name].stop - entries[name].start, f"{name} is of another size"
                file.write(data)
                del data  # the next one is not read beside it


def _convert_group(
    group: SavedGroup, form: SaveFormat, names: StateNames, reader: Reader
) -> Iterator[tuple[str, memoryview]]:
    """Of tensors that are saved together, the bytes of each. They are gone before others are read."""
    found = form.convert({name: _read_full(reader, names, first) for name, first in group.names.items()})
    for name in group.tensors:
        yield name, bytes_of(found.pop(name))


def _read_full(reader: Reader, names: StateNames, first: str) -> Tensor:
    if 0 in names.tensors[first].shape:  # a checkpoint has no place for it
        return torch.empty(names.tensors[first].shape)
    return reader.whole(names.checkpoint_key(first))


def _write_index(path: Path, shards: Sequence[_Shard], model: PreTrainedModel) -> None:
    entries = [(shard.name, shard.entries) for shard in shards]
    total = sum(max((entry.stop for entry in of.values()), default=0) for _, of in entries)
    index = {
        "metadata": {"total_parameters": model.num_parameters(), "total_size": total},
        "weight_map": {key: name for name, of in entries for key in of},
    }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
