"""Buckets of gradients against torch's own function, and things that start in one order."""

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.parallel.ddp.bucket import GradSpec, assign_buckets
from plait.parallel.zero.grad_buffer import OrderedLauncher

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Drawn = tuple[int, torch.dtype, bool]  # elements, dtype, whether the gradient is sparse
PARAMETERS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 7).map(lambda number: number == 0)),
    min_size=1,
    max_size=25,
)
LIMITS = st.lists(st.integers(1, 300), min_size=1, max_size=3)


def _ours(drawn: list[Drawn], limits: list[int], order: list[int]) -> list[tuple[int, ...]]:
    travellers = [GradSpec(numel * dtype.itemsize, dtype, alone) for numel, dtype, alone in drawn]
    return assign_buckets(travellers, limits, order)


def _torchs(drawn: list[Drawn], limits: list[int], order: list[int] | None) -> list[tuple[int, ...]]:
    """With an order, torch takes the tensors in it, names them by it, and looks up flags by name."""
    tensors: list[Tensor] = [torch.empty(numel, dtype=dtype) for numel, dtype, _ in drawn]
    flags = [alone for _, _, alone in drawn]
    if order is not None:
        tensors = [tensors[index] for index in order]
    found, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, flags, order or [])
    return [tuple(bucket) for bucket in found]


def _left_over(drawn: list[Drawn], limits: list[int], order: list[int]) -> int:
    """The number of buckets that never close: each kind's last one, if it is below its limit."""
    sizes: dict[torch.dtype, list[int]] = {}
    for bucket in _ours(drawn, limits, order):
        _, dtype, alone = drawn[bucket[0]]
        if not alone:
            sizes.setdefault(dtype, []).append(sum(drawn[i][0] * dtype.itemsize for i in bucket))
    limit_of = [limits[min(len(found), len(limits)) - 1] for found in sizes.values()]
    return sum(found[-1] < limit for found, limit in zip(sizes.values(), limit_of, strict=True))


@given(PARAMETERS, LIMITS)
def test_parameters_are_assigned_as_by_torch(drawn: list[Drawn], limits: list[int]) -> None:
    """Without an order torch sorts the buckets by their lowest index, as the reducer does."""
    assert sorted(_ours(drawn, limits, [*range(len(drawn))]), key=min) == _torchs(drawn, limits, None)


@given(PARAMETERS, LIMITS, st.randoms(use_true_random=False))
def test_parameters_in_the_order_of_their_gradients_are_assigned_as_by_torch(
    drawn: list[Drawn], limits: list[int], shuffling: Random
) -> None:
    """Buckets are in the order in which they close. Those that never do come last, torch's in any order."""
    order = [*range(len(drawn))]
    shuffling.shuffle(order)
    ours, torchs = _ours(drawn, limits, order), _torchs(drawn, limits, order)
    closed = len(ours) - _left_over(drawn, limits, order)
    assert ours[:closed] == torchs[:closed]
    assert sorted(ours[closed:]) == sorted(torchs[closed:])


@given(PARAMETERS, LIMITS, st.randoms(use_true_random=False))
def test_every_parameter_travels_once_among_its_kind_and_in_order(
    drawn: list[Drawn], limits: list[int], shuffling: Random
) -> None:
    order = [*range(len(drawn))]
    shuffling.shuffle(order)
    place = {index: at for at, index in enumerate(order)}
    buckets = _ours(drawn, limits, order)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    for bucket in buckets:
        assert len({drawn[index][1] for index in bucket}) == 1
        assert len(bucket) == 1 or not any(drawn[index][2] for index in bucket)
        assert [*bucket] == sorted(bucket, key=place.__getitem__)


@given(PARAMETERS, LIMITS)
def test_a_bucket_closes_with_the_gradient_that_reaches_its_limit(
    drawn: list[Drawn], limits: list[int]
) -> None:
    num_closed: dict[torch.dtype, int] = {}
    for bucket in _ours(drawn, limits, [*range(len(drawn))]):
        _, dtype, alone = drawn[bucket[0]]
        if alone:
            continue
        number = num_closed.get(dtype, 0)
        num_closed[dtype] = number + 1
        before_last = sum(drawn[index][0] * dtype.itemsize for index in bucket[:-1])
        assert before_last < limits[min(number, len(limits) - 1)]


def test_the_first_limit_is_of_the_first_bucket_of_each_kind() -> None:
    travellers = [GradSpec(4, kind) for kind in "aabbaabb"]
    assert assign_buckets(travellers, [4, 8], range(8)) == [(0,), (2,), (1, 4), (3, 6), (5,), (7,)]


def test_no_parameters_make_no_bucket() -> None:
    assert assign_buckets([], [1], []) == []


# --- one order


class Queue:
    """A queue of `num` items that records what starts, and checks that no item starts twice."""

    def __init__(self, num: int) -> None:
        self.order = [f"thing {number}" for number in range(num)]
        self.started: list[str] = []
        self.in_order: OrderedLauncher[str] = OrderedLauncher(self.order, self.started.append)


COMPLETED = st.integers(1, 12).flatmap(
    lambda num: st.tuples(st.permutations(range(num)), st.integers(0, num))
)  # in which order, and how many become complete at all


@given(COMPLETED)
def test_buckets_start_in_order_whichever_completes_first(drawn: tuple[list[int], int]) -> None:
    """And each as soon as it can: when it and all before it are complete."""
    completions, _ = drawn
    queue = Queue(len(completions))
    queue.in_order.begin(starts=True)
    for number, which in enumerate(completions):
        assert not queue.in_order.all_started
        queue.in_order.complete(queue.order[which])
        complete = set(completions[: number + 1])
        can_start = next((i for i in range(len(completions)) if i not in complete), len(completions))
        assert queue.started == queue.order[:can_start]
        assert queue.in_order.next_index == can_start
    assert queue.in_order.all_started
    assert queue.in_order.completion_order == [queue.order[which] for which in completions]


@given(COMPLETED)
def test_incomplete_buckets_start_at_the_end_and_none_twice(drawn: tuple[list[int], int]) -> None:
    completions, num_complete = drawn
    queue = Queue(len(completions))
    queue.in_order.begin(starts=True)
    for which in completions[:num_complete]:
        queue.in_order.complete(queue.order[which])
    queue.in_order.start_remaining()
    assert queue.started == queue.order
    assert queue.in_order.all_started
    queue.in_order.start_remaining()
    assert queue.started == queue.order
    complete = [queue.order[which] for which in completions[:num_complete]]
    others = [thing for thing in queue.order if thing not in complete]
    assert queue.in_order.completion_order == complete + others


@given(COMPLETED)
def test_an_empty_queue_starts_nothing(drawn: tuple[list[int], int]) -> None:
    completions, num_complete = drawn
    queue = Queue(len(completions))
    queue.in_order.begin(starts=False)
    for which in completions[:num_complete]:
        queue.in_order.complete(queue.order[which])
    queue.in_order.start_remaining()
    assert not queue.started
    assert not queue.in_order.starts
    assert queue.in_order.next_index == 0


@given(COMPLETED, st.booleans())
def test_a_restarted_queue_has_nothing_complete(drawn: tuple[list[int], int], started_before: bool) -> None:
    completions, num_complete = drawn
    queue = Queue(len(completions))
    queue.in_order.begin(starts=started_before)
    for which in completions[:num_complete]:
        queue.in_order.complete(queue.order[which])
    queue.started.clear()
    queue.in_order.begin(starts=True)
    assert queue.in_order.completion_order == queue.order
    for which in reversed(range(1, len(completions))):
        queue.in_order.complete(queue.order[which])
    assert not queue.started
    queue.in_order.complete(queue.order[0])
    assert queue.started == queue.order


def test_before_it_has_begun_nothing_starts() -> None:
    queue = Queue(2)
    queue.in_order.complete("thing 0")
    queue.in_order.start_remaining()
    assert not queue.started


def test_without_waiting_the_next_bucket_starts_complete_or_not() -> None:
    queue = Queue(3)
    queue.in_order.begin(starts=True)
    queue.in_order.complete("thing 1")
    queue.in_order.start_next()
    assert queue.started == ["thing 0"]
    queue.in_order.complete("thing 0")  # late: it has started
    assert queue.started == ["thing 0", "thing 1"]
