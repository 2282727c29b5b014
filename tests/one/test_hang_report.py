"""When ranks hang, the error names the rank that the others wait for; slow ranks are not taken for it."""

import os
import time
from pathlib import Path

import pytest
import torch

from plait.comm import World
from plait.train.heartbeat import Heartbeat, RankStatus, blocking_ranks, hang_error, read_statuses
from plait.train.stragglers import slow_ranks


def beat(rank: int, step: int = 7, within: str = "all-reduce of head", dumped: bool = True) -> RankStatus:
    phase = "a step" if within else "reading data"
    return RankStatus(rank, "here", os.getpid(), step, phase, 31.0, within, dumped)


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ([beat(0), beat(1, within=""), beat(2)], [1]),
        ([beat(0), beat(1, within=""), beat(2, dumped=False)], [2]),
        ([beat(0), beat(1, within="broadcast"), beat(2, step=6)], [2]),
        ([beat(0), beat(1)], [0, 1]),
    ],
)
def test_a_silent_rank_is_late_then_one_that_does_not_wait_then_one_with_fewer_steps(
    beats: list[RankStatus], late: list[int]
) -> None:
    assert [found.rank for found in blocking_ranks(beats)] == late


def test_the_error_names_the_late_rank_its_call_and_the_others_calls(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        (tmp_path / f"rank-{rank:05d}.txt").write_text("a stack")
    beats = [beat(0), beat(1, within=""), beat(2)]
    assert str(hang_error(beats, 3, tmp_path, 30.0, "here")) == "\n".join(
        [
            "rank 1 hangs in step 8, and the other ranks wait",
            f"  given   : rank 1 (process {os.getpid()} on here): in reading data for 31 s",
            "            ranks 0, 2: in a step, in all-reduce of head",
            "  expected: a step in less than run.hang_s = 30 s",
            f"  try     : look at the stacks of all threads: {tmp_path}",
        ]
    )


def test_a_rank_that_has_ended_is_the_late_one(tmp_path: Path) -> None:
    message = str(hang_error([beat(0), beat(2)], 3, tmp_path, 30.0, "here"))
    assert "rank 1 has exited in step 8, and the other ranks wait" in message
    assert message.endswith("none from ranks 0, 1, 2")


def test_a_shorter_beat_over_a_longer_one_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.json"
    beat(0, within="all-reduce of a long name").write(path)
    beat(0, within="").write(path)
    assert read_statuses([path, tmp_path / "none"]) == [beat(0, within="")]


def test_a_beat_costs_next_to_nothing(tmp_path: Path) -> None:
    with Heartbeat(tmp_path / "stacks", World.alone(torch.device("cpu")), 300.0) as heart:
        began_s = time.perf_counter()
        for step in range(1000):
            heart.beat(step, "a step")
        assert time.perf_counter() - began_s < 1000 * 50e-6
    assert not (tmp_path / "stacks").exists()


def test_ranks_are_compared_with_the_others_of_their_stage() -> None:
    own_s = [0.1, 0.1, 0.4, 0.4, 0.41, 1.0]
    stages = [0, 0, 1, 1, 1, 1]
    assert slow_ranks(own_s, stages, 1.5, 0.0) == {5: 0.4}
    assert slow_ranks(own_s, stages, 1.5, 0.7) == {}
    assert slow_ranks(own_s, [*range(6)], 1.5, 0.0) == {}, "no rank to compare with"
