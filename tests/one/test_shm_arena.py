"""The arena of a rank: memory is lent to one caller at a time, and returned by any process at any time."""

import gc
import random
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from plait.comm.shm import native_lib
from plait.comm.shm.arena import Arena
from plait.errors import CommError

PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = native_lib.load()
    if found is None:
        pytest.skip(native_lib.unavailable_reason())
    made = Arena(found, 1 << 30)
    yield made
    made.close()


class Knot:
    """Refers to itself: only the collector frees it, at a moment of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def _lend(arena: Arena, seed: str, wrong: list[int]) -> None:
    chance = random.Random(seed)
    held: list[tuple[Knot, int]] = []
    for turn in range(2000):
        value = chance.randrange(256)
        held.append((Knot(arena.empty(PAGE * chance.randrange(1, 6), torch.uint8).fill_(value)), value))
        if len(held) > 8:
            knot, value = held.pop(chance.randrange(8))
            if not bool((knot.tensor == value).all()):
                wrong.append(turn)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_memory_has_one_user_at_a_time_whenever_the_collector_frees_it(
    arena: Arena, num_threads: int
) -> None:
    wrong: list[int] = []
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(5, 2, 2)
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=_lend, args=(arena, f"{k}", wrong)) for k in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert wrong == []
    gc.collect()
    assert arena.used_bytes == 0
    whole = arena.empty(arena.num_bytes, torch.uint8)  # all that was lent has become one range again
    assert arena.num_bytes == whole.numel()


def test_memory_that_is_read_by_several_is_used_again_when_all_have_read_it(arena: Arena) -> None:
    storage = arena.empty(2 * PAGE, torch.uint8)
    halves, read = storage.split(PAGE), [False, False]
    for which in (0, 1):
        arena.defer(halves[which], lambda which=which: read[which])
    place = storage.data_ptr()
    del storage, halves
    read[1] = True  # the later one is over first
    assert arena.empty(2 * PAGE, torch.uint8).data_ptr() != place
    read[0] = True
    assert arena.empty(4 * PAGE, torch.uint8).data_ptr() == place


def test_memory_that_is_still_read_is_waited_for_when_there_is_no_other(arena: Arena) -> None:
    free, busy = arena.empty(PAGE, torch.uint8), arena.empty(PAGE, torch.uint8)
    looks = iter([False, False, False, True])  # two for the first tensor, two for the second
    arena.defer(busy, lambda: next(looks))
    places = free.data_ptr(), busy.data_ptr()
    del free, busy
    tensors = [arena.empty(PAGE, torch.uint8), arena.empty(PAGE, torch.uint8)]
    assert tuple(tensor.data_ptr() for tensor in tensors) == places


def test_too_little_memory_is_an_error_with_the_bytes_needed_and_found(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = arena.empty(PAGE, torch.uint8)
    monkeypatch.setattr("plait.comm.shm.arena.available_bytes", lambda: 3 << 20)
    with pytest.raises(CommError, match=r"4\.0 MiB more are needed, 3\.0 MiB are free"):
        arena.empty(4 << 20, torch.uint8)
    assert arena.num_bytes == PAGE  # as before: what fits is still lent
    assert arena.empty(2 << 20, torch.uint8).data_ptr() == kept.data_ptr() + PAGE


def test_memory_refused_by_the_system_is_the_same_error(arena: Arena) -> None:
    with pytest.raises(CommError, match="too little memory for the ranks' shared memory"):
        arena.empty(1 << 50, torch.uint8)
