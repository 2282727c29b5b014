"""Checkpoints are whole and verified, or they are refused; what was there before a failed save stays."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait import checkpoint
from plait.errors import CheckpointError

FACTS = {"tokens": 77, "model": {"config": {"hidden_size": 4}}, "data": "ab12"}


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    """As an engine has them: views into flat storage, a scalar, several types."""
    flat = torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "weights/a": flat[:12].view(3, 4),
        "weights/b": flat[12:].float(),
        "exp_avg/a": torch.full((3, 4), float(seed), dtype=torch.bfloat16),
        "step": torch.tensor(seed, dtype=torch.int64),
    }


def save(directory: Path, step: int, *, keep_last: int = 2) -> Path:
    return checkpoint.save(directory, step, some_tensors(step), FACTS, keep_last=keep_last)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_read_has_the_bits_that_were_saved(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.facts) == (5, FACTS)
    read = found.read()
    assert read.keys() == some_tensors().keys()
    for name, tensor in some_tensors(5).items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    assert found.read("weights/").keys() == {"weights/a", "weights/b"}


def test_only_the_newest_are_kept_and_they_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-100000000", "step-100000001"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 100_000_001


def test_there_is_no_newest_where_nothing_was_saved(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def read_newest(directory: Path) -> dict[str, Tensor]:
    found = checkpoint.newest(directory)
    assert found is not None
    return found.read()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def replace_by_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, Path.unlink, replace_by_link])
def test_a_damaged_file_is_named_and_never_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    with pytest.raises(CheckpointError) as caught:
        read_newest(tmp_path)
    letter = caught.value.letter()
    assert "damaged" in letter
    assert f"step-00000002/{file}" in letter
    assert "step-00000001" in letter, "the letter says what could be resumed from"


def test_every_single_bit_of_a_manifest_is_guarded(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / "manifest.json"
    good = path.read_bytes()
    whitespace = 0
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        try:
            checkpoint.newest(tmp_path)
        except CheckpointError:
            continue
        whitespace += 1
        assert json.loads(bad) == json.loads(good), f"byte {place}"
    assert whitespace < len(good) // 7


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", ".hidden", "a/b", "..", ""])
def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 2) / "manifest.json"
    values = json.loads(path.read_text())
    values["files"][file] = values["files"].pop("weights.safetensors")
    for tensor in values["tensors"].values():
        tensor["file"] = file
    del values["sha256"]
    values["sha256"] = checkpoint._hash_of_facts(values)
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.newest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    found.check_same("data", "ab12")
    shapes = {n: tuple(t.shape) for n, t in some_tensors().items() if n.startswith("weights/")}
    found.check_weights(shapes)
    with pytest.raises(CheckpointError) as caught:
        found.check_same("model", {"config": {"hidden_size": 8}})
    assert "another model" in caught.value.letter()
    larger = shapes | {"weights/a": (4, 4)}
    with pytest.raises(CheckpointError) as caught:
        found.check_weights(larger)
    assert "weights/a (3, 4)" in caught.value.letter()
    for other in (shapes | {"weights/c": (1,)}, {"weights/a": (3, 4)}, {}):
        with pytest.raises(CheckpointError, match="another model"):
            found.check_weights(other)


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The limit of a file's size stands for the disk's: EFBIG takes the same way as ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_save_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with largest_file(50_000), pytest.raises(CheckpointError, match="not enough disk"):
        checkpoint.save(tmp_path, 2, {"weights/a": torch.zeros(100_000)}, {}, keep_last=1)
    assert names(tmp_path) == ["step-00000001"]
    read_newest(tmp_path)


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: pytest.fail("written"))
    with pytest.raises(CheckpointError, match="not enough disk"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


KILLS = """
import os, signal, sys, time, torch
from pathlib import Path
from plait import checkpoint

directory = Path(sys.argv[1])
first = 1
for kill in range(6):
    writer = os.fork()
    if writer == 0:
        for step in range(first, first + 10_000):
            weights, moments = torch.full((300, 1000), float(step)), torch.full((9,), float(step))
            tensors = {"weights/a": weights, "moments/a": moments}
            checkpoint.save(directory, step, tensors, {}, keep_last=1)
    while not any(int(path.name[5:]) > first for path in checkpoint.steps(directory)):
        time.sleep(0.001)
    time.sleep(0.004 * kill)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    partial = [path for path in directory.iterdir() if ".tmp-" in path.name]
    first = int(checkpoint.steps(directory)[-1].name[5:]) + 1
    tensors = checkpoint.newest(directory).read().values()
    print(all(bool((tensor == first - 1).all()) for tensor in tensors), len(partial))
"""


def test_a_writer_killed_at_any_instant_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # a process with threads is not one to fork
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert [whole for whole, _ in found] == ["True"] * 6, done.stderr
    assert any(partial != "0" for _, partial in found), "no writer was killed while it wrote"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.tmp-00ff00ff").mkdir()
    (tmp_path / "step-00000003.tmp-00ff00ff" / "weights.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    flip_a_byte(save(tmp_path, 2) / "weights.safetensors")
    save(tmp_path, 2)
    read_newest(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_a_step_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (save(tmp_path, 2) / "weights.safetensors").read_bytes()
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target.name == "step-00000002" and (path / "manifest.json").read_bytes() != manifest:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    manifest = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.save(tmp_path, 2, some_tensors(3), FACTS, keep_last=2)
    assert names(tmp_path) == ["step-00000002"]
    assert (tmp_path / "step-00000002" / "weights.safetensors").read_bytes() == before
    read_newest(tmp_path)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise PermissionError(1, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.warns(UserWarning, match="cannot be removed"):
        save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    read_newest(tmp_path)
