"""Checkpoints are whole and verified, or they are refused; what was there before a failed save stays."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import checkpoint
from plait.checkpoint import Keep
from plait.checkpoint.directory import save_lock
from plait.errors import CheckpointError
from support import checkpoints
from support.checkpoints import FACTS, flip_a_byte, names, read_newest, some_tensors


def save(directory: Path, step: int, *, keep_last: int = 2, **how: Any) -> Path:
    return checkpoints.save(directory, step, some_tensors(step), keep=Keep(keep_last), **how)


@pytest.mark.quick
def test_tensors_read_have_the_bits_that_were_saved(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("keep", [{"last": 0}, {"every": -1}])
def test_to_keep_nothing_is_refused(keep: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="would not be kept"):
        Keep(**keep)


def test_there_is_no_newest_where_nothing_was_saved(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    found.check_same("data", "ab12")
    with pytest.raises(CheckpointError) as caught:
        found.check_same("model", {"config": {"hidden_size": 8}})
    assert "another model" in caught.value.message()


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The limit of a file's size replaces the disk's: EFBIG takes the same path as ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_save_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with largest_file(50_000), pytest.raises(CheckpointError, match="not enough disk"):
        checkpoints.save(tmp_path, 2, {"weights/a": torch.zeros(100_000)}, keep=Keep(1))
    assert names(tmp_path) == ["step-00000001"]
    read_newest(tmp_path)


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr("plait.checkpoint.saver.write_rank_files", lambda *_: pytest.fail("written"))
    with pytest.raises(CheckpointError, match="not enough disk"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


KILLS = """
import os, signal, sys, time, torch
from pathlib import Path
from plait import checkpoint
from plait.checkpoint import Keep, Saver
from plait.comm import World
from plait.parallel.zero.state_io import StateShard

directory = Path(sys.argv[1])
saver = Saver(directory, World.alone(torch.device("cpu")), keep=Keep(1))
first = 1
for kill in range(6):
    writer = os.fork()
    if writer == 0:
        for step in range(first, first + 10_000):
            weights, moments = torch.full((300, 1000), float(step)), torch.full((9,), float(step))
            tensors = {"weights/a": weights, "moments/a": moments}
            saver.save(step, [StateShard.from_tensor(*each) for each in tensors.items()], {})
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


@pytest.mark.quick
def test_files_of_a_killed_save_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.tmp-00ff00ff").mkdir()
    (tmp_path / "step-00000003.tmp-00ff00ff" / "rank-00000.0.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    flip_a_byte(save(tmp_path, 2) / checkpoints.FILE)
    save(tmp_path, 2)
    read_newest(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_a_step_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (save(tmp_path, 2) / checkpoints.FILE).read_bytes()
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target.name == "step-00000002" and (path / "manifest.json").read_bytes() != manifest:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    manifest = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoints.save(tmp_path, 2, some_tensors(3), keep=Keep(2))
    assert names(tmp_path) == ["step-00000002"]
    assert (tmp_path / "step-00000002" / checkpoints.FILE).read_bytes() == before
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


def test_a_save_of_the_same_step_that_is_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    """The old checkpoint is renamed back by the next process that opens the folder."""
    path = save(tmp_path, 2)
    path.rename(tmp_path / "step-00000002.before-00ff00ff00ff")
    shutil.copytree(tmp_path / "step-00000002.before-00ff00ff00ff", tmp_path / "step-00000002.tmp-00ff")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert torch.equal(found.read()["weights/a"], some_tensors(2)["weights/a"])
    path.rename(tmp_path / "step-00000002.before-00ff00ff00ff")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_two_jobs_do_not_save_into_one_folder_at_a_time(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with save_lock(tmp_path), pytest.raises(CheckpointError, match="another job"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    save(tmp_path, 2)
