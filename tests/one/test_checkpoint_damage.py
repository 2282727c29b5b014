"""Whatever has become of a checkpoint's files is found and named; nothing of it is used or run."""

import copy
import json
import os
import pickle
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import checkpoint
from plait.checkpoint import MANIFEST, manifest, open_checkpoint
from plait.errors import CheckpointError
from support import checkpoints
from support.checkpoints import FILE, flip_a_byte, some_tensors

NUM_FLIPS = 2000


def save(directory: Path, step: int) -> Path:
    return checkpoints.save(directory, step, some_tensors(step))


def message_of(path: Path) -> str:
    """The error of reading all of it; fails if there is none."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).read()
    return caught.value.message()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = (flip_a_byte, cut_short, longer, Path.unlink, replace_by_link, replace_by_folder, replace_by_pipe)


@pytest.mark.parametrize("file", [FILE, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_never_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    path = save(tmp_path, 2)
    damage(path / file)
    message = message_of(path)
    assert "damaged" in message
    assert f"step-00000002/{file}" in message


def test_every_flipped_byte_of_every_file_is_found(tmp_path: Path) -> None:
    """All bytes of the manifest; of the tensors' file the header's and others at random."""
    path, rng = save(tmp_path, 2), random.Random(5)
    size = (path / FILE).stat().st_size
    header = open_checkpoint(path).manifest.files[FILE].header_bytes
    places = {MANIFEST: range((path / MANIFEST).stat().st_size)}
    places[FILE] = [*range(header), *(rng.randrange(size) for _ in range(NUM_FLIPS))]
    for name, positions in places.items():
        good = (path / name).read_bytes()
        with (path / name).open("r+b", buffering=0) as file:
            for position in positions:
                file.seek(position)
                file.write(bytes([good[position] ^ rng.randrange(1, 256)]))
                with pytest.raises(CheckpointError) as caught:
                    open_checkpoint(path).read()
                assert name in str(caught.value), f"byte {position}"
                file.seek(position)
                file.write(good[position : position + 1])
    open_checkpoint(path).verify()


def test_files_of_other_ranks_steps_and_runs_are_not_taken(tmp_path: Path) -> None:
    one, two, other = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path / "other", 2)
    assert (one / FILE).stat().st_size == (two / FILE).stat().st_size
    copy_of = tmp_path / "copies"

    def mixed(name: str, source: Path) -> Path:
        shutil.rmtree(copy_of, ignore_errors=True)
        path = Path(shutil.copytree(two, copy_of / two.name))
        shutil.copyfile(source / name, path / name)
        return path

    assert FILE in message_of(mixed(FILE, one))
    assert MANIFEST in message_of(mixed(MANIFEST, one))
    checkpoints.save(tmp_path / "third", 2, some_tensors(9))
    assert FILE in message_of(mixed(MANIFEST, tmp_path / "third" / two.name))
    open_checkpoint(mixed(MANIFEST, other)).read()  # of the same tensors


def test_a_file_too_many_is_found_by_verify(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (path / "rank-00001.0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-00001\.0"):
        open_checkpoint(path).verify()


# --- made to do harm: their hashes are right


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    values = checkpoints.values_of(path / MANIFEST)
    change(values)
    checkpoints.seal(path / MANIFEST, values)
    return message_of(path)


def test_a_sealed_manifest_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    checkpoints.seal(path / MANIFEST, checkpoints.values_of(path / MANIFEST))
    open_checkpoint(path).read()


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", ".hidden", "a/b", "..", "", MANIFEST, "a\0b"])
def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 2)
    assert "damaged" in changed(path, lambda v: v["files"].update({file: v["files"].pop(FILE)}))


def chunk_of(values: dict[str, Any]) -> Any:
    return values["tensors"]["weights/a"]["chunks"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["tensors"]["weights/a"].update(shape=[2**40, 2**40]),
        lambda v: v["tensors"]["weights/a"].update(shape=[-3, -4]),
        lambda v: v["tensors"]["buffers/empty"].update(shape=[0, 2**62, 2**62]),
        lambda v: v["tensors"]["weights/a"].update(shape=[10**400, 4]),
        lambda v: v["tensors"]["weights/a"].update(shape=[1] * 5000),
        lambda v: v["tensors"]["weights/a"].update(dtype="pickle"),
        lambda v: v["tensors"]["weights/a"].update(dtype="F32"),
        lambda v: chunk_of(v).__setitem__(0, 7),
        lambda v: chunk_of(v).__setitem__(0, -1),
        lambda v: chunk_of(v).__setitem__(1, 2**62),
        lambda v: chunk_of(v).__setitem__(1, -8),
        lambda v: chunk_of(v).__setitem__(1, chunk_of(v)[1] + 8),
        lambda v: chunk_of(v).__setitem__(2, [0]),
        lambda v: chunk_of(v).__setitem__(3, [3, 5]),
        lambda v: chunk_of(v).__setitem__(4, "0"),
        lambda v: v["tensors"]["weights/a"]["chunks"].append(chunk_of(v)),
        lambda v: v["tensors"]["weights/a"].update(chunks=[]),
        lambda v: v["files"][FILE].update(header_bytes=2**40),
        lambda v: v["files"][FILE].update(bytes=2**62),
        lambda v: v["files"].update(
            {"other.safetensors": {"bytes": 8, "header_bytes": 8, "header_crc32": 0}}
        ),
        lambda v: v.update(step=3),
        lambda v: v.update(step=-2),
        lambda v: v.update(step=2.0),
        lambda v: v.update(more=1),
        lambda v: v.update(format="plait checkpoint 1"),
        lambda v: v.pop("facts"),
    ],
)
def test_a_manifest_that_does_not_fit_itself_or_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert "damaged" in changed(save(tmp_path, 2), change)


def test_chunks_that_overlap_and_leave_a_hole_are_refused(tmp_path: Path) -> None:
    """Chunks with as many elements as the tensor has."""
    path = checkpoints.save(tmp_path, 2, {"weights/a": torch.zeros(2, 4), "weights/b": torch.zeros(2, 4)})
    values = checkpoints.values_of(path / MANIFEST)
    table = values["tensors"]
    [first], [second] = table["weights/a"]["chunks"], table["weights/b"]["chunks"]
    table["weights/a"] = {"shape": [4, 4], "dtype": "F32", "chunks": [first, second]}
    del table["weights/b"]
    second[2:4] = [1, 0], [3, 4]
    checkpoints.seal(path / MANIFEST, values)
    assert "overlap" in message_of(path)
    second[2:4] = [2, 0], [4, 4]
    checkpoints.seal(path / MANIFEST, values)
    assert open_checkpoint(path).read()["weights/a"].shape == (4, 4)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_under_a_checkpoints_name_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 2)
    for name in (FILE, MANIFEST):
        (path / name).write_bytes(pickle.dumps(Bomb()))
        assert name in message_of(path)
        path = save(tmp_path, 2)
    assert not Path("exploded").exists()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the process's memory to what it has and 1 GiB more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


BOMBS = {
    "deep": '{"format": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "facts": '{"format": "plait checkpoint 2", "step": 2, "files": {}, "tensors": {}, "facts": {"a": '
    + '{"a":' * 100_000
    + "1"
    + "}" * 100_000
    + "}}",
    "number": '{"format": "plait checkpoint 2", "step": ' + "9" * 2_000_000 + "}",
    "text": '{"format": "' + "x" * 20_000_000 + '"}',
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.usefixtures("little_memory")
def test_json_that_is_too_deep_or_too_large_is_refused_in_bounded_time(tmp_path: Path, bomb: str) -> None:
    path = save(tmp_path, 2)
    checkpoints.seal(path / MANIFEST, BOMBS[bomb])
    began_s = time.perf_counter()
    assert MANIFEST in message_of(path)
    assert time.perf_counter() - began_s < 5


@pytest.mark.usefixtures("little_memory")
def test_a_sparse_file_of_a_terabyte_is_refused_for_its_content(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    os.truncate(path / MANIFEST, 2**40)
    assert "larger than" in message_of(path)
    path = save(tmp_path, 2)
    os.truncate(path / FILE, 2**40)
    assert "header" in changed(path, lambda v: v["files"][FILE].update(bytes=2**40, header_bytes=2**40))


@pytest.mark.usefixtures("little_memory")
def test_many_boxes_that_nothing_separates_are_refused_in_bounded_time(tmp_path: Path) -> None:
    """A pinwheel of chunks, again and again: whether they overlap would be long to find out."""
    path = checkpoints.save(tmp_path, 2, {"weights/a": torch.zeros(6000)})
    values = checkpoints.values_of(path / MANIFEST)
    file, offset, _, _, crc = chunk_of(values)
    chunks = [[file, offset + 4 * n, [n % 2, n // 2], [n % 2 + 1, n // 2 + 1], crc] for n in range(6000)]
    for n in range(1, 6000):
        chunks[n][2:4] = [0, 0], [1, 1]
    values["tensors"]["weights/a"].update(shape=[2, 3000], chunks=chunks)
    checkpoints.seal(path / MANIFEST, values)
    began_s = time.perf_counter()
    assert "overlap" in message_of(path)
    assert time.perf_counter() - began_s < 5


def mutated(values: Any, rng: random.Random) -> Any:
    """One value somewhere in it is another."""
    strange = (None, -1, 2**63, 1e308, "", "../x", [], {}, True, [[]], "\ud800", 10**30)
    values = copy.deepcopy(values)
    place = values
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return values
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.2:
            break
        place = place[key]
    how = rng.random()
    if how < 0.2:
        del place[key]
    elif how < 0.4 and isinstance(place[key], int):
        place[key] += rng.choice((-1, 1, 8))
    else:
        place[key] = rng.choice(strange)
    return values


def test_manifests_with_a_strange_value_are_refused_or_read_the_same(tmp_path: Path) -> None:
    path, rng = save(tmp_path, 2), random.Random(7)
    good = checkpoints.values_of(path / MANIFEST)
    expected = open_checkpoint(path).read()
    refused = 0
    for _ in range(1500):
        values = mutated(good, rng)
        checkpoints.seal(path / MANIFEST, json.dumps(values))
        try:
            found = open_checkpoint(path).read()
        except CheckpointError:
            refused += 1
            continue
        for key, tensor in found.items():
            if tensor.numel():
                assert torch.equal(tensor, expected[key]), key
    assert refused > 1000


def test_a_manifest_of_too_many_tensors_or_chunks_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 2) / MANIFEST
    values = checkpoints.values_of(path)
    values["tensors"] |= {f"empty/{n}": {"shape": [0], "dtype": "F32", "chunks": []} for n in range(100)}
    checkpoints.seal(path, values)
    assert len(open_checkpoint(path.parent).manifest.tensors) == 105
    monkeypatch.setattr(manifest, "_MAX_ENTRIES", 100)
    assert "more than" in message_of(path.parent)
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "_MAX_LISTS", 100)  # before the text is parsed
    assert "more than" in message_of(path.parent)


def test_a_newest_checkpoint_without_a_manifest_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.newest(tmp_path)
