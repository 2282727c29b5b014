"""The algorithms of `plan/collectives.py` on any transport, by its sends and receives alone.

[Note: what is rounded where]
Partial sums travel in the tensor's dtype. A rank adds what it receives to what it has: torch adds bf16
and fp16 in float32 and rounds the sum, once for every hop. Who wants sums of narrow contributions in float32
widens them before they travel (`wide` of `Sums.start_sum`), which doubles the bytes. The mean divides the sum
once it is everywhere.

[Note: communication beside computation]
A step of an algorithm starts when the one before it is over, so somebody has to wait in between. `Sums` has a
thread do so; waits and torch's operations release the interpreter, and backward goes on. The sums of a group
are made one after the other, in the order in which they start. The thread ends when it has nothing to do,
and does not keep a process alive whose main thread has failed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plait.comm.collectives import Group, check_op, start_receive, start_send
from plait.comm.topology import hosts_of
from plait.comm.transport import PartialReduceWork, ReduceWork, Work
from plait.errors import CommError
from plait.plan.collectives import (
    ALGORITHMS,
    Hosts,
    Send,
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
    scratch_numel,
    tree_reduce,
)

_COMBINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda mine, received: mine.add_(received),
    "mean": lambda mine, received: mine.add_(received),
    "max": lambda mine, received: torch.maximum(mine, received, out=mine),
    "min": lambda mine, received: torch.minimum(mine, received, out=mine),
}


def run_steps(
    steps: Steps,
    flat: Tensor,
    group: Group,
    op: str = "sum",
    *,
    label: str = "",
    scratch: Tensor | None = None,
) -> None:
    """This rank's steps, on its flat tensor. `scratch`: of its dtype, as long as `scratch_numel` says."""
    combine = _COMBINE[op]
    if scratch is None:
        scratch = flat.new_empty(scratch_numel(steps))
    for step in steps:
        pendings: list[Work] = []
        received: list[tuple[Tensor, Tensor]] = []
        at = 0
        for move in step:
            mine = flat[move.start : move.stop]
            if isinstance(move, Send):
                pendings.append(start_send(mine, group, move.to, label=label))
                continue
            if move.add:
                waiting = scratch[at : at + mine.numel()]
                received.append((mine, waiting))
                at, mine = at + mine.numel(), waiting
            pendings.append(start_receive(mine, group, move.source, label=label))
        for pending in pendings:
            pending.wait()
        for mine, waiting in received:
            combine(mine, waiting)
    if op == "mean":
        flat.div_(group.size)


def all_reduce_by(
    algorithm: str,
    tensor: Tensor,
    group: Group,
    op: str = "sum",
    *,
    hosts: Hosts | None = None,
    label: str = "",
) -> None:
    """Reduces `tensor` in place; every rank ends with the same bits. See [Note: what is rounded where].

    `algorithm`: one of ALGORITHMS. `hosts`: for two-level, the places of each host's ranks; None finds out.
    """
    check_op(op, tensor)
    hosts = _hosts(algorithm, group, hosts)
    flat = tensor.contiguous().view(-1)
    steps = all_reduce_steps(algorithm, group.rank, group.size, flat.numel(), hosts)
    run_steps(steps, flat, group, op, label=label)
    _put_back(tensor, flat)


def reduce_scatter_by(
    algorithm: str,
    whole: Tensor,
    group: Group,
    op: str = "sum",
    *,
    hosts: Hosts | None = None,
    label: str = "",
) -> Tensor:
    """Reduces into this rank's range of flat `whole`, which it returns; other ranges hold parts of sums.

    The number of elements need not divide: see `ranges`. An all-reduce where the algorithm `scatters` not.
    """
    check_op(op, whole)
    hosts = _hosts(algorithm, group, hosts)
    steps = reduce_scatter_steps(algorithm, group.rank, group.size, whole.numel(), hosts)
    run_steps(steps, whole, group, op, label=label)
    return _own_range(whole, group)


def all_gather_by(algorithm: str, whole: Tensor, group: Group, *, label: str = "") -> None:
    """Fills flat `whole`, of which each rank has its own range. By ring, or for powers of two by halving."""
    halves = {"ring": ring_reduce_scatter}
    if is_power_of_two(group.size):
        halves["halving"] = halving_reduce_scatter
    _check_name(algorithm, tuple(halves), f"an all-gather of {group.size} ranks")
    steps = halves[algorithm](group.rank, group.size, whole.numel())
    run_steps(mirrored(group.rank, steps), whole, group, label=label)


def broadcast_by(
    algorithm: str, tensor: Tensor, group: Group, source: int = 0, *, segments: int = 1, label: str = ""
) -> None:
    """Overwrites `tensor` with that of the rank number `source`: by naive, tree or chain (in `segments`)."""
    _check_name(algorithm, ("naive", "tree", "chain"), "a broadcast")
    flat = tensor.contiguous().view(-1)
    place = group.rank, group.size, flat.numel()
    if algorithm == "chain":
        steps = chain_broadcast(*place, segments, source)
    else:
        half = {"naive": naive_reduce, "tree": tree_reduce}[algorithm]
        steps = mirrored(group.rank, half(*place, source))
    run_steps(steps, flat, group, label=label)
    _put_back(tensor, flat)


class AlgorithmReduce:
    """Sums of flat CPU tensors over a group by one algorithm, beside computation."""

    def __init__(self, algorithm: str, group: Group, hosts: Hosts | None = None) -> None:
        """Every rank of the group must make it at the same point: two-level ranks tell each other their host,
        unless `hosts` are given."""
        self._algorithm = algorithm
        self._group = group
        self._hosts = _hosts(algorithm, group, hosts)
        self._scratch = torch.empty(0, dtype=torch.uint8)  # of one sum at a time; the largest so far

    def scratch_numel(self, numel: int, *, scatter: bool) -> int:
        """Elements that wait at a time to be added, in a sum of as many."""
        return scratch_numel(self._steps(numel, scatter=scatter))

    def reserve(self, num_bytes: int) -> None:
        """Takes the memory for what is received now, and not when a sum first needs it."""
        self._scratch = torch.empty(num_bytes, dtype=torch.uint8)

    def start_sum(
        self, given: Tensor, *, scatter: bool, label: str = "", wide: torch.dtype | None = None
    ) -> ReduceWork:
        """As `start_scattered_sum` (`scatter`) and `start_exchange`; `given` may be overwritten until `into`.

        `wide`: the dtype to add in, and so to travel in; what is narrower is copied first.
        """
        flat = given if wide is None else given.to(wide)
        pending = self._start(flat, scatter=scatter, label=label)
        summed = _own_range(flat, self._group) if scatter else flat
        return PartialReduceWork([summed], pending, 0 if flat is given else flat.nbytes)

    def start_all_reduce(self, flat: Tensor, *, label: str = "") -> Work:
        """Sums flat tensors in place; every rank ends with the same bits."""
        return self._start(flat, scatter=False, label=label)

    def _start(self, flat: Tensor, *, scatter: bool, label: str) -> Work:
        assert not flat.is_cuda, "the thread is not on the stream that makes the tensor"
        steps = self._steps(flat.numel(), scatter=scatter)
        if not steps:
            return Work()
        assert self._group.background is not None, "a group that its world has not made"
        return self._group.background.submit(lambda: self._run(steps, flat, label))

    def _run(self, steps: Steps, flat: Tensor, label: str) -> None:
        num_bytes = scratch_numel(steps) * flat.itemsize
        if self._scratch.nbytes < num_bytes:
            self.reserve(num_bytes)
        scratch = self._scratch[:num_bytes].view(flat.dtype)
        run_steps(steps, flat, self._group, label=label, scratch=scratch)

    def _steps(self, numel: int, *, scatter: bool) -> Steps:
        make = reduce_scatter_steps if scatter else all_reduce_steps
        return make(self._algorithm, self._group.rank, self._group.size, numel, self._hosts)


def _own_range(flat: Tensor, group: Group) -> Tensor:
    start, stop = ranges(flat.numel(), group.size)[group.rank]
    return flat[start:stop]


def _put_back(tensor: Tensor, flat: Tensor) -> None:
    """What was strided travelled in a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _hosts(algorithm: str, group: Group, hosts: Hosts | None) -> Hosts | None:
    _check_name(algorithm, ALGORITHMS, "a reduction")
    if algorithm != "two-level" or hosts is None:
        return hosts_of(group) if algorithm == "two-level" else None
    if sorted(place for places in hosts for place in places) != [*range(group.size)]:
        raise CommError(
            "the hosts do not hold each rank of the group once",
            given=f"hosts of places {[[*places] for places in hosts]}",
            expected=f"each of 0 to {group.size - 1}, in one of them",
        )
    return hosts


def _check_name(algorithm: str, known: tuple[str, ...], verb: str) -> None:
    if algorithm not in known:
        raise CommError(
            f"{verb} cannot go by that algorithm", given=repr(algorithm), expected=" or ".join(known)
        )
