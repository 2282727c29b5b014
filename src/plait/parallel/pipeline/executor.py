"""The executor: one loop over a rank's actions. It knows no schedule by name.

[Note: why nobody waits in a circle]
Computing goes in the order of the list. A send never blocks (see `channel.py`), whatever the receiver does.
What one rank sends to another, of one kind, arrives in the order in which it was sent; the receiver knows the
order, because it has the whole schedule. Before an action waits for a message, every earlier one of its
channel has been posted; so nothing stands in its way, and it comes as soon as its sender has computed it. Let
all unfinished ranks wait, and take of the actions that they wait for one that comes first in a valid order of
the whole schedule (the checker has proved that there is one): everything that it needs has been computed and
sent, and is on its way to a posted buffer. So its rank does not wait. Contradiction. How many messages a
transport can hold does not matter. Data ranks run the same list: what they gather and reduce together in that
action is between ranks that have all finished what comes before it, so nobody is missing there either.

[Note: what a micro-batch holds on a stage]
From its forward to its backward: what autograd saved, and the places in the graph where backward starts. The
output itself is let go of when it has been sent (the outbox has it until then), the received input when the
forward is over: whether either lives longer is autograd's business. Of a backward in halves, the second half
holds inputs and output gradients of the linear layers.

Where a stage's autograd graph begins: tensors that have arrived, and the gradients that go back.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Mesh
from plait.parallel.pipeline.p2p import Inbox, Outbox, PostedReceive
from plait.parallel.pipeline.serialize import PackedOutput, TensorSpec, pack, unpack
from plait.parallel.pipeline.split_backward import BackwardSplitter, DeferredWeightGrads
from plait.parallel.zero.sharded_model import Root, ShardedStage
from plait.plan.schedule import Action, Kind, Schedule, Span


class StageInput:
    """What a stage was sent, as its forward may use it; afterwards the gradients that its sender waits for.

    [Note: arrivals are no leaves]
    A block may change its input in place (`x += ...`), which autograd forbids for leaves that need a
    gradient; in one process the input is the result of the block before. So it is a result here too: of a
    node that keeps the gradient which reaches it. Nothing has to be named to a backward as its input.
    """

    def __init__(self, parcel: PackedOutput, tensors: Sequence[Tensor]) -> None:
        """Under the grad mode of the forward: if gradients are not recorded, none are kept."""
        self._specs = parcel.grad_specs
        self._kept: list[Tensor | None] = [None] * len(self._specs)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self.tensors = list(tensors)  # for `unpack`; whoever has unpacked them need not keep the arrival's
        token = torch.empty(0, requires_grad=True)  # for autograd to record a node
        number = 0
        for place, spec in enumerate(parcel.specs):
            if spec.needs_grad:
                self.tensors[place] = _ReceiveFunction.apply(token, self._kept, number, tensors[place])
                number += 1

    def let_go(self) -> None:
        """Of the tensors: the graph holds what it needs."""
        self.tensors = []

    def take_gradients(self) -> list[Tensor]:
        """After backward: one for each of the parcel's `grad_specs`, zeros where nothing depended on the
        tensor. They are handed over: the next call gives zeros."""
        found = [
            kept if kept is not None else torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            for kept, spec in zip(self._kept, self._specs, strict=True)
        ]
        self._kept[:] = [None] * len(self._kept)
        return found


class _ReceiveFunction(torch.autograd.Function):
    """See [Note: arrivals are no leaves]."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, kept: list[Tensor | None], number: int, tensor: Tensor) -> Tensor:
        ctx.kept, ctx.number = kept, number
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.kept[ctx.number] = gradient
        return None, None, None, None


_RECEIVE_AHEAD = 2  # actions whose messages are received beside the one that computes


class Stage(Protocol):
    """A stage of this rank."""

    zero: ShardedStage

    def forward(self, micro: int, received: Any) -> Any:
        """What goes to the next stage; of the last one the loss, None where no gradient is wanted."""


@dataclass
class MicrobatchState:
    """A micro-batch on a stage, between forward and the end of its backward."""

    arrival: StageInput | None = None
    parcel: PackedOutput | None = None  # of what was sent on
    roots: list[Root] = field(default_factory=list)
    queued: DeferredWeightGrads | None = None


class Pipeline:
    """Runs schedules over the stages of this rank and those of its neighbours."""

    def __init__(self, rank_of: Mapping[int, int], mesh: Mesh, halves: BackwardSplitter) -> None:
        """`rank_of`: the place on `pp` of every stage. `halves`: of the stages' linear layers. All ranks of
        the pipeline make theirs at the same point of the program."""
        self._rank = mesh.coord["pp"]
        self._rank_of = rank_of
        self.halves = halves
        self.deferred_bytes: dict[int, int] = {}  # by stage: what the first backward in halves left for later
        self._last_stage = max(rank_of)
        self.device = mesh.world.device
        self._outboxes: dict[tuple[str, int], Outbox] = {}  # by what is sent, and to whom
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        for what, source, target in sorted(self._lines()):
            if self._rank in (source, target):
                label = f"{what} from stage rank {source} to {target}"
                group = mesh.part("pp", sorted((source, target)), lane=label)
                if self._rank == source:
                    self._outboxes[what, target] = Outbox(group, device=self.device, label=label)
                else:
                    self._inboxes[what, source] = Inbox(group, device=self.device, label=label)

    def _lines(self) -> set[tuple[str, int, int]]:
        """(what, from, to) of all channels of the pipeline."""
        found = set()
        for stage in range(self._last_stage):
            one, other = self._rank_of[stage], self._rank_of[stage + 1]
            if one != other:
                found |= {("activations", one, other), ("gradients", other, one)}
        return found

    def run(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        keys: Sequence[Hashable],
        *,
        records: bool = False,
    ) -> list[Span]:
        """One pass over this rank's actions, of these stages. `keys`: of each micro-batch, equal where all
        that a stage returns has the same shapes. Gives when what was done, with `records`; seconds of this
        process's clock."""
        run = _Run(self, schedule, stages, keys)
        clock = _Clock(self.device) if records else None
        actions = schedule.ranks[self._rank]
        for place, action in enumerate(actions):
            for outbox in self._outboxes.values():
                outbox.sweep()  # after a rank's last forward nothing else would, for all of its backwards
            run.post(action)
            for coming in actions[place + 1 : place + 1 + _RECEIVE_AHEAD]:
                run.post_if_known(coming)
            run.do(action, nullcontext() if clock is None else clock.around(action))
        run.check_over()
        for outbox in self._outboxes.values():
            outbox.drain()
        return [] if clock is None else clock.spans()


class _Run:
    """One pass."""

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, stages: Mapping[int, Stage], keys: Sequence[Hashable]
    ) -> None:
        self._p = pipeline
        self._stages = stages
        self._schedule = schedule
        self._keys = [(key, schedule.trains) for key in keys]
        self._flights: dict[tuple[int, int], MicrobatchState] = defaultdict(MicrobatchState)
        self._here: dict[
            Action, tuple[PackedOutput, list[Tensor]] | list[Tensor]
        ] = {}  # between our own stages
        self._posted: dict[Action, PostedReceive] = {}
        self._parcels: dict[Action, PackedOutput] = {}
        # Of every channel, what is still to be posted.
        self._queues = {line: self._sent_by(*line) for line in pipeline._inboxes}
        self._final: dict[int, Action] = {}
        for action in schedule.ranks[pipeline._rank]:
            if action.kind is Kind.W or (action.kind is Kind.B and not self._is_half(action)):
                self._final[action.stage] = action

    # --- actions

    def do(self, action: Action, timed: AbstractContextManager[None]) -> None:
        {Kind.F: self._forward, Kind.B: self._backward, Kind.W: self._weights}[action.kind](action, timed)

    def _forward(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        flight, received = self._flights[stage, micro], None
        if stage:
            before = Action(Kind.F, stage - 1, micro)
            parcel, tensors = self._arrived(before)
            flight.arrival = StageInput(parcel, tensors)
            received = unpack(parcel, flight.arrival.tensors)
            flight.arrival.let_go()
        with timed:
            output = self._stages[stage].forward(micro, received)
            del received
        if stage == self._p._last_stage:
            flight.roots = [] if output is None else [output]
        else:
            parcel, tensors = pack(output, of=f"stage {stage}")
            flight.roots = [
                torch.autograd.graph.get_gradient_edge(t) for t in parcel.tensors_with_grad(tensors)
            ]
            flight.parcel = parcel
            self._pass_on(action, parcel, tensors)
        if not self._schedule.trains:
            del self._flights[stage, micro]

    def _backward(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        flight, half = self._flights[stage, micro], self._is_half(action)
        gradients: Sequence[Tensor | None] = [None] * len(flight.roots)
        if stage < self._p._last_stage:
            gradients = self._gradients_for(Action(Kind.B, stage + 1, micro))
        roots, flight.roots = flight.roots, []
        is_final = self._final[stage] == action
        with timed, self._p.halves.deferring() if half else nullcontext() as queued:
            self._stages[stage].zero.backward(roots, gradients, last=is_final, rest=queued)
            del roots, gradients
        if flight.arrival is not None:
            self._give_back(action, flight.arrival.take_gradients())
            flight.arrival = None
        if queued is not None:
            flight.queued = queued
            if stage not in self._p.deferred_bytes:
                self._p.deferred_bytes[stage] = queued.num_bytes()
        else:
            del self._flights[stage, micro]

    def _weights(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        queued = self._flights.pop((stage, micro)).queued
        assert queued is not None, f"{action} before the backward that it is of"
        with timed:
            self._stages[stage].zero.backward_weight(queued, last=self._final[stage] == action)

    def _is_half(self, action: Action) -> bool:
        return (action.stage, action.micro) in self._schedule.split

    def check_over(self) -> None:
        left = {*self._flights, *self._here, *self._posted}
        assert not left, f"a schedule that leaves something: {left}"

    # --- messages: an action's name is also that of what it sends

    def _pass_on(self, action: Action, parcel: PackedOutput, tensors: list[Tensor]) -> None:
        target = self._p._rank_of[action.stage + 1]
        if target == self._p._rank:
            self._here[action] = (parcel, [tensor.detach() for tensor in tensors])
        else:
            self._p._outboxes["activations", target].send(self._key(action), parcel, tensors)

    def _give_back(self, action: Action, gradients: list[Tensor]) -> None:
        target = self._p._rank_of[action.stage - 1]
        if target == self._p._rank:
            self._here[action] = gradients
        else:
            self._p._outboxes["gradients", target].send_tensors(gradients)

    def _arrived(self, sent: Action) -> tuple[PackedOutput, list[Tensor]]:
        if sent in self._here:
            found = self._here.pop(sent)
            assert isinstance(found, tuple)
            return found
        return self._parcels.pop(sent), self._posted.pop(sent).wait()

    def _gradients_for(self, sent: Action) -> list[Tensor]:
        if sent in self._here:
            found = self._here.pop(sent)
            assert isinstance(found, list)
            return found
        return self._posted.pop(sent).wait()

    def post(self, action: Action) -> None:
        """Takes buffers for what the action needs, and for what comes before it on the same channel."""
        self._post(action, waits=True)

    def post_if_known(self, action: Action) -> None:
        """The same, unless it would mean to wait for a description."""
        self._post(action, waits=False)

    def _post(self, action: Action, *, waits: bool) -> None:
        sent = self._needs(action)
        if sent is None or sent in self._posted:
            return
        what = "activations" if sent.kind is Kind.F else "gradients"
        line = (what, self._p._rank_of[sent.stage])
        if line not in self._queues:
            return  # from a stage of our own
        inbox, queue = self._p._inboxes[line], self._queues[line]
        while sent not in self._posted:
            next_one = queue[-1]
            specs = self._specs(next_one, inbox, waits=waits)
            if specs is None:
                return
            self._posted[next_one] = inbox.post(specs)
            queue.pop()

    def _specs(self, sent: Action, inbox: Inbox, *, waits: bool) -> Sequence[TensorSpec] | None:
        if sent.kind is Kind.B:
            flight = self._flights.get((sent.stage - 1, sent.micro))
            return None if flight is None or flight.parcel is None else flight.parcel.grad_specs
        if not waits and not inbox.knows(self._key(sent)):
            return None
        parcel = self._parcels[sent] = inbox.parcel(self._key(sent))
        return parcel.specs

    def _needs(self, action: Action) -> Action | None:
        """Whose message an action waits for."""
        kind, stage, micro = action
        if kind is Kind.F and stage:
            return Action(Kind.F, stage - 1, micro)
        if kind is Kind.B and stage < self._p._last_stage:
            return Action(Kind.B, stage + 1, micro)
        return None

    def _key(self, sent: Action) -> Hashable:
        return (sent.stage, self._keys[sent.micro])

    def _sent_by(self, what: str, source: int) -> list[Action]:
        """All that comes from a rank, the first at the end."""
        kind, step, end = (Kind.F, 1, self._p._last_stage) if what == "activations" else (Kind.B, -1, 0)
        return [
            action
            for action in reversed(self._schedule.ranks[source])
            if action.kind is kind
            and action.stage != end
            and self._p._rank_of[action.stage + step] == self._p._rank
        ]


class _Clock:
    """When actions began and ended; on CUDA by the stream's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[Action, Any, Any]] = []
        self._zero_s = time.perf_counter()
        self._zero = self._stamp()

    def around(self, action: Action) -> "_Timed":
        return _Timed(self._stamp, lambda start, end: self._stamps.append((action, start, end)))

    def spans(self) -> list[Span]:
        if not self._cuda:
            return [Span(*stamp) for stamp in self._stamps]
        torch.cuda.synchronize()
        at = self._zero.elapsed_time
        return [Span(a, self._zero_s + at(s) / 1e3, self._zero_s + at(e) / 1e3) for a, s, e in self._stamps]

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Timed:
    def __init__(self, stamp: Callable[[], Any], done: Callable[[Any, Any], object]) -> None:
        self._stamp, self._done = stamp, done

    def __enter__(self) -> None:
        self._start = self._stamp()

    def __exit__(self, *_: object) -> None:
        self._done(self._start, self._stamp())
