"""Collective algorithms as data, on simulated ranks: right sums, no deadlock, counts and times by formula."""

import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.plan.collectives import (
    ALGORITHMS,
    SEGMENT_NUMEL,
    Hosts,
    Receive,
    Send,
    Step,
    Steps,
    all_reduce_steps,
    chain_broadcast,
    halving_reduce_scatter,
    is_power_of_two,
    mirrored,
    naive_reduce,
    ranges,
    reduce_scatter_steps,
    ring_reduce_scatter,
    scatters,
    scratch_numel,
    sent,
    tree_reduce,
    two_level_all_reduce,
)
from plait.plan.cost_model import Link, best_segments, chain_broadcast_s, chain_segments, gloo_broadcast_s
from support.collective_cost import cost_s, tree_broadcast_s, two_level_cost_s

NUM_RANKS = st.integers(1, 17)
NUMELS = st.integers(0, 60)
Clock = Callable[[int], float]  # seconds of a message, or of adding one, by its elements


def _free(_: int) -> float:
    return 0.0


def simulate(
    programs: list[Steps], values: list[list[int]], message_s: Clock = _free, add_s: Clock = _free
) -> float:
    """Runs the ranks' steps on `values`, in place; seconds until the last rank is through.

    The least that a transport may promise: nothing is buffered, a send is over when its receive has taken
    it, and a step when all its moves are. Messages of two ranks meet in the order in which they start.
    """
    at, clock = [0] * len(programs), [0.0] * len(programs)
    queues: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    open_moves: list[dict[int, float]] = [{} for _ in programs]  # number in the step -> when it was over

    def begin(rank: int) -> None:
        step = programs[rank][at[rank]]
        _check_disjoint(step)
        for number, move in enumerate(step):
            pair = (rank, move.to) if isinstance(move, Send) else (move.source, rank)
            queues[pair][isinstance(move, Receive)].append(number)

    for rank, program in enumerate(programs):
        if program:
            begin(rank)
    moved = True
    while moved:
        moved = False
        for (source, to), (sends, receives) in [*queues.items()]:
            if not (sends and receives):
                continue
            moved = True
            send, receive = sends.pop(0), receives.pop(0)
            given, taken = programs[source][at[source]][send], programs[to][at[to]][receive]
            assert (given.start, given.stop) == (taken.start, taken.stop)
            over = max(clock[source], clock[to]) + message_s(given.stop - given.start)
            open_moves[source][send] = open_moves[to][receive] = over
            mine, theirs = values[to], values[source][given.start : given.stop]
            adds = isinstance(taken, Receive) and taken.add
            for index, value in enumerate(theirs, given.start):
                mine[index] = mine[index] + value if adds else value
            for rank in {source, to}:
                step = programs[rank][at[rank]]
                if len(open_moves[rank]) == len(step):
                    clock[rank] = max(open_moves[rank].values()) + add_s(scratch_numel([step]))
                    open_moves[rank].clear()
                    at[rank] += 1
                    if at[rank] < len(programs[rank]):
                        begin(rank)
    assert at == [len(program) for program in programs], "ranks wait for each other"
    return max(clock)


def _check_disjoint(step: Step) -> None:
    touched = sorted((move.start, move.stop) for move in step if isinstance(move, Receive))
    read = [(move.start, move.stop) for move in step if isinstance(move, Send)]
    for (_, stop), (start, _) in pairwise(touched):
        assert stop <= start
    assert not [1 for a, b in touched for c, d in read if max(a, c) < min(b, d)], "sent while it changes"


def contributions(num_ranks: int, numel: int) -> list[list[int]]:
    """Sums of these say how often each rank's was added: a digit each."""
    return [[100**rank] * numel for rank in range(num_ranks)]


def total(num_ranks: int) -> int:
    return sum(100**rank for rank in range(num_ranks))


@st.composite
def cut_into_hosts(draw: st.DrawFn) -> tuple[int, Hosts]:
    """A number of ranks, on hosts of equal or unequal sizes."""
    if draw(st.booleans()):
        num_hosts, each = draw(st.sampled_from([(n, g) for n in range(1, 7) for g in range(1, 6)]))
        sizes = [each] * num_hosts
    else:
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    places = draw(st.permutations(range(sum(sizes))))
    found = []
    for size in sizes:
        found.append(tuple(places[:size]))
        places = places[size:]
    return sum(sizes), tuple(found)


@settings(deadline=None)
@given(NUM_RANKS, NUMELS, st.sampled_from([name for name in ALGORITHMS if name != "two-level"]))
def test_every_rank_ends_with_each_contribution_once(num_ranks: int, numel: int, algorithm: str) -> None:
    values = contributions(num_ranks, numel)
    simulate([all_reduce_steps(algorithm, r, num_ranks, numel) for r in range(num_ranks)], values)
    assert values == [[total(num_ranks)] * numel] * num_ranks


@settings(deadline=None)
@given(cut_into_hosts(), NUMELS)
def test_two_levels_sum_over_hosts_of_any_sizes(cut: tuple[int, Hosts], numel: int) -> None:
    num_ranks, hosts = cut
    values = contributions(num_ranks, numel)
    simulate([all_reduce_steps("two-level", r, num_ranks, numel, hosts) for r in range(num_ranks)], values)
    assert values == [[total(num_ranks)] * numel] * num_ranks


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), NUMELS, st.integers(1, 6))
def test_two_levels_in_segments_sum_with_as_many_bytes(n: int, g: int, numel: int, segments: int) -> None:
    numel += segments * n * g  # no rank's range of a segment is empty
    hosts = [range(h * g, h * g + g) for h in range(n)]
    values = contributions(n * g, numel)
    programs = [two_level_all_reduce(r, hosts, numel, segments) for r in range(n * g)]
    simulate(programs, values)
    assert values == [[total(n * g)] * numel] * (n * g)
    one = [two_level_all_reduce(r, hosts, numel, 1) for r in range(n * g)]
    assert sum(sent(p)[1] for p in programs) == sum(sent(p)[1] for p in one)
    assert all(sent(p)[0] == segments * sent(o)[0] for p, o in zip(programs, one, strict=True))
    if n > 1 and g > 1:
        assert len(two_level_all_reduce(0, hosts, 2 * SEGMENT_NUMEL)) == len(one[0]) + 1


@settings(deadline=None)
@given(NUM_RANKS, NUMELS, st.sampled_from(ALGORITHMS))
def test_a_reduce_scatter_leaves_each_rank_its_range(num_ranks: int, numel: int, algorithm: str) -> None:
    hosts = [range(num_ranks // 2), range(num_ranks // 2, num_ranks)][num_ranks < 2 :]
    values = contributions(num_ranks, numel)
    simulate([reduce_scatter_steps(algorithm, r, num_ranks, numel, hosts) for r in range(num_ranks)], values)
    for (start, stop), mine in zip(ranges(numel, num_ranks), values, strict=True):
        assert mine[start:stop] == [total(num_ranks)] * (stop - start)


@settings(deadline=None)
@given(NUM_RANKS, NUMELS, st.sampled_from([ring_reduce_scatter, halving_reduce_scatter]))
def test_a_mirrored_reduce_scatter_is_an_all_gather(
    num_ranks: int, numel: int, half: Callable[[int, int, int], Steps]
) -> None:
    if half is halving_reduce_scatter:
        num_ranks = 1 << (num_ranks.bit_length() - 1)
    expected = list(range(numel))
    cut = ranges(numel, num_ranks)
    values = [[v if start <= v < stop else -1 for v in expected] for start, stop in cut]
    simulate([mirrored(r, half(r, num_ranks, numel)) for r in range(num_ranks)], values)
    assert values == [expected] * num_ranks


@settings(deadline=None)
@given(st.data(), NUM_RANKS, NUMELS, st.integers(1, 20))
def test_a_broadcast_gives_every_rank_the_roots_tensor(
    data: st.DataObject, num_ranks: int, numel: int, segments: int
) -> None:
    root = data.draw(st.integers(0, num_ranks - 1))
    for programs in (
        [mirrored(r, tree_reduce(r, num_ranks, numel, root)) for r in range(num_ranks)],
        [mirrored(r, naive_reduce(r, num_ranks, numel, root)) for r in range(num_ranks)],
        [chain_broadcast(r, num_ranks, numel, segments, root) for r in range(num_ranks)],
    ):
        values = [[r] * numel for r in range(num_ranks)]
        simulate(programs, values)
        assert values == [[root] * numel] * num_ranks


@settings(deadline=None)
@given(NUM_RANKS, NUMELS, st.sampled_from(ALGORITHMS))
def test_between_two_ranks_the_message_to_the_higher_starts_first(
    num_ranks: int, numel: int, algorithm: str
) -> None:
    for rank in range(num_ranks):
        for step in all_reduce_steps(algorithm, rank, num_ranks, numel, [range(num_ranks)]):
            ups = [m.to > rank if isinstance(m, Send) else m.source < rank for m in step]
            assert ups == sorted(ups, reverse=True)


# --- what it costs


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_messages_and_elements_are_the_formulas(num_ranks: int) -> None:
    p = num_ranks
    most = 1 << (p.bit_length() - 1)
    numel = 3 * p * most
    for rank in range(p):
        assert sent(all_reduce_steps("ring", rank, p, numel)) == (2 * (p - 1), 2 * (p - 1) * numel // p)
        assert sent(ring_reduce_scatter(rank, p, numel)) == (p - 1, (p - 1) * numel // p)
        root = rank == 0
        assert sent(all_reduce_steps("naive", rank, p, numel)) == (
            ((p - 1), (p - 1) * numel) if root else (1, numel)
        )
        log2 = int(math.log2(most))
        halves = 2 * log2, 2 * (most - 1) * numel // most
        if rank >= most:
            halves = 1, numel
        elif rank + most < p:
            halves = halves[0] + 1, halves[1] + numel
        assert sent(all_reduce_steps("halving", rank, p, numel)) == halves
        children = sum(rank % (2 * bit) == 0 and rank + bit < p for bit in (1, 2, 4, 8, 16))
        messages = children + (rank > 0)
        assert sent(all_reduce_steps("tree", rank, p, numel)) == (messages, messages * numel)
        for segments in (1, 4):
            expected = (segments, numel) if rank < p - 1 else (0, 0)
            assert sent(chain_broadcast(rank, p, numel, segments)) == expected


@pytest.mark.parametrize(("num_hosts", "each"), [(1, 4), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_two_levels_send_between_hosts_as_much_as_the_formula(num_hosts: int, each: int) -> None:
    n, g, numel = num_hosts, each, 12 * num_hosts * each
    hosts = [range(h * g, h * g + g) for h in range(n)]
    for rank in range(n * g):
        steps = all_reduce_steps("two-level", rank, n * g, numel, hosts)
        assert sent(steps)[0] == 2 * (g - 1) + 2 * (n - 1)
        crossing = [
            m.stop - m.start for s in steps for m in s if isinstance(m, Send) and m.to // g != rank // g
        ]
        assert sum(crossing) == 2 * (n - 1) * numel // (n * g)
        assert sent(steps)[1] - sum(crossing) == 2 * (g - 1) * numel // g


LINK = Link(latency_s=5.0, bytes_per_s=2.0, reduce_s_per_byte=0.25)
OUT = Link(latency_s=40.0, bytes_per_s=0.5, reduce_s_per_byte=0.25)


def _simulated_s(programs: list[Steps], numel: int, link: Link = LINK) -> float:
    """With elements of one byte."""
    values = contributions(len(programs), numel)
    return simulate(programs, values, link.message_s, lambda n: n * link.reduce_s_per_byte)


@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "two-level"])
def test_the_cost_is_what_simulated_ranks_take(algorithm: str, num_ranks: int) -> None:
    numel = 16 * num_ranks
    for scatter, steps in ((False, all_reduce_steps), (True, reduce_scatter_steps)):
        programs = [steps(algorithm, rank, num_ranks, numel) for rank in range(num_ranks)]
        expected = cost_s(algorithm, num_ranks, numel, LINK, scatter=scatter)
        assert _simulated_s(programs, numel) == pytest.approx(expected, rel=1e-12)
    assert cost_s(algorithm, 1, numel, LINK) == 0


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_the_cost_of_a_broadcast_is_what_simulated_ranks_take(num_ranks: int) -> None:
    numel = 60
    tree = [mirrored(r, tree_reduce(r, num_ranks, numel)) for r in range(num_ranks)]
    assert _simulated_s(tree, numel) == pytest.approx(tree_broadcast_s(num_ranks, numel, LINK))
    for segments in (1, 2, 5, 60):
        programs = [chain_broadcast(r, num_ranks, numel, segments) for r in range(num_ranks)]
        expected = chain_broadcast_s(num_ranks, numel, segments, LINK)
        assert _simulated_s(programs, numel) == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1), (2, 2), (3, 3, 3), (4, 1), (2, 5, 3), (1, 8)])
def test_the_cost_of_two_levels_is_what_simulated_ranks_take(sizes: tuple[int, ...]) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    hosts = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    num_ranks, numel = sum(sizes), 36 * len(sizes)
    programs = [all_reduce_steps("two-level", r, num_ranks, numel, hosts) for r in range(num_ranks)]
    # One link's time at a time: of what goes inside with nothing between, and the other way round.
    both = two_level_cost_s(sizes, numel, LINK, LINK)
    assert _simulated_s(programs, numel) == pytest.approx(both)
    free = Link(0.0, math.inf)
    apart = two_level_cost_s(sizes, numel, LINK, free) + two_level_cost_s(sizes, numel, free, LINK)
    assert apart == pytest.approx(both)
    assert two_level_cost_s(sizes, numel, LINK, OUT) == pytest.approx(
        two_level_cost_s(sizes, numel, LINK, free) + two_level_cost_s(sizes, numel, free, OUT)
    )


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 12), st.integers(0, 50), st.integers(1, 20))
def test_no_number_of_segments_beats_the_best(
    num_bytes: int, num_ranks: int, latency_s: int, bandwidth: int
) -> None:
    def exact_s(segments: int) -> Fraction:
        if num_ranks == 1:
            return Fraction(0)
        return (num_ranks - 2 + segments) * (latency_s + Fraction(num_bytes, segments * bandwidth))

    best = best_segments(num_bytes, num_ranks, float(latency_s), float(bandwidth))
    assert 1 <= best <= num_bytes
    assert exact_s(best) == min(exact_s(segments) for segments in range(1, num_bytes + 1))


def test_gloos_tree_shares_the_link_of_a_rank_with_many_children() -> None:
    messages = {
        num_ranks: gloo_broadcast_s(num_ranks, 0, Link(1.0, 1.0)) for num_ranks in (1, 2, 3, 4, 8, 16)
    }
    assert messages == {1: 0, 2: 1, 3: 2, 4: 3, 8: 6, 16: 10}


@given(st.integers(0, 1 << 30), st.integers(1, 64), st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_chain_is_chosen_where_it_is_estimated_to_be_faster(
    num_bytes: int, num_ranks: int, latency_s: float, bytes_per_s: float
) -> None:
    link = Link(latency_s, bytes_per_s)
    chosen, own_s = chain_segments(num_bytes, num_ranks, link), gloo_broadcast_s(num_ranks, num_bytes, link)
    if chosen is None:
        segments = (1, 2, best_segments(num_bytes, num_ranks, latency_s, bytes_per_s))
        assert all(chain_broadcast_s(num_ranks, num_bytes, s, link) >= own_s * (1 - 1e-12) for s in segments)
    else:
        assert num_ranks > 2
        assert chain_broadcast_s(num_ranks, num_bytes, chosen, link) < own_s


def test_algorithms_with_a_reduce_scatter_of_their_own() -> None:
    assert [name for name in ALGORITHMS if scatters(name, 6)] == ["ring"]
    assert [name for name in ALGORITHMS if scatters(name, 8)] == ["ring", "halving"]
    assert [number for number in range(1, 18) if is_power_of_two(number)] == [1, 2, 4, 8, 16]


def test_received_parts_wait_in_scratch() -> None:
    assert scratch_numel(all_reduce_steps("ring", 0, 4, 40)) == 10
    assert scratch_numel(all_reduce_steps("halving", 0, 4, 40)) == 20
    assert scratch_numel(all_reduce_steps("tree", 0, 4, 40)) == 40
    assert scratch_numel(all_reduce_steps("tree", 3, 4, 40)) == 0
    assert scratch_numel(all_reduce_steps("ring", 0, 1, 40)) == 0
