"""A worker's side: the engine's gradients go to the servers, and its weights come from them.

[Note: a worker is an engine of its own]
Its engine runs the plan with dp=1 in a world of one rank, so it calls no collectives. After backward,
`reduce_totals` commits the step, `apply` has the servers update the weights, and `end_step` copies the new
ones into the units' storages. With local steps it updates its own weights: see `island.py`. Buffers and
frozen parameters are the worker's own; worker 0's are saved.

[Note: numbers of each policy]
Under `all` and `backup`, the workers whose pushes were taken give loss, targets and gradient norm: the
gradient is divided by their number of targets, and clipped by the global norm, as in data parallelism over
these workers. Under `async` and `stale` each push is a step by itself, divided by its own targets and clipped
by its own norm. The learning rate is the worker's, at its own clock.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from plait.comm import JobProcess
from plait.comm.connection import Connection, Message, ServerAddress
from plait.comm.objects import encode_text
from plait.comm.shm.arena import Arena
from plait.comm.shm.rendezvous import describe
from plait.comm.stats import WaitClock
from plait.engine.build import EngineParts
from plait.engine.optimizer import options_state
from plait.errors import CommError, RunError
from plait.optim.clip import squared_norm
from plait.parallel.zero.flat_param import FlatParam
from plait.plan import MemoryUse, Plan
from plait.plan.servers import SyncPolicy
from plait.server.protocol import Chunk, ChunkTable, Verb, mask_of, pack, raised, unpack
from plait.server.push import GradientEncoder, PushReduction

T = TypeVar("T")
_LEAVE_S = 10.0  # for a server's reply
_WAITS = (Verb.COMMIT, Verb.ADVANCE)  # requests that are replied to when other workers have come so far


class JobIsOver(RunError):
    """Worker 0 has ended the job."""


class Servers:
    """A worker's connections with the servers. Methods raise CommError, or what a server replies."""

    def __init__(self, process: JobProcess, plan: Plan, clock: WaitClock) -> None:
        """`clock`: to which requests count as waits."""
        self.worker = process.rank
        self._clock = clock
        self.waited_s = 0.0  # for other workers
        num_servers = plan.num_servers
        roles = (False, True) if plan.server == "replicated" else (False,)
        # Of each server, and then of its replica. The first one is in use.
        self.connections = [self._connect(process, index, roles) for index in range(num_servers)]
        self._pushes: list[list[Message]] = [[] for _ in self.connections]  # of the step, for replicas
        self._locks = [threading.Lock() for _ in self.connections]  # a connection has one request at a time
        self._threads = ThreadPoolExecutor(num_servers, "plait-servers") if num_servers > 1 else None

    def _connect(self, process: JobProcess, index: int, roles: Sequence[bool]) -> list[Connection]:
        connections = []
        for is_replica in roles:
            address = ServerAddress(process.store, index, is_replica=is_replica)
            try:
                connections.append(address.connect(self.worker, process.timeout_s))
            except CommError as error:
                if is_replica is roles[-1] and not connections:
                    raise self._lost(index, error) from error
        return connections

    def _lost(self, index: int, error: CommError) -> CommError:
        return CommError(
            f"worker {self.worker} has lost server {index}",
            given=error.given or error.fact,
            expected="servers that run until worker 0 ends the job",
            hint="look for the first process that ended: its error is the cause",
        )

    def request(self, index: int, message: Message) -> Message:
        """Send a request to a server and return its reply."""
        start_s = time.monotonic()
        with self._locks[index], self._clock.during(f"a request to server {index}"):
            if message.verb == Verb.PUSH and len(self.connections[index]) > 1:
                self._pushes[index].append(message)
            reply = self._checked(self._ask(index, message))
        if message.verb in _WAITS:
            self.waited_s += time.monotonic() - start_s
        if message.verb == Verb.ADVANCE:  # the step's update is on all servers and replicas
            for pushes in self._pushes:
                pushes.clear()
        return reply

    def _ask(self, index: int, message: Message) -> Message:
        """Send a request to a server, or to its replica: see [Note: death of a server] in `replica.py`."""
        try:
            return self.connections[index][0].request(message)
        except CommError as error:
            if len(self.connections[index]) == 1:
                raise self._lost(index, error) from error
        self.connections[index].pop(0).close()
        for push in self._pushes[index]:
            self._checked(self._ask(index, push))
        return self._ask(index, message)

    def _checked(self, reply: Message) -> Message:
        if reply.verb == Verb.ERROR:
            raise raised(reply)
        if reply.verb == Verb.OVER:
            raise JobIsOver("worker 0 has ended the job", given=f"worker {self.worker} was at work")
        return reply

    def replies(self, index: int, messages: Sequence[Message]) -> Iterator[Message]:
        """Send requests to a server at once, so that it sends a reply while the one before is read; yield the
        replies."""
        num_read = 0
        with self._locks[index]:
            connection = self.connections[index][0]
            while num_read < len(messages):
                try:
                    for message in messages if not num_read else ():
                        connection.send(message)
                    reply = connection.receive()
                except CommError:
                    connection.close()  # replies that are under way are of no use
                    break
                num_read += 1
                yield self._checked(reply)
            for message in messages[num_read:]:
                yield self._checked(self._ask(index, message))

    def greet_replicas(self, message: Message) -> None:
        """Send HELLO to the replicas."""
        for connections in self.connections:
            for connection in connections[1:]:
                try:
                    reply = connection.request(message)
                except CommError:
                    connections.remove(connection)
                    continue
                if reply.verb == Verb.ERROR:
                    raise raised(reply)

    def each(self, work: Callable[[int], T], first: int = 0) -> list[T]:
        """The results of `work(index)` for all servers from `first` on, at the same time."""
        indices = range(first, len(self.connections))
        return [*(map(work, indices) if self._threads is None else self._threads.map(work, indices))]

    def all(self, message: Message, first: int = 0) -> list[Message]:
        """Send a request to all servers from `first` on; return the replies."""
        return self.each(lambda index: self.request(index, message), first)

    def leave(self, *, ends_job: bool = False) -> None:
        """Leave the job, or end it for all workers."""
        for connection in (connection for connections in self.connections for connection in connections):
            connection.limit_waits(_LEAVE_S)
            with contextlib.suppress(CommError):  # the server may have ended
                connection.request(Message(Verb.LEAVE, value=int(ends_job)))
            connection.close()
        self.connections = []


class Served(Protocol):
    """A worker's copy of what the servers hold. Implemented by `ServedModel`, and by `ServedOuter` in
    `island.py`.

    kinds  of the optimizer's states, in the order in which they are sent
    """

    @property
    def kinds(self) -> Sequence[str]: ...

    def pulled(self, unit: FlatParam) -> Tensor:
        """Return the tensor that the servers' weights are copied to."""

    def options(self) -> dict[str, Any]:
        """Options of the optimizer in this step, by key."""

    def load(self, parts: Sequence[tuple[Chunk, list[Tensor]]]) -> None:
        """Copy weights and states of all chunks: flat tensors, the states in the order of `kinds`."""

    def tensors(self, chunk: Chunk) -> list[Tensor]:
        """Weights and states of a chunk, as `load` gets them."""

    def clear(self) -> None:
        """Drop copies of states, which were for a checkpoint."""


class ServerUpdater:
    """Has parameter servers update the weights. See [Note: a worker is an engine of its own]."""

    def __init__(
        self, parts: EngineParts, plan: Plan, servers: Servers, arena: Arena | None, served: Served
    ) -> None:
        """Join the job. `plan`: with servers. Raises ModelError if the servers have another model."""
        self.data_rank, self.data_ranks = servers.worker, plan.dp
        self.saves = servers.worker == 0
        self._servers = servers
        self._num_processes = plan.num_ranks
        self._served = served
        self._policy = SyncPolicy.parse(plan.sync)
        self._units: Sequence[FlatParam] = parts.sharded.trained
        self._table = ChunkTable.build([unit.layout for unit in self._units], plan.num_servers)
        self._arena = arena
        self._encoder = GradientEncoder(plan.push_format, self._units)
        self._sends = arena is None or not self._encoder.is_exact
        self._senders = (
            [ThreadPoolExecutor(1, "plait-push") for _ in servers.connections] if self._sends else []
        )
        has_norm = not self._policy.sums and self._encoder.is_exact
        for stage in parts.sharded.stages.values() if not plan.local_steps else ():
            stage.reduce_with(PushReduction(self._push, has_norm=has_norm))
        self._has_applied = False
        self._num_published = 0
        self._clock = 0
        self._workers: tuple[int, ...] = ()  # of the present step
        self._num_present = 0  # workers, when the step was decided on
        self._is_late = False
        self._is_ready = True  # False on worker 0 from `push_state` to its first step
        self._join()

    def _join(self) -> None:
        offsets = None
        if self._arena is not None:
            base = self._arena.mapping.address
            tensors = [(self._served.pulled(unit), unit.grad_shard) for unit in self._units]
            offsets = [[tensor.data_ptr() - base for tensor in both] for both in tensors]
        hello = {
            "digest": self._table.digest,
            "memory": None if self._arena is None else asdict(describe(self._arena)),
            "offsets": offsets,
        }
        self._finish(self._servers.request(0, Message(Verb.UNFINISHED)).json())
        message = Message.of_json(Verb.HELLO, hello)
        self._servers.greet_replicas(message)
        self._servers.all(message, first=1)
        self._clock = self._servers.request(0, message).clock

    # --- a step

    def reduce_totals(self, totals: tuple[float, float, float]) -> tuple[float, float, float]:
        self.begin_training()
        if not self._policy.sums and not self._encoder.is_exact:
            totals = (*totals[:2], self._squared_norm())
        reply = self._servers.request(0, Message.of_json(Verb.COMMIT, totals, clock=self._clock))
        decision = reply.json()
        self._finish(decision["unfinished"])
        self._workers, self._is_late = tuple(decision["workers"]), bool(reply.value)
        self._num_present = decision["present"]
        if not self._policy.sums:
            return totals
        loss_sum, num_targets, _ = decision["totals"]
        if self._is_late:  # its push was dropped, and the step is over
            return loss_sum, num_targets, self._squared_norm()
        squares = decision["squares"]
        if squares is None:
            message = Message(Verb.SUM, clock=self._clock, value=mask_of(self._workers))
            squares = sum(reply.json() for reply in self._servers.all(message))
        return loss_sum, num_targets, squares

    def apply(self, factor: float, number: int, on_write: Callable[[bool], object]) -> None:  # noqa: ARG002
        self._has_applied = True
        if self._is_late:
            return
        on_write(True)  # until the new weights are here
        update = {"factor": factor, "options": self._served.options()}
        message = Message.of_json(Verb.APPLY, update, clock=self._clock, value=mask_of(self._workers))
        if not self._policy.sums:  # the first one records what is to be applied: see `ClockTable.begin`
            self._servers.request(0, message)
        self._servers.all(message, first=0 if self._policy.sums else 1)
        on_write(False)

    def end_step(self, num_steps: int, on_write: Callable[[bool], object]) -> tuple[int, None]:  # noqa: ARG002
        if not self._has_applied:  # the step was skipped
            self._encoder.discard()
        self._has_applied = False
        self._served.clear()
        if self._arena is None or not (self._policy.sums or len(self._servers.connections) == 1):
            self._clock = self._servers.request(0, Message(Verb.ADVANCE, clock=self._clock)).clock
            self._pull()
        else:  # no other worker is waited for between them, or no other server has weights
            self._servers.each(lambda index: self._pull_from(index) if index else self._advance_and_pull())
        return self._clock, None

    @property
    def share(self) -> float:
        """The weight of a worker's push in the mean of the step's pushes; if each push is a step by itself,
        in the mean over the workers."""
        return 1.0 / (len(self._workers) if self._policy.sums else self._num_present)

    @property
    def has_mean(self) -> bool:
        """True if the step's pushes were added up, and this worker's was one of them."""
        return self._policy.sums and not self._is_late

    def push_all(self) -> None:
        """Push what is in the units' `grad_shard`, which then holds what the servers decode."""
        for future in [future for unit in self._units for future in self._push(unit)]:
            future.result()

    def _advance_and_pull(self) -> None:
        message = Message(Verb.ADVANCE, clock=self._clock, count=len(self._table.of_server[0]))
        self._clock = self._servers.request(0, message).clock

    def _squared_norm(self) -> float:
        """Return the squared norm of this worker's gradient."""
        return float(sum(squared_norm(unit.grad_shard) for unit in self._units))

    def _push(self, unit: FlatParam) -> list[Future[None]]:
        """Start to send a unit's gradient. See [Note: pushes during backward] in `push.py`."""
        number = self._units.index(unit)
        return [
            self._senders[server].submit(self._push_chunk, server, index, chunk)
            for server, chunks in enumerate(self._table.of_server if self._sends else ())
            for index, chunk in enumerate(chunks)
            if chunk.unit == number
        ]

    def _push_chunk(self, server: int, index: int, chunk: Chunk) -> None:
        push = self._encoder.encode(chunk)
        numbers = {"clock": self._clock, "first": index, "value": push.block, "count": push.count}
        self._servers.request(server, Message(Verb.PUSH, payload=push.payload, **numbers))

    def _pull(self) -> None:
        """Copy the servers' weights to where they are served."""
        self._servers.each(self._pull_from)

    def _pull_from(self, server: int) -> None:
        chunks = self._table.of_server[server]
        if self._arena is not None:
            if chunks:
                self._servers.request(server, Message(Verb.PULL, count=len(chunks)))
            return
        pulls = [Message(Verb.PULL, first=index, count=1) for index in range(len(chunks))]
        for chunk, reply in zip(chunks, self._servers.replies(server, pulls), strict=True):
            target = self._served.pulled(self._units[chunk.unit])[chunk.start : chunk.stop]
            target.copy_(reply.payload.view(target.dtype))

    def _finish(self, unfinished: list[Any]) -> None:
        """Apply the updates that workers had begun when they died."""
        for worker, clock, update in unfinished:
            message = Message(Verb.APPLY, clock=clock, value=mask_of((worker,)), payload=encode_text(update))
            self._servers.all(message, first=1)
            self._servers.request(0, Message(Verb.FINISH, worker=worker, clock=clock))

    # --- saving and loading

    def pull_state(self) -> None:
        """Copy weights and optimizer states from the servers: a consistent state, between two updates."""
        request = self._servers.request
        while unfinished := request(0, Message(Verb.HOLD, value=1)).json():
            self._finish(unfinished)
        try:
            states = self._servers.each(
                lambda server: [
                    request(server, Message(Verb.READ, first=index)).payload
                    for index in range(len(self._table.of_server[server]))
                ]
            )
        finally:
            request(0, Message(Verb.HOLD, value=0))
        parts = [
            (chunk, unpack(payload, self._served.kinds, chunk.numel, self._units[chunk.unit].master.dtype))
            for chunks, payloads in zip(self._table.of_server, states, strict=True)
            for chunk, payload in zip(chunks, payloads, strict=True)
        ]
        self._served.load(parts)

    def push_state(self, num_steps: int) -> int:
        """On worker 0, copy its weights and states to the servers; on the others, wait until its first step
        has begun. So it may load more than once before the training begins."""
        self._num_published += 1
        self._encoder.discard()
        if self.data_rank == 0:
            self._servers.each(self._write)
            self._clock, self._is_ready = num_steps, False
        else:
            self._wait_until_ready()
            self._pull()
        self._served.clear()  # the servers have them
        return self._clock

    def _wait_until_ready(self) -> None:
        self._clock = self._servers.request(0, Message(Verb.WAIT_READY, value=self._num_published)).clock

    def begin_training(self) -> None:
        """On worker 0, before its first step: let all workers begin with what it has published."""
        if self._is_ready:
            return
        message = Message(Verb.READY, clock=self._clock, value=self._num_published)
        self._servers.all(message, first=1)
        self._servers.request(0, message)
        self._wait_until_ready()
        self._is_ready = True

    def _write(self, server: int) -> None:
        for index, chunk in enumerate(self._table.of_server[server]):
            payload = pack(self._served.tensors(chunk))
            self._servers.request(server, Message(Verb.WRITE, first=index, payload=payload))

    def memory(self, use: MemoryUse) -> MemoryUse:
        """Exclude optimizer states: copies of them exist only between a checkpoint and the next step."""
        return replace(use, optimizer=0, gradients=use.gradients + self.residual_bytes)

    @property
    def residual_bytes(self) -> int:
        """Bytes of what pushes have not sent: see [Note: error feedback of pushes] in `push.py`."""
        return self._encoder.residual_bytes

    def counts(self) -> dict[str, Any]:
        """Numbers of events so far (`server/clocks.py: EventCounts`).

        ends         (time, worker, new clock) of the steps that have ended since the last call
        moved_bytes  (sent, received) over connections, by rank
        waited_s     seconds that this worker waited for others
        seconds      the time
        """
        replies = [reply.json() for reply in self._servers.all(Message(Verb.COUNTS))]
        counts: dict[str, Any] = replies[0]
        moved = [[0, 0] for _ in range(self._num_processes)]
        for server, links in enumerate(reply.pop("pairs") for reply in replies):
            rank = server + self._num_processes - len(replies)
            for worker, sent, received in links:
                moved[worker] = [moved[worker][0] + sent, moved[worker][1] + received]
                moved[rank] = [moved[rank][0] + received, moved[rank][1] + sent]
        return {**counts, "moved_bytes": moved, "waited_s": self._servers.waited_s}


class ServedModel:
    """The engine's weights and its optimizer's states, which servers hold without local steps."""

    def __init__(self, parts: EngineParts) -> None:
        self._optimizer = parts.optimizer
        self._units: Sequence[FlatParam] = parts.sharded.trained

    @property
    def kinds(self) -> Sequence[str]:
        return sorted(self._optimizer.kinds)

    def pulled(self, unit: FlatParam) -> Tensor:
        return unit.storage

    def options(self) -> dict[str, Any]:
        return {key: value.item() for key, value in options_state(self._optimizer.optimizer).items()}

    def load(self, parts: Sequence[tuple[Chunk, list[Tensor]]]) -> None:
        for chunk, (weights, *_) in parts:
            self._units[chunk.unit].master[chunk.start : chunk.stop].copy_(weights)
        self._optimizer.chunked.clear()
        self._optimizer.has_states = any(len(tensors) > 1 for _, tensors in parts)
        for unit, slices in self._optimizer.slices.items() if self._optimizer.has_states else ():
            number = self._units.index(unit)
            for part in slices:
                own = [
                    (chunk, tensors)
                    for chunk, tensors in parts
                    if chunk.unit == number and part.start <= chunk.start < part.stop
                ]
                state: dict[str, Any] = {}
                for position, kind in enumerate(self.kinds, 1):
                    form, _, name = kind.rpartition(".")
                    if form:
                        value = own[0][1][position].item()
                        state[name] = value if form == "number" else torch.tensor(value, dtype=torch.float32)
                    else:
                        state[name] = torch.cat([tensors[position] for _, tensors in own])
                self._optimizer.chunked.load(part.leaf, state)

    def tensors(self, chunk: Chunk) -> list[Tensor]:
        unit = self._units[chunk.unit]
        tensors = [unit.master[chunk.start : chunk.stop].detach()]
        part = next(p for p in self._optimizer.slices[unit] if p.start <= chunk.start < p.stop)
        state = self._optimizer.chunked.state(part.leaf)
        for kind in self.kinds if state else ():
            form, _, name = kind.rpartition(".")
            if form:
                tensors.append(torch.tensor([float(state[name])], dtype=torch.float64))
            else:
                tensors.append(state[name][chunk.start - part.start : chunk.stop - part.start])
        return tensors

    def clear(self) -> None:
        self._optimizer.chunked.clear()
        self._optimizer.has_states = False
