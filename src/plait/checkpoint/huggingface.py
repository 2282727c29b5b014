"""Hugging Face directories: reading each rank's shards, and writing from a checkpoint.

[Note: peak memory]
Reading holds a rank's own shard of one tensor at a time. Writing holds one group of tensors that are saved
together: one tensor, or the several that transformers makes of one. Headers are computed from shapes alone,
before any data is read.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.checkpoint.checkpoint import Checkpoint
from plait.checkpoint.compress import (
    CompressedFormat,
    Compression,
    Quantization,
    QuantizedPart,
    QuantizedReader,
    quantized_weights,
)
from plait.checkpoint.manifest import (
    FORMAT,
    Chunk,
    FileFacts,
    Manifest,
    TensorFacts,
    tensor_problems,
)
from plait.checkpoint.reader import Reader
from plait.checkpoint.safetensors_format import DTYPES, Header, TensorEntry, encode_header, read_header
from plait.checkpoint.writer import bytes_of
from plait.errors import CheckpointError, RunError
from plait.fileio import (
    WRITABLE,
    copy_regular,
    disk_hint,
    read_json,
    sync_folder,
    sync_tree,
    temporary_folder,
    write_json,
)
from plait.models import FileKeys, SavedGroup, StateNames, map_file_keys, read_config
from plait.plan import Box

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
SHARD_BYTES = 5 * 10**9
_INDEX_LIMIT_BYTES = 2**28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")


# --- reading


@dataclass(frozen=True)
class HuggingFaceFiles:
    """The safetensors files of a directory, with valid headers. `entries`: (file, tensor) by key."""

    folder: Path
    headers: Mapping[Path, Header]
    entries: Mapping[str, tuple[Path, TensorEntry]]

    @classmethod
    def open(cls, folder: Path) -> "HuggingFaceFiles":
        """Open one file, or several with their index. Raises CheckpointError."""
        if not folder.exists():
            raise CheckpointError(
                "no weights to start from",
                given=folder,
                expected="an existing folder of safetensors",
                hint="plait train RECIPE, which writes them to RUN/export; make demo, for runs/demo/export",
            )
        folder = folder if folder.is_dir() else folder.parent  # a recipe may name the config.json
        if (folder / ONE_FILE).exists():
            shards: dict[str, set[str] | None] = {ONE_FILE: None}
        elif (folder / INDEX).exists():
            shards = dict(_read_index(folder / INDEX))
        else:
            raise CheckpointError(
                "no safetensors to start from",
                given=folder,
                expected=f"{ONE_FILE}, or {INDEX} and its files",
                hint="model.save_pretrained(FOLDER), which writes safetensors",
            )
        headers, entries = {}, {}
        for name, listed in shards.items():
            # The hub's cache is a folder of symbolic links: follow them, they are its owner's.
            path = (folder / name).resolve()
            headers[path] = read_header(path)
            for key, entry in headers[path].entries.items():
                if listed is None or key in listed:
                    entries[key] = path, entry
            missing = sorted((listed or set()) - headers[path].entries.keys())
            if missing:
                raise CheckpointError(
                    "a weight is not in the file that the index lists",
                    given=f"{missing[0]} in {path}",
                    expected="every weight of the index in its file",
                    hint=f"copy {path.name} again, from where the folder was copied",
                )
        return cls(folder, headers, entries)

    @functools.cached_property
    def _file_index(self) -> dict[Path, int]:
        return {path: index for index, path in enumerate(self.headers)}

    def direct_read_problem(self, model: nn.Module) -> str | None:
        """The reason why ranks cannot read their shards directly from the files; None if they can."""
        contents = self._contents(model)
        return contents if isinstance(contents, str) else None

    def reader(self, model: nn.Module) -> Reader | QuantizedReader:
        """Return a reader of the model's weights and buffers. Raises CheckpointError, ModelError."""
        contents = self._contents(model)
        if isinstance(contents, str):
            raise CheckpointError(
                "these weights cannot be read in shards",
                given=f"{self.folder}: {contents}",
                expected="every tensor of the model, in the model's form",
                hint="AutoModelForCausalLM.from_pretrained, then parallelize the model",
            )
        tensors, quantized = contents
        files = {
            str(path): FileFacts(bytes=of.file_bytes, header_bytes=of.num_bytes, header_crc32=of.crc32)
            for path, of in self.headers.items()
        }
        manifest = Manifest(format=FORMAT, step=0, facts={}, files=files, tensors=tensors)
        reader, form = Reader(self.folder, manifest, has_checksums=False), self._quantization()
        return QuantizedReader(reader, form, quantized) if isinstance(form, Quantization) else reader

    def _quantization(self) -> Quantization | str | None:
        config = self.folder / "config.json"
        return Quantization.of_config(read_config(config)) if config.is_file() else None

    def _contents(
        self, model: nn.Module
    ) -> tuple[dict[str, TensorFacts], dict[str, list[QuantizedPart]]] | str:
        """Return where the tensors are in the files, by key: those of the model that are stored, with codes
        and scales, and the parts of those that are quantized. Or why that is not possible."""
        form = self._quantization()
        if isinstance(form, str):
            return f"the weights are quantized by {form}"
        coded = {} if form is None else quantized_weights(self.entries)
        of_coded = {key for each in coded.values() for key in each}
        keys = map_file_keys(model, [*(key for key in self.entries if key not in of_coded), *coded])
        if isinstance(keys, str):
            return keys
        names, tensors = StateNames.from_model(model), dict[str, TensorFacts]()
        quantized = dict[str, list[QuantizedPart]]()
        for name, parts in keys.items():
            tensor, key = names.tensors[name], names.checkpoint_key(name)
            entries = {
                each: self.entries[coded.get(each, (each,))[0]] for of in parts.by_source for each in of
            }
            if form is not None and not coded.keys().isdisjoint(entries):
                found = self._quantized_facts(entries, coded, tensor, form)
                if isinstance(found, str):
                    return found
                stored, entries = found
                tensors |= stored
                shapes = {each: entry.shape for each, (_, entry) in entries.items()}
                quantized[key] = [QuantizedPart.at(box, each) for each, box in parts.boxes(shapes)]
            facts = self._facts(parts, tensor, entries)
            if isinstance(facts, str):
                return facts
            if key not in quantized:
                tensors[key] = facts
        for copy, name in names.copies.items():
            to, of = names.checkpoint_key(copy), names.checkpoint_key(name)
            if of in quantized:
                quantized[to] = quantized[of]
            else:
                tensors[to] = tensors[of]
        return tensors, quantized

    def _facts(
        self, parts: FileKeys, tensor: Tensor, entries: Mapping[str, tuple[Path, TensorEntry]]
    ) -> TensorFacts | str:
        """Return where a tensor of the model is in the files, or why it cannot be read."""
        shapes = {key: entry.shape for key, (_, entry) in entries.items()}
        chunks, dtypes = list[Chunk](), dict[str, str]()
        for key, box in parts.boxes(shapes):
            dtypes[entries[key][1].dtype] = key
            chunks += [self._chunk(*entries[key], box)] * bool(box.numel)
        facts = TensorFacts(shape=tuple(tensor.shape), dtype=min(dtypes), chunks=tuple(chunks))
        if any(tensor_problems("", facts, len(self.headers))):
            first = parts.by_source[0][0] if parts.by_source[0] else parts.by_source[-1][0]
            return f"{first} has the shape {shapes[first]}, in the model {facts.shape}"
        for dtype, key in dtypes.items():
            if len(dtypes) > 1 or DTYPES[dtype].is_floating_point != tensor.is_floating_point():
                return f"{key} is of dtype {dtype}, in the model {tensor.dtype}"
        return facts

    def _quantized_facts(
        self,
        entries: Mapping[str, tuple[Path, TensorEntry]],
        coded: Mapping[str, Sequence[str]],
        tensor: Tensor,
        form: Quantization,
    ) -> tuple[dict[str, TensorFacts], dict[str, tuple[Path, TensorEntry]]] | str:
        """Return where codes and scales of these weights of a tensor of the model are, and the weights as if
        they were not quantized; or why they cannot be read."""
        stored, weights = dict[str, TensorFacts](), dict[str, tuple[Path, TensorEntry]]()
        for name, (path, codes) in entries.items():
            if name not in coded:
                return f"{name} is not quantized, and others of its tensor are"
            file_of_scales, scales = self.entries[coded[name][1]]
            shape = (*codes.shape[:1], *tensor.shape[-1:])
            if problem := form.problem(shape, codes, scales):
                return f"{name}: {problem}"
            weights[name] = path, codes._replace(dtype=scales.dtype, shape=shape)
            part = QuantizedPart.at(Box.full(shape), name)
            for key, file, entry in ((part.codes, path, codes), (part.scales, file_of_scales, scales)):
                chunk = self._chunk(file, entry, Box.full(entry.shape))
                stored[key] = TensorFacts(shape=entry.shape, dtype=entry.dtype, chunks=(chunk,))
        return stored, weights

    def _chunk(self, path: Path, entry: TensorEntry, box: Box) -> Chunk:
        """The place of a tensor of the files in one of the model."""
        offset = self.headers[path].num_bytes + entry.start
        return Chunk(self._file_index[path], offset, box.start, box.stop, 0)


def _read_index(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield the files in an index, each with its keys."""
    try:
        weight_map = read_json(path, _INDEX_LIMIT_BYTES)["weight_map"].items()
        keys: dict[str, set[str]] = {}
        for key, name in weight_map:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.100} is not the name of a file in this directory")
            keys.setdefault(name, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the index of weights cannot be read",
            given=f"{path}: {error}",
            expected="the JSON of save_pretrained, with weight_map",
            hint=f"copy {path.name} again, from where the folder was copied",
        ) from error
    yield from keys.items()


# --- writing


@dataclass(frozen=True)
class _Shard:
    name: str
    groups: Sequence[SavedGroup]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        offset = 0
        for group in self.groups:
            for name, tensor in group.tensors.items():
                entries[name] = entry = TensorEntry.from_start(tensor.dtype, tuple(tensor.shape), offset)
                offset = entry.stop
        return entries


@contextmanager
def checkpoint_weights(checkpoint: Checkpoint, model: nn.Module) -> Iterator[Callable[[str], Tensor]]:
    """A context with the function that reads a tensor of the checkpoint by its first name in the model.
    Raises CheckpointError for another model's checkpoint, or on exit if the data read is damaged."""
    names = StateNames.from_model(model)
    _check_same(checkpoint, names)
    with checkpoint.reader() as reader:
        yield functools.partial(_read_full, reader, names)
        reader.finish()


def write_hugging_face(
    weights: AbstractContextManager[Callable[[str], Tensor]],
    model: "PreTrainedModel",
    out: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    compression: Compression | None = None,
) -> None:
    """Write a directory from which `AutoModelForCausalLM.from_pretrained` loads the weights.

    `weights`: see `checkpoint_weights`. `model`: whose weights they are, on meta. `dtype`: of floating-point
    tensors, except those that the model keeps in float32. `tokenizer`: a directory that is copied into it.
    `generation`: the contents of generation_config.json; None for the model's. Files have at most
    `shard_bytes`, or one group of tensors. The directory is created complete or not at all. Raises
    CheckpointError for another model's checkpoint or a damaged one, RunError if `out` exists or cannot be
    written.
    """
    if out.exists():
        raise RunError(
            "the export's directory exists",
            given=out,
            expected="a directory that does not exist yet",
            hint=f"{out}-2",
        )
    form = CompressedFormat(model, dtype, compression or Compression())
    shards = _shards(form.groups(), shard_bytes)
    try:
        with temporary_folder(out) as partial:
            if tokenizer is not None:
                shutil.copytree(tokenizer, partial, dirs_exist_ok=True, copy_function=copy_regular)
            _write_configuration(model, dtype, generation, partial)
            with weights as read:
                for shard in shards:
                    _write_shard(partial, shard, form, read)
            if len(shards) > 1:
                _write_index(partial / INDEX, shards, model)
            sync_tree(partial)
            partial.rename(out)
            sync_folder(out.absolute().parent)
    except OSError as error:
        raise RunError(
            "the export cannot be written",
            given=f"{out}: {error}",
            expected=WRITABLE,
            hint=disk_hint(out.parent),
        ) from error


def _check_same(checkpoint: Checkpoint, names: StateNames) -> None:
    tensors = checkpoint.manifest.tensors.items()
    saved = {key: facts.shape for key, facts in tensors if key.startswith(("weights/", "buffers/"))}
    expected = {names.checkpoint_key(name): tuple(tensor.shape) for name, tensor in names.tensors.items()}
    for key in [*expected, *saved]:
        if expected.get(key) != saved.get(key) and 0 not in expected.get(key, ()):
            raise CheckpointError(
                "the checkpoint is of another model",
                given=f"{checkpoint.path}: {key} {saved.get(key, 'missing')}",
                expected=f"{key} {expected.get(key, 'missing')}",
                hint="--config with the model's own config.json",
            )


def _shards(groups: Sequence[SavedGroup], limit: int) -> list[_Shard]:
    used = 0
    files: list[list[SavedGroup]] = [[]]
    for group in groups:
        size = sum(tensor.nbytes for tensor in group.tensors.values())
        if used and used + size > limit:
            files.append([])
            used = 0
        used += size
        files[-1].append(group)
    if len(files) == 1:
        return [_Shard(ONE_FILE, groups)]
    return [
        _Shard(f"model-{number:05d}-of-{len(files):05d}.safetensors", members)
        for number, members in enumerate(files, start=1)
    ]


def _write_configuration(
    model: "PreTrainedModel", dtype: torch.dtype, generation: Mapping[str, Any] | None, folder: Path
) -> None:
    """Write the configuration files as `save_pretrained` does."""
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if generation is not None:
        write_json(folder / "generation_config.json", dict(generation))
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _write_shard(folder: Path, shard: _Shard, form: CompressedFormat, read: Callable[[str], Tensor]) -> None:
    entries = shard.entries
    with (folder / shard.name).open("xb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for group in shard.groups:
            tensors = form.convert({name: read(first) for name, first in group.names.items()})
            for name in group.tensors:
                data = bytes_of(tensors.pop(name))
                assert len(data) == entries[name].stop - entries[name].start, f"{name} has another size"
                file.write(data)
                del data  # free it before the next one is read


def _read_full(reader: Reader, names: StateNames, first: str) -> Tensor:
    if 0 in names.tensors[first].shape:  # not in the checkpoint
        return torch.empty(names.tensors[first].shape)
    return reader.read_full(names.checkpoint_key(first))


def _write_index(path: Path, shards: Sequence[_Shard], model: "PreTrainedModel") -> None:
    entries = [(shard.name, shard.entries) for shard in shards]
    total = sum(max((entry.stop for entry in of.values()), default=0) for _, of in entries)
    index = {
        "metadata": {"total_parameters": model.num_parameters(), "total_size": total},
        "weight_map": {key: name for name, of in entries for key in of},
    }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
