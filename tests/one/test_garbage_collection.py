"""Ranks collect garbage at the same steps, and only there."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from plait.train.trainer import GarbageCollection


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are collected, from now on."""
    generations: list[int] = []

    def record(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(record)
    yield generations
    gc.callbacks.remove(record)


def _run(every: int, first: int, last: int, collections: list[int]) -> list[int]:
    """The steps after which there was a collection, of steps that leave many objects."""
    with GarbageCollection(every) as collecting:
        steps = []
        for step in range(first, last + 1):
            made = [[number] for number in range(5_000)]
            before = len(collections)
            collecting.after_step(step)
            if len(collections) > before:
                steps.append(step)
            assert len(made) == 5_000
    return steps


def test_garbage_is_collected_after_the_first_step_and_at_multiples(collections: list[int]) -> None:
    assert gc.isenabled()
    del collections[:]
    assert _run(4, 3, 13, collections) == [3, 4, 8, 12]
    assert collections[-4:] == [2, 2, 2, 2]  # full ones, and none besides
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_collector_is_as_before_after_an_error_and_without_a_step() -> None:
    with GarbageCollection(4):
        pass

    def fail() -> None:
        with GarbageCollection(4) as collecting:
            collecting.after_step(1)
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_that_were_excluded_before_stay_excluded() -> None:
    gc.freeze()
    try:
        with GarbageCollection(4) as collecting:
            collecting.after_step(1)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_with_zero_python_decides() -> None:
    with GarbageCollection(0) as collecting:
        collecting.after_step(1)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
