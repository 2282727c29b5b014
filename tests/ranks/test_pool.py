"""The pool itself: what it gives a function, and how it tells what went wrong."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.comm import connect
from plait.errors import PlanError
from plait.train.trainer import SignalHandler
from support.pool import Pool, RankError, RankTimeout


def add_ranks(start: float, *, scale: float) -> tuple[int, float]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["PLAIT_RENDEZVOUS_FILE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    total = torch.tensor([start + scale * rank], dtype=torch.float64)
    dist.all_reduce(total)
    return rank, total.item()


def connected_sum() -> tuple[int, int, float]:
    world = connect()
    total = torch.tensor([float(world.rank + 1)])
    if world.size > 1:
        dist.all_reduce(total)
    return world.rank, world.size, total.item()


def pid() -> int:
    return os.getpid()


def raise_on_rank(bad_rank: int) -> None:
    world = connect()
    if world.rank == bad_rank:
        raise PlanError("6 layers cannot fill 8 stages", hint="pp=2")
    world.barrier()


def raise_alone(bad_rank: int) -> None:
    if int(os.environ["RANK"]) == bad_rank:
        raise ValueError("only here")


def wait_for_rank_0(code: int | None) -> None:
    world = connect()
    if world.rank == 0:
        print("my last words")
        os.kill(os.getpid(), signal.SIGKILL) if code is None else os._exit(code)
    world.barrier()


def hang_in_a_collective() -> None:
    world = connect()
    if world.rank == 1:
        world.barrier()
    while world.rank == 0:
        time.sleep(0.1)  # the culprit


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def warn() -> None:
    warnings.warn("the ice is thin", UserWarning, stacklevel=1)


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT_OVER"] = "1"
    os.chdir("/")


def surroundings() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        "LEFT_OVER" in os.environ,
        str(Path.cwd()),
        dist.is_initialized(),
    )


def unpicklable() -> object:
    return lambda: None


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_results_come_back_by_rank(pool: Pool) -> None:
    assert pool.run(add_ranks, 2, 1.0, scale=10.0) == [(0, 12.0), (1, 12.0)]


def test_the_function_joins_its_ranks_with_connect(pool: Pool) -> None:
    assert pool.run(connected_sum, 3) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_one_process_serves_worlds_of_different_size(pool: Pool) -> None:
    for n in (2, 1, 3, 2):
        assert pool.run(connected_sum, n) == [(rank, n, n * (n + 1) / 2) for rank in range(n)]


def test_workers_outlive_a_run(pool: Pool) -> None:
    first = pool.run(pid, 2)
    assert pool.run(pid, 3)[:2] == first
    assert os.getpid() not in first


def test_a_run_costs_no_process_start(pool: Pool) -> None:
    pool.run(connected_sum, 2)
    begin_s = time.monotonic()
    for _ in range(5):
        pool.run(connected_sum, 2)
    # An import of torch alone takes about a second, and two ranks would do it five times.
    assert (time.monotonic() - begin_s) / 5 < 0.5


def test_tensors_go_there_and_back(pool: Pool) -> None:
    for result in pool.run(double, 2, torch.arange(3.0)):
        assert torch.equal(result, torch.tensor([0.0, 2.0, 4.0]))


def test_an_exception_names_its_rank_and_comes_first(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 raised PlanError: 6 layers cannot fill 8 stages") as caught:
        pool.run(raise_on_rank, 3, 1)
    error = caught.value
    assert error.failures[0].rank == 1
    assert {failure.rank for failure in error.failures} == {0, 1, 2}
    assert "in raise_on_rank" in error.failures[0].text  # the traceback
    assert isinstance(error.__cause__, PlanError)
    assert error.__cause__.hint == "pp=2"


def test_peers_of_a_rank_that_raises_are_not_waited_for_long(pool: Pool) -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankError):
        pool.run(raise_on_rank, 2, 0, timeout_s=60)
    assert time.monotonic() - begin_s < 10


def test_an_exception_on_one_rank_is_raised_when_the_others_are_well(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 raised ValueError: only here") as caught:
        pool.run(raise_alone, 2, 1)
    assert len(caught.value.failures) == 1


def handle_signals_as_training() -> None:
    with SignalHandler():
        pass


def test_the_time_limit_shows_the_stack_of_every_rank(pool: Pool) -> None:
    before = pool.run(pid, 2)
    pool.run(handle_signals_as_training, 1)
    with pytest.raises(RankTimeout) as caught:
        pool.run(hang_in_a_collective, 2, timeout_s=3.0)
    by_rank = {failure.rank: str(failure) for failure in caught.value.failures}
    for rank, text in by_rank.items():
        assert f"rank {rank} was still running after 3." in text
        assert "in hang_in_a_collective" in text
    assert "barrier" in by_rank[1]
    assert "barrier" not in by_rank[0]
    assert set(pool.run(pid, 2)).isdisjoint(before)  # killed and replaced


def test_a_stopped_rank_is_killed_and_reported_as_silent(pool: Pool) -> None:
    with pytest.raises(RankTimeout, match="does not answer signals"):
        pool.run(stop_itself, 1, timeout_s=0.5)


@pytest.mark.parametrize(
    ("code", "words"), [(7, "ended with exit code 7"), (None, "was killed by SIGKILL")], ids=["exit", "kill"]
)
def test_a_dead_rank_is_named_quickly_and_replaced(pool: Pool, code: int | None, words: str) -> None:
    before = pool.run(pid, 2)
    begin_s = time.monotonic()
    with pytest.raises(RankError, match=f"rank 0 {words}") as caught:
        pool.run(wait_for_rank_0, 2, code)
    assert time.monotonic() - begin_s < 10
    assert caught.value.failures[0].rank == 0
    assert "my last words" in str(caught.value.failures[0])
    after = pool.run(connected_sum, 2)
    assert [rank for rank, _, _ in after] == [0, 1]
    assert pool.run(pid, 2)[0] != before[0]


def test_warnings_are_errors_in_workers(pool: Pool) -> None:
    with pytest.raises(RankError, match="raised UserWarning: the ice is thin"):
        pool.run(warn, 1)


def test_a_run_leaves_no_state(pool: Pool) -> None:
    before = pool.run(surroundings, 1)
    pool.run(connected_sum, 2)
    pool.run(disturb, 1)
    assert pool.run(surroundings, 1) == before
    assert before[0][:4] == (torch.float32, True, 1, False)


def test_objects_that_cannot_be_sent_are_refused(pool: Pool) -> None:
    with pytest.raises(TypeError, match="not a top-level function"):
        pool.run(lambda: 1, 1)
    with pytest.raises(RankError, match="pickle"):
        pool.run(unpicklable, 1)
    with pytest.raises(ValueError, match="1 to 16"):
        pool.run(pid, 17)


def test_a_closed_pool_leaves_no_process() -> None:
    own = Pool()
    [worker] = own.run(pid, 1)
    own.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert "torch" in sys.modules
