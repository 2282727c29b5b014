"""The executor: one loop over a rank's actions, the same for every schedule.

[Note: deadlock freedom]
Actions are computed in list order. A send never blocks (see p2p.py), whatever the receiver does. Messages of
one kind from one rank to another arrive in the order in which they were sent; the receiver knows the order,
because it has the full schedule. Before an action waits for a message, all earlier messages of that channel
have been posted, so the message arrives as soon as its sender has computed it. Now suppose that all
unfinished ranks wait, and take, of the actions that they wait in, the one that comes first in a valid order
of the full schedule (the checker has proved that one exists): everything that it needs has been computed and
sent, and is being received into a posted buffer. So its rank does not wait: a contradiction. The capacity of
the transport does not matter. Data-parallel ranks run the same list: the collectives of an action are between
ranks that have all finished what precedes it, so every participant arrives.

[Note: global message order]
Where channels share communicators ([Note: classes of senders] in `plan/communicators.py`), a rank's receives
run in the order in which they are posted, whatever their sender. Let T be the order in which the simulated
schedule, with equal stages, ends its actions: a total order, equal on all ranks, in which an action follows
all that it depends on. All receives of a rank are posted in the T order of the actions that send them, and
before an action runs, those are posted that precede it in T: they never depend on it. A rank's sends are in T
order as well. So on every rank the order in which communications are started, over all communicators, is part
of one order of the job: T, with an action's collectives at its position and the messages that it sends after
it. The first unfinished one in this order is not blocked: what its ranks have started earlier is finished.
This holds even if each communication waits for the start, or the end, of the one before it, as with
NCCL_LAUNCH_ORDER_IMPLICIT. Posting two actions ahead would break it: the second receive would be queued
after the first, which may wait for the action that is about to run. Specs are known in time: the gradient of
an output comes after the output in T, and so does every action that needs a later message; descriptions of
outputs are waited for, as they do not depend on the action either.

[Note: gradients that are sent first]
Another rank waits for the input's gradient, none for those of weights. So an unsplit backward of a stage that
receives its input from another rank also runs in two halves, with the message between them: the wave of
backwards that fills and drains a pipeline takes an input's gradient for each stage, as in a zero-bubble
schedule, and no stage holds more micro-batches. Until the second half it holds inputs and output gradients of
its linear layers, about as much as forward has saved and backward has freed by then. With recomputation,
forward saves less, and the first half would hold more than before: backwards are not divided there, nor in
compiled blocks, which have one backward.

[Note: lifetime of a micro-batch's tensors]
From its forward to its backward a stage keeps what autograd saved, and the gradient edges where backward
starts. The output tensors are released when they have been sent (the outbox holds them until then), the
received input when the forward has finished: only autograd may keep either alive longer. Between the two
halves of a split backward, the inputs and output gradients of the linear layers are held.
"""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Mesh
from plait.parallel.pipeline.p2p import Inbox, Outbox, PostedReceive
from plait.parallel.pipeline.serialize import PackedOutput, TensorSpec, pack, unpack
from plait.parallel.pipeline.split_backward import BackwardSplitter, DeferredWeightGrads
from plait.parallel.zero.sharded_model import Root, ShardedStage
from plait.plan.axes import STAGES
from plait.plan.communicators import sender_classes, sends_channel
from plait.plan.schedule import Action, Kind, Schedule, Span
from plait.plan.schedule.simulate import global_order


class StageInput:
    """A stage's received input for its forward, and the gradients that are sent back after its backward.

    [Note: received inputs are not leaves]
    A block may modify its input in place (`x += ...`), which autograd forbids for leaves that require a
    gradient; in one process the input is the output of the previous block. So it is an output here too: of a
    node that stores the gradient that reaches it. No backward has to name it as an input.
    """

    def __init__(self, packed: PackedOutput, tensors: Sequence[Tensor]) -> None:
        """Call it under the forward's grad mode: without recording, no gradients are stored."""
        self._packed = packed
        self._gradients: list[Tensor | None] = [None] * len(packed.grad_specs)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self.tensors = list(tensors)
        token = torch.empty(0, requires_grad=True)  # makes autograd record the node
        with_grad = (index for index, spec in enumerate(packed.specs) if spec.needs_grad)
        for place, index in enumerate(with_grad):
            self.tensors[index] = _ReceiveFunction.apply(token, self._gradients, place, tensors[index])

    def unpack(self) -> Any:
        """Return the input, once: afterwards the graph alone holds the tensors that it needs."""
        value, self.tensors = unpack(self._packed, self.tensors), []
        return value

    def take_gradients(self) -> list[Tensor]:
        """Return, after backward, a gradient for each of the `grad_specs`, zeros if nothing depended on the
        tensor. Drops its own references: a second call returns zeros."""
        gradients = [
            grad if grad is not None else torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            for grad, spec in zip(self._gradients, self._packed.grad_specs, strict=True)
        ]
        self._gradients[:] = [None] * len(self._gradients)
        return gradients


class _ReceiveFunction(torch.autograd.Function):
    """See [Note: received inputs are not leaves]."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, gradients: list[Tensor | None], index: int, tensor: Tensor) -> Tensor:
        ctx.gradients, ctx.index = gradients, index
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None


_RECEIVE_AHEAD = 2  # actions whose receives are posted before the current one computes


class Stage(Protocol):
    """A stage of this rank."""

    sharded: ShardedStage

    def forward(self, micro: int, received: Any) -> Any:
        """Return the output for the next stage; the last stage returns the loss, None without a backward."""


@dataclass
class MicrobatchState:
    """A micro-batch on a stage, from its forward to the end of its backward."""

    stage_input: StageInput | None = None
    packed: PackedOutput | None = None  # description of the output
    roots: list[Root] = field(default_factory=list)
    deferred: DeferredWeightGrads | None = None


class Pipeline:
    """Executor of schedules over this rank's stages, with channels to the ranks of adjacent stages."""

    def __init__(self, rank_of: Mapping[int, int], mesh: Mesh, splitter: BackwardSplitter) -> None:
        """`rank_of`: the `pp` coordinate of every stage. `splitter`: that of the stages' linear layers. All
        ranks of the pipeline call this at the same point of the program."""
        self._rank = mesh.coord[STAGES]
        self._rank_of = rank_of
        self.splitter = splitter
        self.deferred_bytes: dict[int, int] = {}  # by stage: held after its first split backward
        self._last_stage = max(rank_of)
        self.device = mesh.world.device
        self._outboxes: dict[tuple[str, int], Outbox] = {}  # by (kind, receiver)
        self._inboxes: dict[tuple[str, int], Inbox] = {}  # by (kind, sender)
        self.shares_communicators = mesh.world.shares_communicators
        self._ordered: tuple[Schedule, dict[Action, int]] | None = None
        classes = sender_classes(rank_of)
        for kind, source, target in sorted(self._channels()):
            if self._rank in (source, target):
                label = f"{kind} from stage rank {source} to {target}"
                group, peer = mesh.message_group(
                    STAGES, source, target, channel=label, shared_channel=sends_channel(classes[source])
                )
                if self._rank == source:
                    self._outboxes[kind, target] = Outbox(group, device=self.device, label=label, peer=peer)
                else:
                    self._inboxes[kind, source] = Inbox(group, device=self.device, label=label, peer=peer)

    def _channels(self) -> set[tuple[str, int, int]]:
        """Return (kind, sender, receiver) of all channels of the pipeline."""
        channels = set()
        for stage in range(self._last_stage):
            rank, next_rank = self._rank_of[stage], self._rank_of[stage + 1]
            if rank != next_rank:
                channels |= {("activations", rank, next_rank), ("gradients", next_rank, rank)}
        return channels

    def order_of(self, schedule: Schedule) -> dict[Action, int]:
        """Return the global order of a schedule, computed once as long as the schedule stays the same."""
        if self._ordered is None or self._ordered[0] is not schedule:
            self._ordered = (schedule, global_order(schedule))
        return self._ordered[1]

    def run(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        keys: Sequence[Hashable],
        *,
        records: bool = False,
    ) -> list[Span]:
        """Run this rank's actions on its stages. `keys`: one per micro-batch, equal if the outputs of a stage
        have equal shapes. With `records`, return the time span of each action, in seconds of this process's
        clock."""
        run = _ScheduleRun(self, schedule, stages, keys)
        clock = _Clock(self.device) if records else None
        actions = schedule.ranks[self._rank]
        for index, action in enumerate(actions):
            for outbox in self._outboxes.values():
                outbox.release_sent()  # also of those that send no more: activations after the last forward
            run.post_for(index)
            run.do(action, nullcontext() if clock is None else clock.around(action))
        run.check_complete()
        for outbox in self._outboxes.values():
            outbox.drain()
        return [] if clock is None else clock.spans()


class _ScheduleRun:
    """One run of a schedule."""

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, stages: Mapping[int, Stage], keys: Sequence[Hashable]
    ) -> None:
        self._pipeline = pipeline
        self._stages = stages
        self._schedule = schedule
        self._keys = [(key, schedule.trains) for key in keys]
        self._states: dict[tuple[int, int], MicrobatchState] = defaultdict(MicrobatchState)
        # Messages, by the action that sends them.
        self._local: dict[Action, list[Tensor]] = {}  # between two stages of this rank
        self._posted: dict[Action, PostedReceive] = {}
        self._packed: dict[Action, PackedOutput] = {}  # of local and posted activations
        # By channel, the messages still to be posted, the next one at the end; one list for all channels if
        # they share communicators.
        self._unposted = {channel: self._messages_of(*channel) for channel in pipeline._inboxes}
        self._order: dict[Action, int] = {}
        if pipeline.shares_communicators:  # See [Note: global message order].
            self._order = pipeline.order_of(schedule)
            merged = sorted(chain.from_iterable(self._unposted.values()), key=self._order.__getitem__)
            self._unposted = dict.fromkeys(self._unposted, merged[::-1])
        self._last_backward: dict[int, Action] = {}
        for action in schedule.ranks[pipeline._rank]:
            if action.kind is Kind.W or (action.kind is Kind.B and not self._is_split(action)):
                self._last_backward[action.stage] = action

    # --- actions

    def do(self, action: Action, timed: AbstractContextManager[None]) -> None:
        run = {Kind.F: self._forward, Kind.B: self._backward, Kind.W: self._backward_weight}[action.kind]
        run(action, timed)

    def _forward(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        state, received = self._states[stage, micro], None
        if stage:
            previous = Action(Kind.F, stage - 1, micro)
            packed, tensors = self._packed.pop(previous), self._take(previous)
            state.stage_input = StageInput(packed, tensors)
            received = state.stage_input.unpack()
        with timed:
            output = self._stages[stage].forward(micro, received)
            del received
        if stage == self._pipeline._last_stage:
            state.roots = [] if output is None else [output]
        else:
            packed, tensors = pack(output, source=f"stage {stage}")
            state.roots = [
                torch.autograd.graph.get_gradient_edge(t) for t in packed.tensors_with_grad(tensors)
            ]
            state.packed = packed
            self._send_activations(action, packed, tensors)
        if not self._schedule.trains:
            del self._states[stage, micro]

    def _backward(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        state, is_split = self._states[stage, micro], self._is_split(action)
        gradients: Sequence[Tensor | None] = [None] * len(state.roots)
        if stage < self._pipeline._last_stage:
            gradients = self._take(Action(Kind.B, stage + 1, micro))
        roots, state.roots = state.roots, []
        sharded, is_last = self._stages[stage].sharded, self._last_backward[stage] == action
        defers = is_split or stage in self._pipeline.splitter.sends_first
        with timed:
            with self._pipeline.splitter.deferring() if defers else nullcontext() as deferred:
                sharded.backward(roots, gradients, last=is_last, deferred=deferred)
                del roots, gradients
            if state.stage_input is not None:
                self._send_gradients(action, state.stage_input.take_gradients())
                state.stage_input = None
            if deferred is not None and not is_split:
                sharded.backward_weight(deferred, last=is_last)
        if is_split and deferred is not None:
            state.deferred = deferred
            if stage not in self._pipeline.deferred_bytes:
                self._pipeline.deferred_bytes[stage] = deferred.num_bytes()
        else:
            del self._states[stage, micro]

    def _backward_weight(self, action: Action, timed: AbstractContextManager[None]) -> None:
        _, stage, micro = action
        deferred = self._states.pop((stage, micro)).deferred
        assert deferred is not None, f"{action} before its input-gradient half"
        with timed:
            self._stages[stage].sharded.backward_weight(deferred, last=self._last_backward[stage] == action)

    def _is_split(self, action: Action) -> bool:
        return (action.stage, action.micro) in self._schedule.split

    def check_complete(self) -> None:
        leftovers = {*self._states, *self._local, *self._posted}
        assert not leftovers, f"the schedule left work: {leftovers}"

    # --- messages, named by the action that sends them

    def _send_activations(self, action: Action, packed: PackedOutput, tensors: list[Tensor]) -> None:
        target = self._pipeline._rank_of[action.stage + 1]
        if target == self._pipeline._rank:
            self._packed[action], self._local[action] = packed, [tensor.detach() for tensor in tensors]
        else:
            self._pipeline._outboxes["activations", target].send(self._key(action), packed, tensors)

    def _send_gradients(self, action: Action, gradients: list[Tensor]) -> None:
        target = self._pipeline._rank_of[action.stage - 1]
        if target == self._pipeline._rank:
            self._local[action] = gradients
        else:
            self._pipeline._outboxes["gradients", target].send_tensors(gradients)

    def _take(self, sent: Action) -> list[Tensor]:
        return self._local.pop(sent) if sent in self._local else self._posted.pop(sent).wait()

    def _post(self, action: Action, *, blocks: bool = True) -> None:
        """Post the receive that the action needs, and all earlier ones on the same channel. If it may not
        block, stop where a description would have to be received first."""
        sent = self._needed_message(action)
        if sent is None or sent in self._posted:
            return
        unposted = self._unposted.get(self._channel(sent))
        if unposted is None:
            return  # from a stage of this rank
        while sent not in self._posted:
            if not self._post_next(unposted, blocks=blocks):
                return

    def post_for(self, index: int) -> None:
        """Post the receives of the rank's action at `index`, and those that come ahead of their use."""
        actions = self._schedule.ranks[self._pipeline._rank]
        if self._pipeline.shares_communicators:  # See [Note: global message order].
            unposted = next(iter(self._unposted.values()), [])
            while unposted and self._order[unposted[-1]] < self._order[actions[index]]:
                self._post_next(unposted)
            return
        self._post(actions[index])
        for upcoming in actions[index + 1 : index + 1 + _RECEIVE_AHEAD]:
            self._post(upcoming, blocks=False)

    def _post_next(self, unposted: list[Action], *, blocks: bool = True) -> bool:
        """Post the first of the messages. Return False, and leave it, if that would block and must not."""
        inbox = self._pipeline._inboxes[self._channel(unposted[-1])]
        specs = self._specs(unposted[-1], inbox, blocks=blocks)
        if specs is not None:
            self._posted[unposted.pop()] = inbox.post(specs)
        return specs is not None

    def _channel(self, sent: Action) -> tuple[str, int]:
        """Return the (kind, sender) of a message."""
        kind = "activations" if sent.kind is Kind.F else "gradients"
        return kind, self._pipeline._rank_of[sent.stage]

    def _specs(self, sent: Action, inbox: Inbox, *, blocks: bool) -> Sequence[TensorSpec] | None:
        if sent.kind is Kind.B:
            state = self._states.get((sent.stage - 1, sent.micro))
            return None if state is None or state.packed is None else state.packed.grad_specs
        if not blocks and not inbox.has_description(self._key(sent)):
            return None
        packed = self._packed[sent] = inbox.describe(self._key(sent))
        return packed.specs

    def _needed_message(self, action: Action) -> Action | None:
        """Return the action whose message an action needs."""
        kind, stage, micro = action
        if kind is Kind.F and stage:
            return Action(Kind.F, stage - 1, micro)
        if kind is Kind.B and stage < self._pipeline._last_stage:
            return Action(Kind.B, stage + 1, micro)
        return None

    def _key(self, sent: Action) -> Hashable:
        return (sent.stage, self._keys[sent.micro])

    def _messages_of(self, kind: str, source: int) -> list[Action]:
        """Return all messages of a channel to this rank, the first at the end."""
        sends, step = (Kind.F, 1) if kind == "activations" else (Kind.B, -1)
        return [
            action
            for action in reversed(self._schedule.ranks[source])
            if action.kind is sends
            and self._pipeline._rank_of.get(action.stage + step) == self._pipeline._rank
        ]


class _Clock:
    """Start and end times of actions; on CUDA measured with events on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[Action, Any, Any]] = []
        self._start_s = time.perf_counter()
        self._start = self._stamp()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        start = self._stamp()
        yield
        self._stamps.append((action, start, self._stamp()))

    def spans(self) -> list[Span]:
        if not self._cuda:
            return [Span(*stamp) for stamp in self._stamps]
        torch.cuda.synchronize()
        elapsed_ms = self._start.elapsed_time
        return [
            Span(a, self._start_s + elapsed_ms(s) / 1e3, self._start_s + elapsed_ms(e) / 1e3)
            for a, s, e in self._stamps
        ]

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
