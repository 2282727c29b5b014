"""Checkpoints: whole tensors in safetensors beside a JSON manifest; complete and verified, or ignored.

    checkpoints/step-00000120/weights.safetensors    tensors named weights/* and buffers/*
                              optimizer.safetensors  all others
                              manifest.json          what it is of, every tensor, every file's hash

[Note: how a checkpoint becomes complete] All files are written into `step-00000120.tmp-<random>` and
synced to the disk, the directory too; only then is it renamed, which the file system does wholly or
not at all, and the parent directory is synced. A process killed at any instant leaves the earlier
checkpoints as they were, and at most a `.tmp-` directory that nobody reads and the next save removes.

Nothing here runs code from a file: the manifest is JSON of bounded size checked against a schema, and
its own hash is part of it; the tensors are used only when their file has the size and the hash that
the manifest says.
"""

import errno
import hashlib
import json
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.errors import CheckpointError
from plait.files import plain_file_bytes, sync_folder, sync_tree

MANIFEST = "manifest.json"
_MANIFEST_LIMIT_BYTES = 256 * 2**20
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileFacts(_Strict):
    bytes: int
    sha256: str


class TensorFacts(_Strict):
    file: str
    shape: tuple[int, ...]
    dtype: str


class Manifest(_Strict):
    """What stands in manifest.json. `facts` are the writer's own: step, seed, plan, model, data..."""

    format: Literal["plait checkpoint 1"]
    step: int
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]
    sha256: str  # of this manifest without this key

    def own_hash(self) -> str:
        return _hash_of_facts(self.model_dump(exclude={"sha256"}))


def _hash_of_facts(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- writing


def save(
    directory: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, keep_last: int
) -> Path:
    """Writes the checkpoint of `step` under `directory`, removes all but the newest `keep_last`; its path.

    `facts` is JSON. See [Note: how a checkpoint becomes complete]. Raises CheckpointError when the disk
    is full or cannot be written; the earlier checkpoints then stand as they stood.
    """
    assert keep_last >= 1, "a save that keeps nothing"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_partial(directory)
        _check_space(directory, tensors)
        partial = _aside(directory / f"step-{step:08d}")
        partial.mkdir()
        try:
            _write(partial, step, tensors, facts)
            final = _put_in_place(partial, directory / f"step-{step:08d}")
        except BaseException:  # Ctrl-C too: what is half-written goes
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except (OSError, safetensors.SafetensorError) as error:
        raise _write_error(error, directory, step) from error
    for old in steps(directory)[:-keep_last]:
        _remove(old)
    return final


def _write(partial: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        file = "weights.safetensors" if name.startswith(("weights/", "buffers/")) else "optimizer.safetensors"
        by_file.setdefault(file, {})[name] = tensor.detach().cpu().contiguous()
    for file, content in by_file.items():
        save_file(content, partial / file)
    manifest = {
        "format": "plait checkpoint 1",
        "step": step,
        "facts": dict(facts),
        "files": {
            file: {"bytes": (partial / file).stat().st_size, "sha256": _hash(partial / file)}
            for file in by_file
        },
        "tensors": {
            name: {"file": file, "shape": list(tensor.shape), "dtype": _dtype_name(tensor.dtype)}
            for file, content in by_file.items()
            for name, tensor in content.items()
        },
    }
    manifest = json.loads(json.dumps(manifest))  # as a reader will find it: what the hash is of
    text = json.dumps(manifest | {"sha256": _hash_of_facts(manifest)}, indent=1)
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    sync_tree(partial)


def _put_in_place(partial: Path, final: Path) -> Path:
    """A directory cannot replace one: what an earlier try left goes aside, and away when ours is in place."""
    aside = _aside(final) if final.exists() else None
    try:
        if aside is not None:
            final.rename(aside)
        partial.rename(final)
    except OSError:
        if aside is not None and aside.exists():
            aside.rename(final)
        raise
    sync_folder(final.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def remove_partial(directory: Path) -> None:
    """Removes what saves that were killed have left."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Renamed first: a removal that is killed half-way leaves no half of a checkpoint under its name.

    One that stays costs disk and nothing else: no reason to end a run.
    """
    doomed = _aside(checkpoint)
    try:
        checkpoint.rename(doomed)
    except OSError as error:
        warnings.warn(f"an old checkpoint cannot be removed: {error}", stacklevel=3)
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _aside(checkpoint: Path) -> Path:
    """A name under which nobody reads it and the next save removes it."""
    return checkpoint.with_name(f"{checkpoint.name}.tmp-{secrets.token_hex(4)}")


def _check_space(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    need_bytes = sum(tensor.numel() * tensor.element_size() + 512 for tensor in tensors.values()) + 2**20
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < need_bytes:
        raise CheckpointError(
            "not enough disk for a checkpoint",
            given=f"{free_bytes / 2**20:.0f} MiB free at {directory}",
            expected=f"{need_bytes / 2**20:.0f} MiB",
            hint="free some space, or a smaller run.keep_last, then --resume: the last checkpoint is whole",
        )


def _write_error(error: Exception, directory: Path, step: int) -> CheckpointError:
    full = any(text in str(error) for text in ("No space left", "File too large", "Disk quota"))
    full = full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return CheckpointError(
        "not enough disk for a checkpoint" if full else "a checkpoint cannot be written",
        given=f"step {step} in {directory}: {error}",
        hint="free some space, then --resume: the checkpoints before this one are whole" if full else None,
    )


# --- reading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is valid. `read` verifies the files before it uses them."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    def check_same(self, fact: str, value: object) -> None:
        """Raises CheckpointError unless the run that saved this had `value` for `fact`."""
        if (found := self.facts.get(fact)) != json.loads(json.dumps(value)):
            raise CheckpointError(
                f"the checkpoint is of another {fact}",
                given=f"{self.path}: {_difference(found, value)}",
                expected=f"the {fact} of this run",
                hint="resume with the recipe that it was saved with, or choose another run.dir",
            )

    def check_weights(self, ours: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError unless the weights have these names and shapes."""
        held = self.manifest.tensors.items()
        theirs = {name: facts.shape for name, facts in held if name.startswith("weights/")}
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise CheckpointError(
                    "the checkpoint is of another model",
                    given=f"{self.path}: {name} {theirs.get(name, 'missing')}",
                    expected=f"{name} {ours.get(name, 'missing')}",
                    hint="resume with the recipe that it was saved with, or choose another run.dir",
                )

    def read(self, only: str | tuple[str, ...] = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `only`, on the CPU. Raises CheckpointError when damaged."""
        wanted = {name: facts for name, facts in self.manifest.tensors.items() if name.startswith(only)}
        files = sorted({facts.file for facts in wanted.values()})
        self.verify(files)
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors |= load_file(self.path / file)
            except (OSError, safetensors.SafetensorError) as error:
                raise _damaged(self.path / file, str(error)) from error
        for name, facts in wanted.items():
            if name not in tensors:
                raise _damaged(self.path / facts.file, f"no tensor {name}")
            found = (tuple(tensors[name].shape), _dtype_name(tensors[name].dtype))
            if found != (facts.shape, facts.dtype):
                raise _damaged(self.path / facts.file, f"{name} is {found}, not as in the manifest")
        return {name: tensors[name] for name in wanted}

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Raises CheckpointError unless the files (all of them) have the size and hash they should have."""
        with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
            list(pool.map(self._verify, self.manifest.files if files is None else files))

    def _verify(self, file: str) -> None:
        facts = self.manifest.files[file]
        size = _size_of_plain_file(self.path / file)
        if size != facts.bytes:
            raise _damaged(self.path / file, f"{size} bytes instead of {facts.bytes}")
        if _hash(self.path / file) != facts.sha256:
            raise _damaged(self.path / file, "its content does not have the hash that the manifest says")


def steps(directory: Path) -> list[Path]:
    """The checkpoints under `directory`, oldest first. Half-written ones are not among them."""
    found = directory.iterdir() if directory.is_dir() else []
    numbered = [(int(match[1]), path) for path in found if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def newest(directory: Path) -> Checkpoint | None:
    """The last checkpoint under `directory`, None when there is none.

    Raises CheckpointError when it is damaged: an older one is not taken in its place silently.
    """
    paths = steps(directory)
    return open_checkpoint(paths[-1]) if paths else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks the manifest, and that its files are there. Raises CheckpointError."""
    match = _STEP.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        raise CheckpointError("not a checkpoint", given=path, expected="a directory step-00000120")
    if _size_of_plain_file(path / MANIFEST) > _MANIFEST_LIMIT_BYTES:
        raise _damaged(path / MANIFEST, f"larger than {_MANIFEST_LIMIT_BYTES} bytes")
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path / MANIFEST, f"{where}: {first['msg']}" if where else first["msg"]) from error
    except OSError as error:
        raise _damaged(path / MANIFEST, str(error)) from error
    if manifest.own_hash() != manifest.sha256 or manifest.step != int(match[1]):
        raise _damaged(path / MANIFEST, "its content does not have the hash or the step that it says")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file):
            raise _damaged(path / MANIFEST, f"{file!r} is not the name of a file in this directory")
        _size_of_plain_file(path / file)
    for name, facts in manifest.tensors.items():
        if facts.file not in manifest.files:
            raise _damaged(path / MANIFEST, f"tensor {name} is in no file")
    return Checkpoint(path, manifest)


def _size_of_plain_file(path: Path) -> int:
    try:
        size = plain_file_bytes(path)
    except OSError as error:
        raise _damaged(path, "missing") from error
    if size is None:
        raise _damaged(path, "not a plain file")
    return size


def _damaged(path: Path, reason: str) -> CheckpointError:
    older = [other.name for other in steps(path.parent.parent) if other.name < path.parent.name]
    go_back = f"remove {path.parent} to resume from {older[-1]}" if older else "begin the run anew"
    return CheckpointError("the checkpoint is damaged", given=f"{path}: {reason}", hint=go_back)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(found: object, value: object) -> str:
    """The first key in which two mappings differ, or both values."""
    if isinstance(found, dict) and isinstance(value, dict):
        for key in [*value, *found]:
            if isinstance(found.get(key), dict) and isinstance(value.get(key), dict):
                if found[key] != value[key]:
                    return f"{key}: {_difference(found[key], value[key])}"
            elif found.get(key) != value.get(key):
                return f"{key}={found.get(key)!r}, here {key}={value.get(key)!r}"
    return f"{found!r}, here {value!r}"
