"""Collective algorithms as data: which rank sends which range to whom, step by step.

[Note: an all-reduce is a reduction and its mirror]
A reduction is a set of trees: the contributions to an element flow along one of them to its owner, and are
added where they meet. Played backwards, every receive a send, the same steps carry the owner's sum to
everyone. So each algorithm here is written down once, as the half that reduces; `mirrored` makes the other:
reduce and broadcast, reduce-scatter and all-gather. One rank adds, all others copy: the ranks end with
the same bits, whatever the rounding.

[Note: which message starts first]
The moves of a step go at the same time, and none waits for another to start. Where a transport lets the
messages of two ranks go in one queue (NCCL without batches), both must queue them in one order: first
those to the higher rank.

The symbols of the costs: p ranks, N bytes; a message of n bytes takes alpha + n / B seconds, adding it
gamma n. A rank can send and receive at once. Messages and bytes are what one rank sends; of empty ranges
(fewer elements than ranks) nothing is sent. Ranges are cut as evenly as whole elements allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

ALGORITHMS = ("naive", "ring", "halving", "tree", "two-level")

Hosts = Sequence[Sequence[int]]  # of each host, the places of its ranks


@dataclass(frozen=True, slots=True)
class Send:
    """Elements `start` to `stop` go to rank number `to`."""

    to: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Elements `start` to `stop` come from rank number `source` and replace ours, or are added to them."""

    source: int
    start: int
    stop: int
    add: bool = False


Move = Send | Receive
Step = tuple[Move, ...]  # moves that go at the same time; what is added, is added when all are over
Steps = list[Step]


def ranges(numel: int, num_ranks: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's range: the first ones have one element more where they do not divide."""
    length, more = divmod(numel, num_ranks)
    starts = [rank * length + min(rank, more) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))


def mirrored(rank: int, steps: Steps) -> Steps:
    """The same steps backwards: sums go where contributions came from. See [Note: an all-reduce is ...]."""
    return _ordered(rank, [tuple(_flipped(move) for move in step) for step in reversed(steps)])


# --- the halves that reduce


def naive_reduce(rank: int, num_ranks: int, numel: int, root: int = 0) -> Steps:
    """Everybody sends everything to the root, which takes one after the other.

    Time (p-1)(alpha + N/B + gamma N). Messages and bytes: 1 and N, the root none. Its mirror, a broadcast:
    (p-1)(alpha + N/B); the root p-1 and (p-1) N.
    """
    if rank != root:
        return _ordered(rank, [(Send(root, 0, numel),)])
    others = [peer for peer in range(num_ranks) if peer != root]
    return _ordered(rank, [(Receive(peer, 0, numel, add=True),) for peer in others])


def ring_reduce_scatter(rank: int, num_ranks: int, numel: int) -> Steps:
    """Every range goes once round the ring, growing, and ends at its owner: rank i has the i-th.

    Time (p-1) alpha + (p-1)/p N (1/B + gamma). Messages p-1, bytes (p-1)/p N, which is the least there is.
    Its mirror, the all-gather, takes as much without gamma. Patarasuk and Yuan 2009, Bandwidth optimal
    all-reduce algorithms for clusters of workstations.
    """
    part = ranges(numel, num_ranks)
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    steps: Steps = []
    for number in range(num_ranks - 1):
        given, taken = part[(rank - 1 - number) % num_ranks], part[(rank - 2 - number) % num_ranks]
        steps.append((Send(after, *given), Receive(before, *taken, add=True)))
    return _ordered(rank, steps)


def halving_reduce_scatter(rank: int, num_ranks: int, numel: int) -> Steps:
    """Halves of what is left are exchanged with ever nearer partners: rank i ends with the i-th range.

    Of a power of two of ranks. Time log2 p alpha + (p-1)/p N (1/B + gamma). Messages log2 p, bytes
    (p-1)/p N. Its mirror, recursive doubling, is the all-gather. Rabenseifner 2004, Optimization of
    collective reduction operations; Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    assert is_power_of_two(num_ranks), f"halves of {num_ranks} ranks"
    part = ranges(numel, num_ranks)
    first, last = 0, num_ranks  # the ranges that are still summed here
    steps: Steps = []
    while last - first > 1:
        distance = (last - first) // 2
        middle = first + distance
        lower, upper = (part[first][0], part[middle][0]), (part[middle][0], part[last - 1][1])
        if rank < middle:
            steps.append((Send(rank + distance, *upper), Receive(rank + distance, *lower, add=True)))
            last = middle
        else:
            steps.append((Send(rank - distance, *lower), Receive(rank - distance, *upper, add=True)))
            first = middle
    return _ordered(rank, steps)


def halving_reduce(rank: int, num_ranks: int, numel: int) -> Steps:
    """The same for any number: ranks from the largest power of two q on fold all they have into one below.

    Where p > q, time is that of q ranks and alpha + N (1/B + gamma) more; a folded rank sends one message of
    N bytes. The mirror's: alpha + N/B more, and one message of N bytes more for ranks below p - q. Ranges
    are those of q ranks: it is no reduce-scatter.
    """
    most = 1 << (num_ranks.bit_length() - 1)
    if rank >= most:
        return _ordered(rank, [(Send(rank - most, 0, numel),)])
    folds: Steps = [(Receive(rank + most, 0, numel, add=True),)] if rank + most < num_ranks else []
    return _ordered(rank, folds + halving_reduce_scatter(rank, most, numel))


def tree_reduce(rank: int, num_ranks: int, numel: int, root: int = 0) -> Steps:
    """A binomial tree: in step k ranks whose k-th bit is the lowest one send all to the rank without it.

    Ranks count from the root on. Time ceil(log2 p)(alpha + N/B + gamma N). Messages and bytes: 1 and N, the
    root none. Its mirror, the broadcast, takes as much without gamma; at most ceil(log2 p) messages. Thakur,
    Rabenseifner and Gropp 2005, section 3.
    """
    place = (rank - root) % num_ranks
    steps: Steps = []
    bit = 1
    while bit < num_ranks:
        if place & bit:
            steps.append((Send((place - bit + root) % num_ranks, 0, numel),))
            break
        if place + bit < num_ranks:
            steps.append((Receive((place + bit + root) % num_ranks, 0, numel, add=True),))
        bit *= 2
    return _ordered(rank, steps)


def two_level_reduce(rank: int, hosts: Hosts, numel: int) -> Steps:
    """First inside hosts, then between them: what leaves a host is one host's sum.

    n hosts of g ranks each (Mikami et al. 1811.05233): a ring reduce-scatter inside, then one between the
    ranks of the same place in each host, over their range. Time (g-1) alpha_in + (g-1)/g N (1/B_in +
    gamma), and (n-1) alpha_out + (n-1)/n N/g (1/B_out + gamma). Messages g-1 + n-1.
    Hosts of unequal numbers (Jia et al. 1807.11205): a tree inside to the first rank, then a ring between
    those. Time ceil(log2 g)(alpha_in + N/B_in + gamma N) for the largest g, and (n-1) alpha_out +
    (n-1)/n N (1/B_out + gamma). Messages n-1 of a first rank, 1 of the others.
    The mirrors take as much without gamma.
    """
    own = next(number for number, places in enumerate(hosts) if rank in places)
    inside = hosts[own]
    place = inside.index(rank)
    if len({len(places) for places in hosts}) == 1:
        start, stop = ranges(numel, len(inside))[place]
        steps = _embedded(ring_reduce_scatter(place, len(inside), numel), inside)
        peers = [places[place] for places in hosts]
        steps += _embedded(ring_reduce_scatter(own, len(hosts), stop - start), peers, start)
    else:
        steps = _embedded(tree_reduce(place, len(inside), numel), inside)
        if place == 0:
            leaders = [places[0] for places in hosts]
            steps += _embedded(ring_reduce_scatter(own, len(hosts), numel), leaders)
    return _ordered(rank, steps)


# --- whole collectives


def all_reduce_steps(
    algorithm: str, rank: int, num_ranks: int, numel: int, hosts: Hosts | None = None
) -> Steps:
    """One of ALGORITHMS, of which two-level needs `hosts`. Twice the messages of a half, unless said there.

    ring     2(p-1) alpha + 2 (p-1)/p N/B + (p-1)/p N gamma
    halving  2 log2 p alpha + 2 (p-1)/p N/B + (p-1)/p N gamma, for powers of two
    tree     ceil(log2 p)(2 alpha + 2 N/B + gamma N)
    naive    (p-1)(2 alpha + 2 N/B + gamma N)
    """
    if algorithm == "two-level":
        assert hosts is not None, "two-level without hosts"
        assert sorted(chain.from_iterable(hosts)) == [*range(num_ranks)], f"{hosts} of {num_ranks} ranks"
        steps = two_level_reduce(rank, hosts, numel)
    else:
        steps = _REDUCE[algorithm](rank, num_ranks, numel)
    return steps + mirrored(rank, steps)


def reduce_scatter_steps(
    algorithm: str, rank: int, num_ranks: int, numel: int, hosts: Hosts | None = None
) -> Steps:
    """After which at least the rank's own range is the sum. An all-reduce, where the algorithm has no own."""
    if scatters(algorithm, num_ranks):
        return _REDUCE[algorithm](rank, num_ranks, numel)
    return all_reduce_steps(algorithm, rank, num_ranks, numel, hosts)


def scatters(algorithm: str, num_ranks: int) -> bool:
    """Whether the algorithm's first half leaves rank i with the i-th range of the sum."""
    return algorithm == "ring" or (algorithm == "halving" and is_power_of_two(num_ranks))


def chain_broadcast(rank: int, num_ranks: int, numel: int, segments: int, root: int = 0) -> Steps:
    """A segment goes from rank to rank while the one before it goes ahead.

    Time (p-2+S)(alpha + N/(SB)), which tends to N/B whatever p is. Messages S, bytes N; the last rank none.
    Pjesivac-Grbovic et al. 2007, Performance analysis of MPI collective operations. The best S is
    `best_segments` in `plan/cost.py`.
    """
    place = (rank - root) % num_ranks
    part = ranges(numel, segments)
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    steps: Steps = []
    for number in range(segments + 1):
        arrives = place > 0 and number < segments
        leaves = place + 1 < num_ranks and number > 0
        given: Step = (Send(after, *part[number - 1]),) if leaves else ()
        steps.append((Receive(before, *part[number]), *given) if arrives else given)
    return _ordered(rank, steps)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def scratch_numel(steps: Steps) -> int:
    """The most elements that wait at a time to be added."""
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


def _embedded(steps: Steps, places: Sequence[int], offset: int = 0) -> Steps:
    """Steps of a few ranks over a part of the elements, as those of all ranks over all of them."""

    def put(move: Move) -> Move:
        start, stop = move.start + offset, move.stop + offset
        if isinstance(move, Send):
            return Send(places[move.to], start, stop)
        return Receive(places[move.source], start, stop, move.add)

    return [tuple(put(move) for move in step) for step in steps]


def _ordered(rank: int, steps: Steps) -> Steps:
    """Without what is empty, and in the order of [Note: which message starts first]."""

    def goes_down(move: Move) -> bool:
        return move.to < rank if isinstance(move, Send) else move.source > rank

    full = [tuple(move for move in step if move.stop > move.start) for step in steps]
    return [tuple(sorted(step, key=goes_down)) for step in full if step]
