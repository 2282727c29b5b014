"""Tensors in a file: no files left, no values lost, and errors before training."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.errors import ConfigError
from plait.optim.disk_tensors import MappedFile, mapped_bytes

# Root writes to folders without write permission, but for this capability.
AS_ANYONE = ("setpriv", "--bounding-set=-dac_override")


def maps_of(folder: Path) -> list[str]:
    """This process's mappings of files in a folder. Other tests' tensors may still be alive."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/.plait-" in line]


def test_a_file_has_no_name_and_its_full_size_from_the_start(tmp_path: Path) -> None:
    size = 3 << 20
    file = MappedFile(tmp_path, size)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._file).st_blocks * 512 >= size
    assert len(maps_of(tmp_path)) == 1


def test_tensors_keep_their_values_when_evicted_and_share_no_page(tmp_path: Path) -> None:
    lengths = [(5000, torch.float32), (1, torch.float64), (0, torch.float32), (70_001, torch.bfloat16)]
    with_room = sum(mapped_bytes(*each) for each in lengths)
    file = MappedFile(tmp_path, with_room)
    tensors = [file.allocate(*each) for each in lengths]
    for number, tensor in enumerate(tensors):
        assert (tensor.storage_offset(), tensor.sum().item()) == (0, 0.0)
        tensor.fill_(number + 1)
    for tensor in (*tensors[:2], tensors[3], tensors[3][40_000:50_000]):
        file.evict(tensor)
    for number, tensor in enumerate(tensors):
        assert (tensor == number + 1).all()
    with pytest.raises(AssertionError, match="reserved too small"):
        file.allocate(1, torch.float32)
    with pytest.raises(AssertionError, match="not in this file"):
        file.evict(torch.zeros(8))


def test_disk_space_is_freed_with_the_file_and_its_tensors(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, 1 << 20)
    tensor = file.allocate(100, torch.float32)
    file.close()
    file.close()
    tensor.fill_(2.0)  # the mapping lives as long as a tensor in it
    assert tensor.sum() == 200
    del tensor
    gc.collect()
    assert maps_of(tmp_path) == []
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if f"{tmp_path}/.plait-" in str(fd.resolve())]


def test_an_unusable_folder_is_an_error(tmp_path: Path) -> None:
    missing, plain = tmp_path / "missing", tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(ConfigError, match="No such file") as caught:
        MappedFile(missing, 100)
    assert caught.value.hint == f"mkdir -p {missing}"
    with pytest.raises(ConfigError, match="Not a directory"):
        MappedFile(plain, 100)


def message_of(script: str, *entry: str) -> str:
    """The ConfigError that `script` raises when it makes a file in a process of its own."""
    command = (
        f"import sys\nfrom pathlib import Path\nfrom plait.optim.disk_tensors import MappedFile\n{script}"
    )
    done = subprocess.run([*entry, sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.partition("plait.errors.ConfigError: ")[2]


def test_a_read_only_folder_is_an_error(tmp_path: Path) -> None:
    as_root = os.geteuid() == 0
    if as_root and (not shutil.which(AS_ANYONE[0]) or subprocess.run([*AS_ANYONE, "true"]).returncode):
        pytest.skip("root may write everywhere, and cannot give that up here")
    tmp_path.chmod(0o555)
    message = message_of(f"MappedFile(Path({str(tmp_path)!r}), 100)", *(AS_ANYONE if as_root else ()))
    assert "Permission denied" in message


def test_a_disk_that_is_too_small_is_an_error_with_both_sizes(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    size = 10 * disk.f_blocks * disk.f_frsize
    with pytest.raises(ConfigError, match="no space") as caught:
        MappedFile(tmp_path, size)
    assert caught.value.expected == f"{size:,} bytes"
    assert "bytes are free (No space left on device)" in caught.value.given
    assert list(tmp_path.iterdir()) == []


def test_disk_space_that_the_system_refuses_is_an_error_and_not_a_later_signal(tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    message = message_of(f"{limit}MappedFile(Path({str(tmp_path)!r}), 1 << 20)")
    assert "File too large" in message
    assert "1,048,576 bytes" in message
