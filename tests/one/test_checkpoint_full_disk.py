"""A disk that is full at any write of a save costs that save, and nothing that was saved before."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plait.checkpoint import Keep, open_checkpoint
from plait.errors import CheckpointError
from support import checkpoints

PAGE_BYTES, DISK_PAGES = 4096, 96
SMALL = {"weights/a": torch.arange(500.0), "weights/b": torch.ones(3, 5)}
LARGE = {f"weights/{name}": torch.full((7, 1100), float(number)) for number, name in enumerate("abcd")}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own. Skips where none can be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={DISK_PAGES * PAGE_BYTES}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def problem_of_saving(folder: Path) -> CheckpointError | None:
    try:
        checkpoints.save(folder, 2, LARGE, keep=Keep(2))
    except CheckpointError as error:
        return error
    return None


def test_a_disk_full_at_any_write_leaves_the_checkpoints_before(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From no free space to enough for all, a page more each time; the check of free space sees plenty, as
    when others fill the disk meanwhile."""
    monkeypatch.setattr("plait.checkpoint.saver._check_space", lambda *_: None)
    folder = small_disk / "checkpoints"
    good = checkpoints.save(folder, 1, SMALL)
    failed = 0
    for free in range(DISK_PAGES):
        filler = small_disk / "filler"
        filler.write_bytes(b"\1" * (shutil.disk_usage(small_disk).free - free * PAGE_BYTES))
        problem = problem_of_saving(folder)
        open_checkpoint(good).verify()
        if problem is None:
            break
        failed += 1
        assert "not enough disk" in str(problem)
        assert checkpoints.names(folder) == [good.name]
        filler.unlink()
    assert failed > 20
    found = open_checkpoint(folder / "step-00000002").read()
    assert all(torch.equal(found[name], tensor) for name, tensor in LARGE.items())
