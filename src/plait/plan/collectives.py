"""Collective algorithms as data: which rank sends which range to which rank, step by step.

[Note: mirrored steps]
A reduction is a set of trees: the contributions to an element flow along one of them to its owner, and are
added where they meet. Run backwards, with sends and receives exchanged, the same steps carry the owner's sum
to every rank. So each algorithm is written once, as the half that reduces; `mirrored` gives the other half:
reduce and broadcast, reduce-scatter and all-gather. One rank adds, all others copy: the ranks end with the
same bits, whatever the rounding.

[Note: message order within a step]
The moves of a step run concurrently, and none waits for another to start. If a transport puts the messages
of two ranks in one queue (NCCL without batches), both ranks must queue them in the same order: those to the
higher rank first.

Symbols of the costs: p ranks, N bytes; a message of n bytes takes alpha + n / B seconds, adding it gamma n. A
rank can send and receive at the same time. Messages and bytes are those that one rank sends; empty ranges
(fewer elements than ranks) are not sent. Ranges are as even as integer sizes allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

ALGORITHMS = ("naive", "ring", "halving", "tree", "two-level")

SEGMENT_NUMEL = 1 << 18  # of a sum in two levels; shorter ones gain less than their messages' latencies
MOST_SEGMENTS = 16

Hosts = Sequence[Sequence[int]]  # per host, the indices of its ranks


@dataclass(frozen=True, slots=True)
class Send:
    """Elements `start` to `stop` are sent to rank number `to`."""

    to: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Elements `start` to `stop` are received from rank number `source`, and replace or are added to the
    local ones."""

    source: int
    start: int
    stop: int
    add: bool = False


Move = Send | Receive
Step = tuple[Move, ...]  # concurrent moves; additions happen when all are finished
Steps = list[Step]


def ranges(numel: int, num_ranks: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's range: the first ranges get one element more if sizes do not divide."""
    length, more = divmod(numel, num_ranks)
    starts = [rank * length + min(rank, more) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))


def mirrored(rank: int, steps: Steps) -> Steps:
    """The same steps backwards: sums are sent to where contributions came from. See [Note: mirrored
    steps]."""
    return _ordered(rank, [tuple(_flipped(move) for move in step) for step in reversed(steps)])


# --- the halves that reduce


def naive_reduce(rank: int, num_ranks: int, numel: int, root: int = 0) -> Steps:
    """Every rank sends everything to the root, which receives from one rank after the other.

    Time (p-1)(alpha + N/B + gamma N). Messages and bytes: 1 and N, the root none. Its mirror, a broadcast:
    (p-1)(alpha + N/B); the root p-1 and (p-1) N.
    """
    if rank != root:
        return _ordered(rank, [(Send(root, 0, numel),)])
    others = [peer for peer in range(num_ranks) if peer != root]
    return _ordered(rank, [(Receive(peer, 0, numel, add=True),) for peer in others])


def ring_reduce_scatter(rank: int, num_ranks: int, numel: int) -> Steps:
    """Every range goes once around the ring, accumulating, and ends at its owner: rank i has the i-th.

    Time (p-1) alpha + (p-1)/p N (1/B + gamma). Messages p-1, bytes (p-1)/p N, the minimum. Its mirror, the
    all-gather, takes the same without gamma. Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms
    for clusters of workstations.
    """
    parts = ranges(numel, num_ranks)
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    steps: Steps = []
    for number in range(num_ranks - 1):
        sent, received = parts[(rank - 1 - number) % num_ranks], parts[(rank - 2 - number) % num_ranks]
        steps.append((Send(after, *sent), Receive(before, *received, add=True)))
    return _ordered(rank, steps)


def halving_reduce_scatter(rank: int, num_ranks: int, numel: int) -> Steps:
    """Recursive halving: halves of the remaining ranges are exchanged with ever closer partners; rank i ends
    with the i-th range.

    For a power of two of ranks. Time log2 p alpha + (p-1)/p N (1/B + gamma). Messages log2 p, bytes (p-1)/p
    N. Its mirror, recursive doubling, is the all-gather. Rabenseifner 2004, Optimization of collective
    reduction operations; Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    assert is_power_of_two(num_ranks), f"{num_ranks} ranks are not a power of two"
    parts = ranges(numel, num_ranks)
    first, last = 0, num_ranks  # ranges that this rank still reduces
    steps: Steps = []
    while last - first > 1:
        distance = (last - first) // 2
        middle = first + distance
        lower, upper = (parts[first][0], parts[middle][0]), (parts[middle][0], parts[last - 1][1])
        if rank < middle:
            steps.append((Send(rank + distance, *upper), Receive(rank + distance, *lower, add=True)))
            last = middle
        else:
            steps.append((Send(rank - distance, *lower), Receive(rank - distance, *upper, add=True)))
            first = middle
    return _ordered(rank, steps)


def halving_reduce(rank: int, num_ranks: int, numel: int) -> Steps:
    """Recursive halving for any number of ranks: ranks from the largest power of two q on first send all to
    rank - q.

    For p > q, the time is that of q ranks plus alpha + N (1/B + gamma); a folded rank sends one message of N
    bytes. The mirror adds alpha + N/B, and one message of N bytes for ranks below p - q. Ranges are those of
    q ranks, so it is not a reduce-scatter.
    """
    power = 1 << (num_ranks.bit_length() - 1)
    if rank >= power:
        return _ordered(rank, [(Send(rank - power, 0, numel),)])
    folds: Steps = [(Receive(rank + power, 0, numel, add=True),)] if rank + power < num_ranks else []
    return _ordered(rank, folds + halving_reduce_scatter(rank, power, numel))


def tree_reduce(rank: int, num_ranks: int, numel: int, root: int = 0) -> Steps:
    """A binomial tree: in step k, ranks whose lowest set bit is the k-th send everything to the rank without
    it.

    Ranks are counted from the root. Time ceil(log2 p)(alpha + N/B + gamma N). Messages and bytes: 1 and N,
    the root none. Its mirror, the broadcast, takes the same without gamma; at most ceil(log2 p) messages.
    Thakur, Rabenseifner and Gropp 2005, section 3.
    """
    index = (rank - root) % num_ranks
    steps: Steps = []
    bit = 1
    while bit < num_ranks:
        if index & bit:
            steps.append((Send((index - bit + root) % num_ranks, 0, numel),))
            break
        if index + bit < num_ranks:
            steps.append((Receive((index + bit + root) % num_ranks, 0, numel, add=True),))
        bit *= 2
    return _ordered(rank, steps)


def two_level_reduce(rank: int, hosts: Hosts, numel: int) -> Steps:
    """Reduce inside hosts first, then between them: each host sends only its sum.

    n hosts of g ranks each (Mikami et al. 1811.05233): a ring reduce-scatter inside, then one between the
    ranks with the same index on each host, over their range. Time (g-1) alpha_in + (g-1)/g N (1/B_in +
    gamma), and (n-1) alpha_out + (n-1)/n N/g (1/B_out + gamma). Messages g-1 + n-1. Hosts of unequal size
    (Jia et al. 1807.11205): a tree inside to the first rank, then a ring between first ranks. Time ceil(log2
    g)(alpha_in + N/B_in + gamma N) for the largest g, and (n-1) alpha_out + (n-1)/n N (1/B_out + gamma).
    Messages n-1 of a first rank, 1 of the others. The mirrors take the same without gamma.
    """
    own = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    inside = hosts[own]
    index = inside.index(rank)
    if len({len(ranks) for ranks in hosts}) == 1:
        start, stop = ranges(numel, len(inside))[index]
        steps = _embedded(ring_reduce_scatter(index, len(inside), numel), inside)
        peers = [ranks[index] for ranks in hosts]
        steps += _embedded(ring_reduce_scatter(own, len(hosts), stop - start), peers, start)
    else:
        steps = _embedded(tree_reduce(index, len(inside), numel), inside)
        if index == 0:
            leaders = [ranks[0] for ranks in hosts]
            steps += _embedded(ring_reduce_scatter(own, len(hosts), numel), leaders)
    return _ordered(rank, steps)


def two_level_all_reduce(rank: int, hosts: Hosts, numel: int, segments: int | None = None) -> Steps:
    """Both halves in two levels, in `segments` that start one step apart, so that a segment is between hosts
    while others are inside them. For hosts of unequal size: 1.

    S segments: messages S times as many, of the same bytes; the time is that of the slower level and 1/S of
    the other's, and alpha of each message. None: segments of SEGMENT_NUMEL, at most MOST_SEGMENTS.
    """
    if segments is None:
        is_even = len(hosts) > 1 and {len(ranks) for ranks in hosts} == {max(2, len(hosts[0]))}
        segments = max(1, min(MOST_SEGMENTS, numel // SEGMENT_NUMEL)) if is_even else 1
    merged: dict[int, Step] = {}
    for number, (start, stop) in enumerate(ranges(numel, segments)):
        reduce = two_level_reduce(rank, hosts, stop - start)
        steps = reduce + mirrored(rank, reduce)
        for slot, step in enumerate(_embedded(steps, range(sum(map(len, hosts))), start), number):
            merged[slot] = merged.get(slot, ()) + step
    return _ordered(rank, [merged[slot] for slot in sorted(merged)])


# --- complete collectives


def all_reduce_steps(
    algorithm: str, rank: int, num_ranks: int, numel: int, hosts: Hosts | None = None
) -> Steps:
    """Steps of one of ALGORITHMS; two-level needs `hosts`. Twice the messages of a half, unless noted there.

    ring     2(p-1) alpha + 2 (p-1)/p N/B + (p-1)/p N gamma
    halving  2 log2 p alpha + 2 (p-1)/p N/B + (p-1)/p N gamma, for powers of two
    tree     ceil(log2 p)(2 alpha + 2 N/B + gamma N)
    naive    (p-1)(2 alpha + 2 N/B + gamma N)
    """
    if algorithm == "two-level":
        assert hosts is not None, "two-level without hosts"
        assert sorted(chain.from_iterable(hosts)) == [*range(num_ranks)], f"{hosts} of {num_ranks} ranks"
        return two_level_all_reduce(rank, hosts, numel)
    steps = _REDUCE[algorithm](rank, num_ranks, numel)
    return steps + mirrored(rank, steps)


def reduce_scatter_steps(
    algorithm: str, rank: int, num_ranks: int, numel: int, hosts: Hosts | None = None
) -> Steps:
    """Steps after which at least the rank's own range is reduced: an all-reduce for algorithms without a
    reduce-scatter."""
    if scatters(algorithm, num_ranks):
        return _REDUCE[algorithm](rank, num_ranks, numel)
    return all_reduce_steps(algorithm, rank, num_ranks, numel, hosts)


def scatters(algorithm: str, num_ranks: int) -> bool:
    """Return whether the algorithm's first half leaves rank i with the i-th range of the sum."""
    return algorithm == "ring" or (algorithm == "halving" and is_power_of_two(num_ranks))


def chain_broadcast(rank: int, num_ranks: int, numel: int, segments: int, root: int = 0) -> Steps:
    """A pipelined chain: every rank forwards one segment while it receives the next.

    Time (p-2+S)(alpha + N/(SB)), which tends to N/B for any p. Messages S, bytes N; the last rank none.
    Pjesivac-Grbovic et al. 2007, Performance analysis of MPI collective operations. The best S is
    `best_segments` in `plan/cost_model.py`.
    """
    index = (rank - root) % num_ranks
    parts = ranges(numel, segments)
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    steps: Steps = []
    for number in range(segments + 1):
        receives = index > 0 and number < segments
        sends = index + 1 < num_ranks and number > 0
        sent: Step = (Send(after, *parts[number - 1]),) if sends else ()
        steps.append((Receive(before, *parts[number]), *sent) if receives else sent)
    return _ordered(rank, steps)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def scratch_numel(steps: Steps) -> int:
    """Peak number of elements that are received but not yet added."""
    return max((sum(_added(move) for move in step) for step in steps), default=0)


def sent(steps: Steps) -> tuple[int, int]:
    """Messages and elements that the rank sends."""
    sizes = [move.stop - move.start for step in steps for move in step if isinstance(move, Send)]
    return len(sizes), sum(sizes)


_REDUCE: dict[str, Callable[[int, int, int], Steps]] = {
    "naive": naive_reduce,
    "ring": ring_reduce_scatter,
    "halving": halving_reduce,
    "tree": tree_reduce,
}


def _added(move: Move) -> int:
    return move.stop - move.start if isinstance(move, Receive) and move.add else 0


def _flipped(move: Move) -> Move:
    if isinstance(move, Send):
        return Receive(move.to, move.start, move.stop)
    return Send(move.source, move.start, move.stop)


def _embedded(steps: Steps, ranks: Sequence[int], offset: int = 0) -> Steps:
    """Translate steps of a group of ranks over a part of the elements to global ranks and elements."""

    def translate(move: Move) -> Move:
        start, stop = move.start + offset, move.stop + offset
        if isinstance(move, Send):
            return Send(ranks[move.to], start, stop)
        return Receive(ranks[move.source], start, stop, move.add)

    return [tuple(translate(move) for move in step) for step in steps]


def _ordered(rank: int, steps: Steps) -> Steps:
    """Without empty moves, and in the order of [Note: message order within a step]."""

    def goes_down(move: Move) -> bool:
        return move.to < rank if isinstance(move, Send) else move.source > rank

    full = [tuple(move for move in step if move.stop > move.start) for step in steps]
    return [tuple(sorted(step, key=goes_down)) for step in full if step]
