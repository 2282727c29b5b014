"""torch.distributed over plait's verbs: `init_process_group("plait")`, for torch's own DDP, DTensor, FSDP2.

Tensors are on the CPU. What torch says in lists, in other dtypes or in uneven parts is put into the terms of
the verbs: complex numbers as pairs of reals, bools as bytes, lists through one flat tensor.

[Note: parts of different sizes]
The verbs deal in equal ranges. A list of tensors to gather or to reduce and scatter shows every rank all the
sizes, so all agree whether they are equal; if not, parts go by messages or by one reduction per rank. The
sizes of an all-to-all are known to no single rank: with splits, or as lists, it goes by messages. These are
messages like those of `send`: between two ranks they are matched in the order in which they start, so one
that was sent before such a collective has to be received before it too.

[Note: what a transport has to bear]
A background thread waits for what was started while the program starts or runs what comes next: `start`,
`run` and `Work.wait` come from two threads at a time. Collectives are waited for in their order, messages
in any. What was started proceeds, or is moved on by whatever wait comes next, on the same transport.

What torch.distributed is given, in the verbs' terms: tensors, reductions, tags. Letters for the rest.

The transport of a group that nobody has chosen one for: shared memory on one host, else Gloo.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import collectives
from plait.comm.collectives import Group
from plait.comm.shm import Mailbox, meet, open_group
from plait.comm.torch_transport import over_gloo
from plait.comm.torch_work import GroupWork, Queue
from plait.comm.transport import Transport, Work
from plait.errors import CommError


def best_transport(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Transport:
    """A transport of its own for `size` ranks that meet in this store, which nothing else uses."""
    gloo = over_gloo(store, rank, size, timeout)
    neighbours, hosts, _ = meet(rank, size, gloo, wanted=True)
    if neighbours is not None and len(set(hosts)) == 1:
        gloo.cut()
        ranks, board = tuple(range(size)), Mailbox.of(store)
        return open_group(neighbours, ranks, rank, board, "plait/group", timeout, is_own=True)
    if neighbours is not None:
        neighbours.close()
    return gloo


NAME = "plait"  # of the backend

_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


def op_of(opts: Any, verb: str) -> str:
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, name in _OPS:
        if asked == op:
            return name
    known = [name for name, op in dist.ReduceOp.RedOpType.__members__.items() if asked == op]
    raise CommError(
        f"the {NAME} backend cannot {verb} by that",
        given=f"ReduceOp.{known[0]}" if known else asked,
        expected="SUM, AVG, MAX or MIN",
    )


def plain(tensor: Tensor, verb: str) -> Tensor:
    """The same storage as what transports know: dense, on the CPU, of real numbers."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        given = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CommError(f"{verb} of a tensor that is not dense", given=given, hint="tensor.to_dense()")
    if tensor.device.type != "cpu":
        raise CommError(
            f"{verb} of a tensor that is not on the CPU",
            given=f"device {tensor.device}, {tuple(tensor.shape)} of {tensor.dtype}",
            expected="cpu",
            hint="tensor.cpu(), or nccl for a group of GPUs",
        )
    found = tensor.detach()
    if found.is_conj() or found.is_neg():
        raise CommError(
            f"{verb} of a view that conjugates or negates", hint="tensor.resolve_conj().resolve_neg()"
        )
    if found.is_complex():
        return torch.view_as_real(found)
    return found.view(torch.uint8) if found.dtype is torch.bool else found


def reducible(tensor: Tensor, op: str, verb: str) -> tuple[Tensor, str]:
    """And the reduction that means the same: the sum of bools is whether one of them is true."""
    if (tensor.is_complex() and op in ("max", "min")) or (tensor.dtype is torch.bool and op == "mean"):
        raise CommError(f"{verb} by {op} of numbers that have none", given=tensor.dtype)
    return plain(tensor, verb), "max" if tensor.dtype is torch.bool and op == "sum" else op


def only(things: Sequence[Any], verb: str) -> Any:
    if len(things) != 1:
        raise CommError(f"{verb} takes one tensor of each rank", given=len(things))
    return things[0]


def check_fit(out: Tensor, given: Tensor, verb: str) -> None:
    if out.numel() != given.numel() or out.dtype != given.dtype:
        raise CommError(
            f"the tensors of {verb} do not fit each other",
            given=f"{given.numel()} x {given.dtype} into {out.numel()} x {out.dtype}",
            expected="as many elements, of one dtype",
        )


def check_tag(tag: int) -> None:
    if tag != 0:
        raise CommError(
            f"messages of the {NAME} backend have no tags",
            given=f"tag={tag}",
            hint="messages between two ranks are matched in the order in which they start",
        )


def from_flat(outs: Sequence[Tensor], whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(out, part.view_as(out)) for out, part in zip(outs, whole.chunk(len(outs)), strict=True)]


# mypy: disable-error-code="override, assignment"
# torch declares forms of each method that its functions do not call; they are not taken.


TransportOf = Callable[[dist.Store, int, int, timedelta], Transport]


def register_backend(transport_of: TransportOf = best_transport) -> None:
    """Makes "plait" a backend of torch.distributed, for CPU tensors. A second call replaces the transport.

    `transport_of(store, rank, size, timeout)`: makes what carries a group, of at least two ranks; all of them
    call it at the same time. The store is the group's own.
    """
    dist.Backend.register_backend(NAME, partial(_create, transport_of), devices=["cpu"])


def _create(
    transport_of: TransportOf, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    return PlaitGroup(transport_of(store, rank, size, timeout) if size > 1 else None, rank, size)


@dataclass(slots=True)
class BackendOp:
    """What one call of torch's comes to: verbs that start together, and copies when all of them are over."""

    label: str
    results: Sequence[Tensor]  # what the future of the work holds
    starts: list[Callable[[], Work]] = field(default_factory=list)
    run: Callable[[], None] | None = None  # the same to its end, where there is a shorter way
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # where to, from

    def start(self) -> Work:
        pendings = [start() for start in self.starts]
        return Work(*(pending.wait for pending in pendings), self._copy)

    def do(self) -> None:
        if self.run is None:
            self.start().wait()
        else:
            self.run()
            self._copy()

    def flat(self, tensor: Tensor) -> Tensor:
        """Flat storage that ends in `tensor`: its own, unless it is strided."""
        if tensor.is_contiguous():
            return tensor.view(-1)
        flat = tensor.new_empty(tensor.numel())
        self.copies.append((tensor, flat.view(tensor.shape)))
        return flat

    def _copy(self) -> None:
        for into, source in self.copies:
            into.copy_(source)


class PlaitGroup(dist.ProcessGroup):
    """A process group whose verbs a plait transport carries. Made by torch.distributed.

    Methods are what torch calls, in C++ too, with its names and arguments: 2.13's, and 2.11's as aliases.
    """

    def __init__(self, transport: Transport | None, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._plait = Group(tuple(range(size)), rank, transport)
        self._queue = Queue(transport.cut if transport is not None else _nothing)
        self._name = ""
        # Also where the program ends without destroying the group: before Python takes its threads away.
        self._close = weakref.finalize(self, self._queue.close)

    # --- what torch asks of every group

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self._close()

    def abort(self) -> None:
        self._close()

    # --- reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        op = op_of(opts, "all-reduce")
        job = BackendOp("an all-reduce", tensors)
        given = [reducible(tensor, op, "all-reduce") for tensor in tensors]
        job.starts = [partial(collectives.start_all_reduce, t, self._plait, o) for t, o in given]
        if len(given) == 1:
            job.run = partial(collectives.all_reduce, given[0][0], self._plait, given[0][1])
        return self._submit(job, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        tensor, op = reducible(only(tensors, "reduce"), op_of(opts, "reduce"), "reduce")
        job = BackendOp("a reduce", tensors)
        job.starts = [partial(collectives.start_reduce, tensor, self._plait, opts.rootRank, op)]
        return self._submit(job, opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> GroupWork:
        job = BackendOp("a reduce-scatter", outputs)
        asked = op_of(opts, "reduce-scatter")
        for output, whole in zip(outputs, wholes, strict=True):
            out, op = reducible(output, asked, "reduce-scatter")
            given, _ = reducible(whole, asked, "reduce-scatter")
            args = job.flat(out), given.reshape(-1), self._plait, op
            job.starts.append(partial(collectives.start_reduce_scatter, *args))
        return self._submit(job, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], lists: list[list[Tensor]], opts: Any = None) -> GroupWork:
        """See [Note: parts of different sizes]."""
        output, parts = only(outputs, "reduce-scatter"), only(lists, "reduce-scatter")
        self._check_number(parts, "reduce-scatter")
        asked = op_of(opts, "reduce-scatter")
        out, op = reducible(output, asked, "reduce-scatter")
        given = [reducible(part, asked, "reduce-scatter")[0] for part in parts]
        check_fit(out, given[self.rank()], "reduce-scatter")
        job = BackendOp("a reduce-scatter", outputs)
        if len({part.numel() for part in given}) == 1:
            whole = torch.cat([part.reshape(-1) for part in given])
            job.starts = [partial(collectives.start_reduce_scatter, job.flat(out), whole, self._plait, op)]
        else:
            own = given[self.rank()].clone()  # the caller's input keeps its values
            given[self.rank()] = own
            job.starts = [
                partial(collectives.start_reduce, part, self._plait, root, op)
                for root, part in enumerate(given)
            ]
            job.copies = [(out, own.reshape(out.shape))]
        return self._submit(job, opts)

    # --- moves

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        job = BackendOp("a broadcast", tensors)
        given = [plain(tensor, "broadcast") for tensor in tensors]
        job.starts = [partial(collectives.start_broadcast, t, self._plait, opts.rootRank) for t in given]
        if len(given) == 1:
            job.run = partial(collectives.broadcast, given[0], self._plait, opts.rootRank)
        return self._submit(job, opts)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [piece], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], pieces: list[Tensor], opts: Any = None
    ) -> GroupWork:
        job = BackendOp("an all-gather", outputs)
        pairs = [
            (job.flat(plain(output, "all-gather")), plain(piece, "all-gather").reshape(-1))
            for output, piece in zip(outputs, pieces, strict=True)
        ]
        job.starts = [partial(collectives.start_all_gather, out, given, self._plait) for out, given in pairs]
        if len(pairs) == 1:
            job.run = partial(collectives.all_gather, *pairs[0], self._plait)
        return self._submit(job, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, lists: list[list[Tensor]], pieces: list[Tensor], opts: Any = None) -> GroupWork:
        """See [Note: parts of different sizes]."""
        job = BackendOp("an all-gather", [tensor for outputs in lists for tensor in outputs])
        for outputs, piece in zip(lists, pieces, strict=True):
            self._check_number(outputs, "all-gather")
            outs, given = [plain(out, "all-gather") for out in outputs], plain(piece, "all-gather")
            check_fit(outs[self.rank()], given, "all-gather")
            if len({out.numel() for out in outs}) == 1:
                whole = given.new_empty(given.numel() * self.size())
                job.starts.append(
                    partial(collectives.start_all_gather, whole, given.reshape(-1), self._plait)
                )
                job.copies += from_flat(outs, whole)
            else:
                self._exchange(job, [given] * self.size(), outs)
        return self._submit(job, opts)

    allgather_coalesced = allgather

    def gather(self, lists: list[list[Tensor]], pieces: list[Tensor], opts: Any) -> GroupWork:
        given = plain(only(pieces, "gather"), "gather")
        whole = None
        job = BackendOp("a gather", [])
        if self.rank() == opts.rootRank:
            outputs = only(lists, "gather")
            self._check_number(outputs, "gather")
            outs = [plain(out, "gather") for out in outputs]
            for out in outs:
                check_fit(out, given, "gather")
            whole = given.new_empty(given.numel() * self.size())
            job.results, job.copies = outputs, from_flat(outs, whole)
        job.starts = [partial(collectives.start_gather, whole, given.reshape(-1), self._plait, opts.rootRank)]
        return self._submit(job, opts)

    def scatter(self, outputs: list[Tensor], lists: list[list[Tensor]], opts: Any) -> GroupWork:
        out = plain(only(outputs, "scatter"), "scatter")
        whole = None
        if self.rank() == opts.rootRank:
            given = [plain(part, "scatter") for part in only(lists, "scatter")]
            self._check_number(given, "scatter")
            for part in given:
                check_fit(out, part, "scatter")
            whole = torch.cat([part.reshape(-1) for part in given])
        job = BackendOp("a scatter", outputs)
        job.starts = [partial(collectives.start_scatter, job.flat(out), whole, self._plait, opts.rootRank)]
        return self._submit(job, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_splits: list[int],
        whole_splits: list[int],
        opts: Any = None,
    ) -> GroupWork:
        """Splits are of dim 0, as torch says; without any, ranges are equal."""
        out, given = plain(output, "all-to-all"), plain(whole, "all-to-all")
        job = BackendOp("an all-to-all", [output])
        if output_splits or whole_splits:
            self._exchange(job, self._split(given, whole_splits), self._split(out, output_splits))
        else:
            job.starts = [
                partial(collectives.start_all_to_all, job.flat(out), given.reshape(-1), self._plait)
            ]
        return self._submit(job, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> GroupWork:
        self._check_number(outputs, "all-to-all")
        self._check_number(parts, "all-to-all")
        job = BackendOp("an all-to-all", outputs)
        given = [plain(part, "all-to-all") for part in parts]
        self._exchange(job, given, [plain(out, "all-to-all") for out in outputs])
        return self._submit(job, opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        run = partial(collectives.barrier, self._plait)
        return self._submit(
            BackendOp("a barrier", [], [partial(collectives.start_barrier, self._plait)], run), opts
        )

    # --- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> GroupWork:
        check_tag(tag)
        tensor = plain(only(tensors, "send"), "send")
        return GroupWork("a send", tensors, collectives.start_send(tensor, self._plait, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> GroupWork:
        check_tag(tag)
        tensor = plain(only(tensors, "receive"), "receive")
        pending = collectives.start_receive(tensor, self._plait, source)
        return GroupWork("a receive", tensors, pending, source=source)

    def recv_anysource(self, *_: Any) -> GroupWork:
        raise CommError(
            f"the {NAME} backend receives from a rank that is named",
            given="a receive from any rank",
            expected="src=",
        )

    # --- what they share

    def _submit(self, job: BackendOp, opts: Any) -> GroupWork:
        if opts is not None and not opts.asyncOp:
            job.do()
            return GroupWork(job.label, job.results)
        work = GroupWork(job.label, job.results, job.start(), self._queue)
        self._queue.add(work)
        return work

    def _exchange(self, job: BackendOp, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """A part for every rank, which knows how large it is, and one from each."""
        own, size = self.rank(), self.size()
        check_fit(taken[own], given[own], "all-to-all")
        job.copies.append((taken[own], given[own].reshape(taken[own].shape)))
        for place in ((own + step) % size for step in range(1, size)):
            if given[place].numel():
                job.starts.append(partial(collectives.start_send, given[place], self._plait, place))
            if taken[place].numel():
                job.starts.append(partial(collectives.start_receive, taken[place], self._plait, place))

    def _split(self, tensor: Tensor, splits: list[int]) -> Sequence[Tensor]:
        if not splits and tensor.shape[0] % self.size() == 0:
            return tensor.chunk(self.size())
        if len(splits) != self.size() or sum(splits) != tensor.shape[0]:
            raise CommError(
                "the splits of an all-to-all do not fit the tensor",
                given=f"splits={splits} of {tensor.shape[0]} rows",
                expected=f"{self.size()} numbers of rows, one for each rank, {tensor.shape[0]} in all",
            )
        return tensor.split(splits)

    def _check_number(self, parts: Sequence[Tensor], verb: str) -> None:
        if len(parts) != self.size():
            raise CommError(
                f"a list of tensors for {verb} has not one for each rank",
                given=f"{len(parts)} tensors",
                expected=self.size(),
            )


def _nothing() -> None:
    """What a group of one has to let go of."""
