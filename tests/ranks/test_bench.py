"""Measurements of collectives: wrong results are found, and what is timed is the slowest rank."""

import time
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.bench import plans
from plait.bench.cases import SUM, Pattern, TensorSlice, make_case
from plait.bench.collectives import Measurement, measure
from plait.bench.request import ALGORITHM_CHOICES, Request
from plait.comm import Call, Group, OpType, ReduceWork, Transport, Work, connect
from plait.errors import CommError
from plait.plan.cost_model import COLLECTIVES
from support.pool import Pool, RankError

SOME = ("all-reduce", "barrier", "send-receive")


class Through:
    """A transport around another one."""

    def __init__(self, link: Transport) -> None:
        self.link, self.name, self.is_direct = link, link.name, link.is_direct

    def start(self, call: Call) -> Work:
        return self.link.start(call)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def start_sum(self, given: Tensor, *, scatter: bool, label: str) -> ReduceWork:
        return self.link.start_sum(given, scatter=scatter, label=label)

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return self.link.sends_narrow(narrow, wide)

    def close(self) -> None:
        self.link.close()


class Silent(Through):
    """Communicates nothing of some verbs, but the measurement's own maxima."""

    def __init__(self, link: Transport, verbs: tuple[OpType, ...]) -> None:
        super().__init__(link)
        self.verbs = verbs

    def start(self, call: Call) -> Work:
        return Work() if call.op_type in self.verbs and call.op == "sum" else super().start(call)


class Slow(Through):
    def start(self, call: Call) -> Work:
        if call.op_type is OpType.ALL_REDUCE and call.op == "sum":
            time.sleep(0.03)
        return super().start(call)


def _measured(request: Request) -> Measurement:
    return measure(connect(transport=request.backend), request)


@pytest.mark.parametrize(
    ("num_ranks", "request_"),
    [
        (2, Request(COLLECTIVES, (4, 4096), storage="both", rounds=1)),
        (3, Request(COLLECTIVES, (4, 100_000), "gloo", "bfloat16", "foreign", rounds=1)),
        (2, Request(SOME, (1000,), dtype="int64", rounds=2)),
        (
            3,
            Request(("reduce-scatter", "broadcast"), (4096,), "gloo", rounds=1, algorithms=("ring", "chain")),
        ),
        (4, Request(COLLECTIVES, (70_000,), rounds=1, algorithms=ALGORITHM_CHOICES)),
    ],
)
def test_every_verb_passes_its_check_and_all_ranks_find_the_same(
    pool: Pool, num_ranks: int, request_: Request
) -> None:
    found, *others = pool.run(_measured, num_ranks, request_)
    assert all((other.rows, other.rounds) == (found.rows, found.rounds) for other in others)
    transport = "host" if request_.backend == "auto" else request_.backend
    assert (found.transport, found.num_ranks, found.num_hosts) == (transport, num_ranks, 1)
    assert found.rounds == request_.rounds
    assert all(0 < row.min_s <= row.median_s < 30 for row in found.rows)
    piece = num_ranks * {"float32": 4, "bfloat16": 2, "int64": 8}[request_.dtype]
    for row in found.rows:
        assert row.num_bytes % piece == 0
        assert row.visits % found.rounds == 0
    cases = [(row.collective, row.storage, row.algorithm) for row in found.rows]
    for verb in request_.collectives:
        storages = request_.storages[:1] if verb == "barrier" else request_.storages
        sizes = 1 if verb == "barrier" else len(request_.sizes)
        asked = product(storages, request_.algorithms_of(verb, num_ranks))
        assert all(cases.count((verb, *case)) == sizes for case in asked)


def _measured_in_silence(verb: str) -> Measurement:
    world, group = connect(), connect().group
    silent = (OpType.SEND, OpType.RECEIVE) if verb == "send-receive" else (OpType(verb),)
    world.group = Group(group.ranks, group.rank, Silent(group.transport, silent))
    return measure(world, Request((verb,), (4096,), rounds=1))


@pytest.mark.parametrize("verb", [verb for verb in COLLECTIVES if verb != "barrier"])
def test_a_verb_that_communicates_nothing_is_found_before_it_is_timed(pool: Pool, verb: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(_measured_in_silence, 2, verb)
    assert f"{verb} gives wrong results" in str(caught.value)
    assert isinstance(caught.value.failures[0].exception, CommError)


def _measured_with_a_slow_rank() -> Measurement:
    world, group = connect(), connect().group
    if world.rank == 1:
        world.group = Group(group.ranks, group.rank, Slow(group.transport))
    return measure(world, Request(SOME, (4096,), rounds=2))


def test_a_time_is_that_of_the_slowest_rank(pool: Pool) -> None:
    for found in pool.run(_measured_with_a_slow_rank, 2):
        by_verb = {row.collective: row for row in found.rows}
        assert by_verb["all-reduce"].min_s > 0.03
        assert by_verb["barrier"].min_s < 0.03


def _ended_by_the_budget() -> int:
    return measure(connect(), Request(SOME, (1024,), budget_s=1e-3)).rounds


def test_three_rounds_are_measured_however_little_the_budget(pool: Pool) -> None:
    assert pool.run(_ended_by_the_budget, 2) == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_a_pattern_is_summed_exactly_and_shows_a_range_out_of_place(dtype: torch.dtype) -> None:
    pattern = Pattern(dtype, 5, torch.device("cpu"))
    wholes = [torch.empty(100_000, dtype=dtype) for _ in range(5)]
    for rank, whole in enumerate(wholes):
        pattern.fill(TensorSlice(whole, rank))
    assert pattern.matches(TensorSlice(sum(wholes[1:], wholes[0]), SUM))
    assert pattern.matches(TensorSlice(wholes[2][20_000:40_000], 2, 20_000))
    assert not pattern.matches(TensorSlice(wholes[2][20_000:40_000], 2, 40_000))
    assert not pattern.matches(TensorSlice(wholes[2], 3))


def test_a_piece_of_a_wrong_rank_does_not_pass() -> None:
    group = Group((0, 1), 1, None)
    first, second = torch.empty(8192), torch.empty(8192)
    pattern = Pattern(torch.float32, 2, torch.device("cpu"))
    for part in make_case("all-gather", group, first, second).outputs:
        pattern.fill(TensorSlice(part.tensor, 0, part.start))
    fits = [pattern.matches(part) for part in make_case("all-gather", group, first, second).outputs]
    assert fits == [True, False]


def _others_s() -> list[float]:
    """Return those of two steps; ranks 0 and 2 are on one host, 1 and 3 on another."""
    world = connect()
    with mock.patch.object(plans, "ranks_by_host", return_value=((0, 2), (1, 3))):
        return plans._others_s(world, [1.0 + world.rank, 0.5], [10.0 + 10 * (world.rank % 2), 1.0])


def test_time_of_other_programs_is_that_of_a_host_without_its_own_ranks(pool: Pool) -> None:
    assert pool.run(_others_s, 4) == [[6.0, 0.0], [14.0, 0.0]] * 2
