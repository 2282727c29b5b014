"""The sizes and verbs that a measurement is asked for, and the memory that it takes."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.bench.request import (
    Request,
    available_bytes,
    check_algorithms,
    check_memory,
    parse_algorithms,
    parse_collectives,
    parse_sizes,
)
from plait.errors import ConfigError
from plait.plan.cost_model import COLLECTIVES


def test_sizes_are_a_range_by_powers_of_4_or_a_list() -> None:
    assert parse_sizes("1K:256M") == tuple(1 << power for power in range(10, 29, 2))
    assert parse_sizes("1K:3K") == (1024, 3072)
    assert parse_sizes("64:64") == (64,)
    assert parse_sizes("3M, 1k,64KiB,1KB") == (1 << 10, 64 << 10, 3 << 20)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_range_begins_and_ends_where_it_says_with_steps_of_at_most_4(one: int, other: int) -> None:
    least, most = sorted((one, other))
    sizes = parse_sizes(f"{least}:{most}")
    assert (sizes[0], sizes[-1]) == (least, most)
    assert all(a < b <= 4 * a for a, b in itertools.pairwise(sizes))


def test_verbs_are_named_one_by_one_or_with_commas_in_the_usual_order_once() -> None:
    assert parse_collectives([]) == COLLECTIVES
    assert parse_collectives(["barrier,all-reduce", "reduce", "barrier"]) == (
        "all-reduce",
        "reduce",
        "barrier",
    )


def test_each_collective_has_its_algorithms_and_ranks_that_they_need() -> None:
    request = Request(COLLECTIVES, (1,), algorithms=parse_algorithms("auto, halving,chain:8,halving"))
    assert request.algorithms == ("auto", "halving", "chain:8")
    assert request.algorithms_of("all-reduce", 3) == ("auto", "halving")
    assert request.algorithms_of("all-gather", 4) == ("auto", "halving")
    assert request.algorithms_of("all-gather", 3) == ("auto",)
    assert request.algorithms_of("broadcast", 3) == ("auto", "chain:8")
    assert request.algorithms_of("gather", 4) == ("auto",)
    without_auto = Request(COLLECTIVES, (1,), algorithms=("chain:8",))
    assert without_auto.algorithms_of("broadcast", 3) == ("chain:8",)
    assert without_auto.algorithms_of("all-reduce", 3) == ()
    assert without_auto.algorithms_of("send-receive", 3) == ("auto",), "formulas need its line"
    with pytest.raises(ConfigError, match="unknown value of --algorithm"):
        parse_algorithms("rings")


def test_algorithms_that_cannot_be_measured_are_an_error() -> None:
    request = Request(("all-gather", "gather"), (1,), algorithms=("halving",))
    check_algorithms(request, 4, "cpu")
    with pytest.raises(ConfigError, match="named algorithms are for CPU ranks"):
        check_algorithms(request, 4, "cuda")
    with pytest.raises(ConfigError, match="no requested collective has a requested algorithm") as caught:
        check_algorithms(request, 3, "cpu")
    assert "all-gather: ring, halving" in str(caught.value)
    check_algorithms(Request(("gather",), (1,), algorithms=("auto", "ring")), 3, "cpu")


def test_memory_needed_is_that_of_all_ranks_and_storages() -> None:
    def request(storage: str, verbs: tuple[str, ...] = ("all-reduce",)) -> Request:
        return Request(verbs, (1024, 1 << 20), storage=storage)

    check_memory(request("owned"), 2, 10 << 20)  # 8 tensors
    check_memory(request("both"), 64, None)
    check_memory(request("both", ("barrier",)), 64, 0)
    for storage, local_ranks in (("both", 2), ("owned", 3)):  # 12
        with pytest.raises(ConfigError, match="too little memory") as caught:
            check_memory(request(storage, COLLECTIVES), local_ranks, 10 << 20)
        assert "1M on" in str(caught.value)
        assert "need 12M; 10M are available" in str(caught.value)
        assert str(caught.value).endswith("--sizes 1K:256K")


def test_a_host_has_memory_and_never_more_than_all_of_it() -> None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        assert available_bytes() is None
        return
    total = int(meminfo.read_text().split()[1]) * 1024
    assert 0 < (available_bytes() or 0) <= total
