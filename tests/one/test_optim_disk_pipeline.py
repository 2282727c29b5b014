"""Blocks of files that are read ahead and written later: all bytes arrive, and errors are raised."""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import RunError
from plait.optim import disk_tensors
from plait.optim.disk_tensors import DiskPipeline, MappedFile, PageSpan

PAGE = mmap.PAGESIZE
NUM_BLOCKS, BLOCK_PAGES = 12, 3


def opened(folder: Path) -> tuple[MappedFile, Tensor, DiskPipeline]:
    """A file of numbered bytes, all of it as one tensor, and its blocks."""
    block = BLOCK_PAGES * PAGE
    file = MappedFile(folder, NUM_BLOCKS * block)
    tensor = file.allocate(NUM_BLOCKS * block, torch.uint8)
    tensor.copy_(torch.arange(NUM_BLOCKS).repeat_interleave(block))
    spans = [[PageSpan(file, index * block, (index + 1) * block)] for index in range(NUM_BLOCKS)]
    return file, tensor, DiskPipeline(spans)


def add_one(pipeline: DiskPipeline, blocks: range = range(NUM_BLOCKS)) -> None:
    for index in blocks:
        pipeline.load(index).add_(1)
        pipeline.store()
    pipeline.finish()


def values(tensor: Tensor) -> list[int]:
    blocks = tensor.view(NUM_BLOCKS, -1)
    assert (blocks == blocks[:, :1]).all(), "a block is torn"
    return blocks[:, 0].tolist()


def pages_in_cache(file: MappedFile, tensor: Tensor) -> int:
    start, stop = file.pages(tensor)
    found = (ctypes.c_ubyte * ((stop - start) // PAGE))()
    assert not ctypes.CDLL(None).mincore(
        ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(stop - start), found
    )
    return sum(each & 1 for each in found)


@pytest.mark.parametrize("order", [range(NUM_BLOCKS), range(NUM_BLOCKS - 1, -1, -1), range(0, NUM_BLOCKS, 3)])
def test_updates_in_any_order_reach_the_file(order: range, tmp_path: Path) -> None:
    _, tensor, pipeline = opened(tmp_path)
    for _ in range(3):  # the mapping and direct transfers see each other's bytes
        add_one(pipeline, order)
        tensor.add_(1)
    assert values(tensor) == [index + 3 * (index in order) + 3 for index in range(NUM_BLOCKS)]
    pipeline.close()


def test_a_block_updated_twice_in_turn_is_read_after_it_was_written(tmp_path: Path) -> None:
    _, tensor, pipeline = opened(tmp_path)
    for index in (0, 1, 0, 1, 2, 3, 3, 2, 1, 0, 0):
        pipeline.load(index).add_(1)
        pipeline.store()
    pipeline.finish()
    assert values(tensor)[:5] == [4, 4, 4, 5, 4]


def test_an_update_leaves_no_page_in_the_page_cache(tmp_path: Path) -> None:
    file, tensor, pipeline = opened(tmp_path)
    assert pages_in_cache(file, tensor) > 0
    file.evict(tensor)
    os.fsync(file._file)
    os.posix_fadvise(file._file, 0, 0, os.POSIX_FADV_DONTNEED)
    if file._direct is None or pages_in_cache(file, tensor):
        pytest.skip("this file system has no direct I/O, or is in memory")
    add_one(pipeline)
    assert pages_in_cache(file, tensor) == 0


def _short(call: Callable[..., int]) -> Callable[..., int]:
    return lambda descriptor, memory, start: call(descriptor, [memory[0][:PAGE]], start)


def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensor, pipeline = opened(tmp_path)
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, _short(getattr(os, name)))
    add_one(pipeline)
    assert values(tensor) == [index + 1 for index in range(NUM_BLOCKS)]


def _failing(call: Callable[..., int], number: int, error: int) -> Callable[..., int]:
    """Fail in one block, again and again; `error` 0: no byte is transferred."""

    def fail(descriptor: int, memory: Any, start: int) -> int:
        if start != number * BLOCK_PAGES * PAGE:
            return call(descriptor, memory, start)
        if not error:
            return 0
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("pwritev", errno.ENOSPC, "No space left"),
        ("pwritev", errno.EIO, "Input/output error"),
        ("preadv", errno.EIO, "Input/output error"),
        ("preadv", 0, "bytes are missing"),
    ],
)
def test_a_disk_that_fails_is_one_error_and_the_other_blocks_are_kept(
    name: str, error: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensor, pipeline = opened(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, name, _failing(getattr(os, name), 5, error))
        with pytest.raises(RunError, match="the file for offloading cannot be") as caught:
            add_one(pipeline)
        pipeline.abandon()
    message = str(caught.value)
    assert words in message
    assert all(part in message for part in (str(tmp_path), "given", "expected", "try"))
    found = values(tensor)
    assert found[:5] == [1, 2, 3, 4, 5]
    assert found[5] == 5
    assert found[9:] == [9, 10, 11], "blocks after the error were updated"
    add_one(pipeline, range(5, 6))  # it works again
    assert values(tensor)[5] == 6


def test_no_write_is_in_flight_after_one_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would overwrite the state that is loaded next."""
    _, tensor, pipeline = opened(tmp_path)
    write, failed = os.pwritev, threading.Event()

    def fail_or_be_slow(*arguments: Any) -> int:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.2)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", fail_or_be_slow)
    with pytest.raises(RunError):
        add_one(pipeline, range(2))
    tensor.zero_()
    time.sleep(0.3)
    assert values(tensor) == [0] * NUM_BLOCKS


def test_without_direct_io_ordinary_transfers_serve_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tensors, "_open_direct", lambda _: None)
    with pytest.warns(UserWarning, match="without direct I/O"):
        _, tensor, pipeline = opened(tmp_path)
    add_one(pipeline)
    assert values(tensor) == [index + 1 for index in range(NUM_BLOCKS)]


def test_a_file_system_that_refuses_direct_io_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, opens = tmp_path / "file", os.open
    name.touch()

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert disk_tensors._open_direct(str(name)) is None
