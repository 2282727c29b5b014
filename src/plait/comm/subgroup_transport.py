"""Collectives of some ranks of a larger group, through its connections. See [Note: few communicators] in
`plan/communicators.py`.

[Note: collectives made of messages]
An NCCL collective involves all ranks of its communicator, a send or a receive only two. So the collectives of
a subgroup are algorithms of sends and receives: a tree for small tensors, whose latency is logarithmic in the
ranks; a ring for large ones, which moves the minimum of bytes. A step's messages are started together, as one
NCCL group: on one stream, two ranks that each send before they receive would wait for each other.

[Note: one stream for all subgroups]
The messages of all subgroups of a rank, and the collectives of the larger group, run on one stream in the
order in which the rank starts them. Ranks run one program, so there is a total order of these operations of
which every rank's order is a part. The first unfinished one in this order waits for nothing: all its ranks
have finished what they started before it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from plait.comm.algorithms import copy_unless_same, exchange_steps
from plait.comm.torch_transport import TorchTransport
from plait.comm.transport import Call, OpType, PartialReduceWork, ReduceWork, Work
from plait.plan.collectives import (
    Move,
    Send,
    Steps,
    all_reduce_steps,
    halving_reduce_scatter,
    is_power_of_two,
    mirrored,
    ring_reduce_scatter,
    tree_reduce,
)

_LARGE_BYTES = 1 << 18  # from here on, bytes cost more than messages


class SubgroupTransport:
    """Transport of some of the ranks of `base`, which closes it. See the notes at the top."""

    is_direct = False
    shares_memory = False
    takes_mean = False

    def __init__(self, base: TorchTransport, group_ranks: tuple[int, ...], group_rank: int) -> None:
        """`group_ranks`: the ranks, by their index in `base`. `group_rank`: this rank's index among them."""
        self.name = base.name
        self._base = base
        self._group_ranks = group_ranks
        self._group_rank = group_rank

    def start(self, call: Call) -> Work:
        """Start a message; run a collective (on CUDA: queue it), so that nothing is left to wait for."""
        if call.op_type is OpType.SEND:
            return self.exchange(call, [(call.input, call.root)], [])
        if call.op_type is OpType.RECEIVE:
            return self.exchange(call, [], [(call.output, call.root)])
        self._run_collective(call)
        return Work()

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str, wide: bool = False) -> ReduceWork:  # noqa: ARG002
        call = Call(OpType.REDUCE_SCATTER if scatter else OpType.ALL_REDUCE, label=label)
        steps = self._reduce_scatter_steps(tensor) if scatter else self._all_reduce_steps(tensor)
        self._run_steps(steps, tensor, call)
        return PartialReduceWork([self._own_range(tensor) if scatter else tensor], Work())

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"cannot share {numel} x {dtype}: ranks of a subgroup share no memory")

    share = empty

    def close(self) -> None:
        """Do nothing: the larger group owns the connections."""

    # --- collectives

    def _run_collective(self, call: Call) -> None:
        size, rank = len(self._group_ranks), self._group_rank
        match call.op_type:
            case OpType.ALL_REDUCE:
                flat = call.output.view(-1)
                self._run_steps(self._all_reduce_steps(flat), flat, call)
            case OpType.REDUCE:
                flat = call.input.view(-1)
                flat = flat if rank == call.root else flat.clone()  # it gets partial sums
                self._run_steps(tree_reduce(rank, size, flat.numel(), call.root), flat, call)
            case OpType.BROADCAST:
                flat = call.output.view(-1)
                steps = tree_reduce(rank, size, flat.numel(), call.root)
                self._run_steps(mirrored(rank, steps), flat, call)
            case OpType.ALL_GATHER:
                flat = call.output.view(-1)
                copy_unless_same(self._own_range(flat), call.input)
                halves = is_power_of_two(size)
                steps = (halving_reduce_scatter if halves else ring_reduce_scatter)(rank, size, flat.numel())
                self._run_steps(mirrored(rank, steps), flat, call)
            case OpType.REDUCE_SCATTER:
                flat = call.input.view(-1).clone()
                self._run_steps(self._reduce_scatter_steps(flat), flat, call)
                copy_unless_same(call.output, self._own_range(flat))
            case OpType.BARRIER:
                device = self._base.device
                self._run_collective(Call(OpType.ALL_REDUCE, out=torch.zeros(1, device=device)))
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            case OpType.SCATTER | OpType.GATHER | OpType.ALL_TO_ALL:
                self._run_direct(call)
            case OpType.SEND | OpType.RECEIVE:
                raise AssertionError("a message is not a collective")

    def _run_direct(self, call: Call) -> None:
        """Scatter, gather or all-to-all: every range goes straight from its sender to its receiver."""
        size, rank = len(self._group_ranks), self._group_rank
        scatters, gathers = call.op_type is OpType.SCATTER, call.op_type is OpType.GATHER
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        if gathers:
            sends.append((call.input, call.root))
        elif rank == call.root or not scatters:
            sends += zip(call.input.view(-1).chunk(size), range(size), strict=True)
        if scatters:
            receives.append((call.output, call.root))
        elif rank == call.root or not gathers:
            receives += zip(call.output.view(-1).chunk(size), range(size), strict=True)
        own_sent = [tensor for tensor, peer in sends if peer == rank]
        own_received = [tensor for tensor, peer in receives if peer == rank]
        for out, source in zip(own_received, own_sent, strict=True):
            copy_unless_same(out, source)
        remote = [[(tensor, peer) for tensor, peer in each if peer != rank] for each in (sends, receives)]
        self.exchange(call, *remote).wait()

    def _all_reduce_steps(self, flat: Tensor) -> Steps:
        algorithm = "tree" if flat.nbytes < _LARGE_BYTES else "ring"
        return all_reduce_steps(algorithm, self._group_rank, len(self._group_ranks), flat.numel())

    def _reduce_scatter_steps(self, flat: Tensor) -> Steps:
        return ring_reduce_scatter(self._group_rank, len(self._group_ranks), flat.numel())

    def _run_steps(self, steps: Steps, flat: Tensor, call: Call) -> None:
        exchange = partial(self._exchange_step, call)
        exchange_steps(steps, flat, len(self._group_ranks), exchange, call.op)

    def _exchange_step(self, call: Call, messages: Sequence[tuple[Move, Tensor]]) -> None:
        sends = [(tensor, move.to) for move, tensor in messages if isinstance(move, Send)]
        receives = [(tensor, move.source) for move, tensor in messages if not isinstance(move, Send)]
        self.exchange(call, sends, receives).wait()

    def exchange(
        self, call: Call, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Work:
        """As one NCCL group."""
        if not sends and not receives:
            return Work()
        return self._base.exchange(
            call,
            [(tensor, self._group_ranks[peer]) for tensor, peer in sends],
            [(tensor, self._group_ranks[peer]) for tensor, peer in receives],
        )

    def _own_range(self, flat: Tensor) -> Tensor:
        return flat.chunk(len(self._group_ranks))[self._group_rank]
