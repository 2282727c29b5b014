"""The algorithms of `plan/collectives.py` on any transport, by sends and receives alone.

[Note: rounding]
Partial sums are sent in the tensor's dtype. A rank adds what it receives to what it has: torch adds bf16 and
fp16 in float32 and rounds the sum, once per hop. To sum narrow contributions in float32, widen them first
(`wide` of `AlgorithmReduce.start_sum`), which doubles the bytes. The mean divides the final sum.

[Note: overlap with computation]
A step of an algorithm starts when the previous one has completed, so something has to wait in between: the
comm thread of the group. Waits and torch's operations release the GIL, and backward goes on. The sums of a
group run one after the other, in the order in which they are started. The thread is a daemon: it does not
keep a process alive whose main thread has failed.

[Note: broadcasts between hosts]
In Gloo's broadcast a rank sends to all its children at once, over one link: N bytes reach 4 hosts after 3 N/B
and 8 hosts after 6 N/B. A chain in segments takes little more than N/B, for any number of hosts. Ranks of one
host share no links but the processors that copy, and every broadcast copies the same bytes: there, the chain
gains nothing. NCCL's own broadcast is a chain of this kind.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm.collectives import Group, broadcast, check_op, start_receive, start_send
from plait.comm.shm.rendezvous import ranks_by_host
from plait.comm.transport import PartialReduceWork, ReduceWork, Work
from plait.errors import CommError
from plait.plan.collectives import (
    ALGORITHMS,
    Hosts,
    Move,
    Receive,
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
from plait.plan.cost_model import TCP_LINK, chain_segments

_COMBINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda own, received: own.add_(received),
    "mean": lambda own, received: own.add_(received),
    "max": lambda own, received: torch.maximum(own, received, out=own),
    "min": lambda own, received: torch.minimum(own, received, out=own),
    "prod": lambda own, received: own.mul_(received),
}


# Starts a step's messages, each with the tensor that it sends or fills, and waits for them.
Exchange = Callable[[Sequence[tuple[Move, Tensor]]], None]


def run_steps(
    steps: Steps,
    flat: Tensor,
    group: Group,
    op: str = "sum",
    *,
    label: str = "",
    scratch: Tensor | None = None,
) -> None:
    """Run this rank's steps on its flat tensor. `scratch`: of its dtype, with `scratch_numel` elements."""

    def exchange(messages: Sequence[tuple[Move, Tensor]]) -> None:
        works = [
            start_send(tensor, group, move.to, label=label)
            if isinstance(move, Send)
            else start_receive(tensor, group, move.source, label=label)
            for move, tensor in messages
        ]
        for work in works:
            work.wait()

    exchange_steps(steps, flat, group.size, exchange, op, scratch)


def exchange_steps(
    steps: Steps,
    flat: Tensor,
    num_ranks: int,
    exchange: Exchange,
    op: str = "sum",
    scratch: Tensor | None = None,
) -> None:
    """Run this rank's steps on its flat tensor, with the messages of each moved by `exchange`."""
    combine = _COMBINE[op]
    if scratch is None:
        scratch = flat.new_empty(scratch_numel(steps))
    for step in steps:
        messages: list[tuple[Move, Tensor]] = []
        received: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for move in step:
            own = flat[move.start : move.stop]
            if isinstance(move, Receive) and move.add:
                buffer = scratch[offset : offset + own.numel()]
                received.append((own, buffer))
                offset, own = offset + own.numel(), buffer
            messages.append((move, own))
        exchange(messages)
        for own, buffer in received:
            combine(own, buffer)
    if op == "mean":
        flat.div_(num_ranks)


def all_reduce_by(
    algorithm: str, tensor: Tensor, group: Group, op: str = "sum", *, hosts: Hosts | None = None
) -> None:
    """Reduce `tensor` in place; every rank gets the same bits. See [Note: rounding].

    `algorithm`: one of ALGORITHMS. `hosts`: for two-level, the group ranks of each host; None: exchanged.
    """
    check_op(op, tensor)
    flat = tensor.contiguous().view(-1)
    steps = _steps(algorithm, group, flat.numel(), _hosts(algorithm, group, hosts), scatter=False)
    run_steps(steps, flat, group, op)
    copy_unless_same(tensor, flat)


def reduce_scatter_by(
    algorithm: str, full: Tensor, group: Group, op: str = "sum", *, hosts: Hosts | None = None
) -> Tensor:
    """Reduce into this rank's range of flat `full` and return it; other ranges hold partial sums.

    The ranks need not divide the number of elements: see `ranges`. An all-reduce if the algorithm does not
    scatter.
    """
    check_op(op, full)
    steps = _steps(algorithm, group, full.numel(), _hosts(algorithm, group, hosts), scatter=True)
    run_steps(steps, full, group, op)
    return _own_range(full, group)


def all_gather_by(algorithm: str, full: Tensor, group: Group) -> None:
    """Fill flat `full`, of which each rank has its own range: by ring, or by halving for powers of two."""
    generators = {"ring": ring_reduce_scatter}
    if is_power_of_two(group.size):
        generators["halving"] = halving_reduce_scatter
    _check_name(algorithm, tuple(generators), f"an all-gather of {group.size} ranks")
    steps = generators[algorithm](group.rank, group.size, full.numel())
    run_steps(mirrored(group.rank, steps), full, group)


def broadcast_by(
    algorithm: str, tensor: Tensor, group: Group, source: int = 0, *, segments: int = 1, label: str = ""
) -> None:
    """Overwrite `tensor` with that of group rank `source`: by naive, tree or chain (in `segments`)."""
    _check_name(algorithm, ("naive", "tree", "chain"), "a broadcast")
    flat = tensor.contiguous().view(-1)
    args = group.rank, group.size, flat.numel()
    if algorithm == "chain":
        steps = chain_broadcast(*args, segments, source)
    else:
        generate = {"naive": naive_reduce, "tree": tree_reduce}[algorithm]
        steps = mirrored(group.rank, generate(*args, source))
    run_steps(steps, flat, group, label=label)
    copy_unless_same(tensor, flat)


class AlgorithmReduce:
    """Sums of flat CPU tensors over a group by one algorithm, overlapping with computation."""

    def __init__(self, algorithm: str, group: Group, hosts: Hosts | None = None) -> None:
        """Collective: two-level ranks exchange their hosts, unless `hosts` are given."""
        self._algorithm = algorithm
        self._group = group
        self._hosts = _hosts(algorithm, group, hosts)
        self._scratch = torch.empty(0, dtype=torch.uint8)  # of one sum at a time; grows as needed

    def scratch_numel(self, numel: int, *, scatter: bool) -> int:
        """Return the largest number of received elements, at any time, of a sum of `numel`."""
        return scratch_numel(_steps(self._algorithm, self._group, numel, self._hosts, scatter=scatter))

    def reserve(self, num_bytes: int) -> None:
        """Allocate the scratch memory now, instead of in the first sum that needs it."""
        self._scratch = torch.empty(num_bytes, dtype=torch.uint8)

    def start_sum(
        self, tensor: Tensor, *, scatter: bool, label: str = "", wide: torch.dtype | None = None
    ) -> ReduceWork:
        """Like `start_scattered_sum` (`scatter`) or `start_exchange`; `tensor` may be overwritten until
        `into`.

        `wide`: the dtype to add and send in; a narrower tensor is copied first.
        """
        flat = tensor if wide is None else tensor.to(wide)
        work = self._start(flat, scatter=scatter, label=label)
        summed = _own_range(flat, self._group) if scatter else flat
        return PartialReduceWork([summed], work, 0 if flat is tensor else flat.nbytes)

    def start_all_reduce(self, flat: Tensor, *, label: str = "") -> Work:
        """Sum flat tensors in place; every rank gets the same bits."""
        return self._start(flat, scatter=False, label=label)

    def _start(self, flat: Tensor, *, scatter: bool, label: str) -> Work:
        assert not flat.is_cuda, "the comm thread does not wait for CUDA streams"
        steps = _steps(self._algorithm, self._group, flat.numel(), self._hosts, scatter=scatter)
        if not steps:
            return Work()
        assert self._group.comm_thread is not None, "the group has no comm thread"
        return self._group.comm_thread.submit(lambda: self._run(steps, flat, label))

    def _run(self, steps: Steps, flat: Tensor, label: str) -> None:
        num_bytes = scratch_numel(steps) * flat.itemsize
        if self._scratch.nbytes < num_bytes:
            self.reserve(num_bytes)
        scratch = self._scratch[:num_bytes].view(flat.dtype)
        run_steps(steps, flat, self._group, label=label, scratch=scratch)


class BulkBroadcast:
    """Broadcasts of large tensors: initial weights. See [Note: broadcasts between hosts]."""

    def __init__(self, group: Group) -> None:
        """Collective: ranks exchange their hosts."""
        self._group = group
        may_chain = group.size > 2 and not group.is_dry_run and group.transport.name == "gloo"
        self.chains = may_chain and len(ranks_by_host(group)) > 1

    def run(self, tensor: Tensor, source: int = 0, *, label: str = "") -> None:
        """Overwrite `tensor` with that of group rank `source`, by a chain where that should be faster."""
        segments = chain_segments(tensor.nbytes, self._group.size, TCP_LINK) if self.chains else None
        if segments is None:
            broadcast(tensor, self._group, source, label=label)
        else:
            broadcast_by("chain", tensor, self._group, source, segments=segments, label=label)


def _steps(algorithm: str, group: Group, numel: int, hosts: Hosts | None, *, scatter: bool) -> Steps:
    make = reduce_scatter_steps if scatter else all_reduce_steps
    return make(algorithm, group.rank, group.size, numel, hosts)


def _own_range(flat: Tensor, group: Group) -> Tensor:
    start, stop = ranges(flat.numel(), group.size)[group.rank]
    return flat[start:stop]


def copy_unless_same(out: Tensor, source: Tensor) -> None:
    """Copy a flat tensor, unless it is a view of the same memory: a strided `out` is another."""
    if out.data_ptr() != source.data_ptr():
        out.copy_(source.view(out.shape))


def _hosts(algorithm: str, group: Group, hosts: Hosts | None) -> Hosts | None:
    _check_name(algorithm, ALGORITHMS, "a reduction")
    if algorithm != "two-level" or hosts is None:
        return ranks_by_host(group) if algorithm == "two-level" else None
    if sorted(rank for ranks in hosts for rank in ranks) != [*range(group.size)]:
        raise CommError(
            "the hosts do not contain each rank of the group once",
            given=f"hosts of group ranks {[[*ranks] for ranks in hosts]}",
            expected=f"each of 0 to {group.size - 1} on one host",
            hint="hosts=None, which finds them",
        )
    return hosts


def _check_name(algorithm: str, choices: tuple[str, ...], collective: str) -> None:
    if algorithm not in choices:
        raise CommError(
            f"{collective} does not support that algorithm",
            given=repr(algorithm),
            expected=" or ".join(choices),
            hint=f"algorithm={choices[0]!r}",
        )
