"""One parameter server: it accepts workers, with a thread for each, and serves their requests.

[Note: threads of a server]
A worker makes one request at a time, so its thread blocks in `receive` between requests, and in a condition
while a request waits for other workers (COMMIT for the decision, ADVANCE for slower workers). The clocks are
read and written under the condition's lock; sums and updates have locks of their own, in `state.py`.

[Note: gradients in the worker's memory]
On one host a worker sends once where its gradients and weights are, and the server maps that memory. A push
is then no message: the server adds up the gradients where they are, between COMMIT and the reply to APPLY;
the worker does not write them in this time. A pull is a copy by the server into the worker's weights, under
the chunk's lock. The mapping outlives the worker: an update that was decided on can be finished without it.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch import Tensor

from plait.comm.connection import Connection, Message, ServerAddress, as_bytes
from plait.comm.objects import decode_text
from plait.comm.rendezvous import announce_begin
from plait.comm.shm.rendezvous import HostInfo, RemoteMemory
from plait.engine.spec import TrainingSpec
from plait.errors import CommError, ModelError, PlaitError
from plait.parallel.zero.rank_context import Precision
from plait.plan.servers import SyncPolicy
from plait.server.clocks import ClockTable
from plait.server.protocol import ChunkTable, Verb, error_message, members, pack, unpack
from plait.server.push import decode
from plait.server.replica import Replica, report
from plait.server.state import ServerState

T = TypeVar("T")
_IDLE_S = 7 * 86400.0  # of a worker between two requests; one that dies closes its connection
_POLL_S = 0.02
_NOTICE_S = 0.2  # until a wait notices that its worker is gone
_MAX_EVENTS = 10_000  # ends of steps that are kept until they are asked for
_SETTLE_S = 30.0  # for what a worker did that died, before it joins again
_TAKE_OVER_S = 120.0  # from the first request to a replica until it has lost its server too
_CHANGES = ("add", "remove", "commit", "begin", "finish", "advance", "may_read", "hold")  # of the clocks


class _Worker:
    """A worker's memory as this server sees it."""

    def __init__(self, hello: Mapping[str, object], num_processes: int) -> None:
        self.memory: RemoteMemory | None = None
        if hello["memory"] is not None:
            self.memory = RemoteMemory(HostInfo(**hello["memory"]), num_processes)  # type: ignore[arg-type]
        self.offsets: list[tuple[int, int]] = hello["offsets"]  # type: ignore[assignment]
        self.staged: dict[int, Tensor] = {}  # pushed gradients, by chunk


class Server:
    """One of a job's parameter servers."""

    def __init__(
        self,
        index: int,
        spec: TrainingSpec,
        table: ChunkTable,
        replica: Replica | None = None,
        *,
        primary: int | None = None,
    ) -> None:
        """`spec`: of the plan with servers. `primary`: on a replica, the rank of its server. Raises
        ConfigError."""
        plan = spec.job
        self.index = index
        self._replica = replica
        self._primary = primary
        self._is_active = primary is None  # serves workers; see [Note: death of a server] in `replica.py`
        self._num_workers = plan.dp
        self._num_processes = 2 * plan.num_ranks  # see `process_world`
        self._is_only = plan.num_servers == 1
        self._push_format = plan.push_format
        self._turn = "exchange" if plan.local_steps else "step"  # one clock
        self._policy = SyncPolicy.parse(plan.sync)
        self._precision = Precision.from_plan(plan)
        # Islands compute changes of master weights.
        self._pulled = self._precision.master if plan.local_steps else self._precision.compute
        self._digest = table.digest
        self.state = ServerState(table.of_server[index], spec, self._precision.master, self._forward)
        self.clocks = ClockTable(self._policy, plan.dp)
        self._changed = threading.Condition()
        self._of_thread = threading.local()  # connection: of the worker that the thread serves
        self._workers: dict[int, _Worker] = {}
        self._connected: dict[int, Connection] = {}
        self._joined: dict[int, Connection] = {}  # by worker
        self._connections: list[tuple[int, Connection]] = []  # of all workers so far
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_MAX_EVENTS)  # time, worker, clock
        self._num_written = 0
        self._num_connections = 0
        self._is_over = False
        self._has_lost_first = False  # worker 0, with which the job ends

    def serve(self, address: ServerAddress) -> None:
        """Accept workers until the job is over or all have left."""
        while not self._has_ended():
            try:
                joined = address.accept(_IDLE_S)
            except CommError:  # it died before it was connected
                continue
            if joined is None:
                if self._replica is not None:
                    self._replica.check()
                time.sleep(_POLL_S)
                continue
            worker, connection = joined
            with self._changed:
                self._num_connections += 1
                self._connected[self._num_connections] = connection
                self._connections.append((worker, connection))
            arguments = (self._num_connections, connection, worker, address)
            threading.Thread(target=self._serve_worker, args=arguments, daemon=True).start()

    def _has_ended(self) -> bool:
        with self._changed:
            enough = self._num_connections >= self._num_workers + (self._primary is not None)
            return not self._connected and (self._is_over or enough or self._has_lost_first)

    def _serve_worker(self, number: int, connection: Connection, worker: int, address: ServerAddress) -> None:
        """Serve one connection until it ends; the worker then has left."""
        self._of_thread.connection = connection
        try:
            if worker == self._primary:
                self._follow(connection, address)
                return
            while True:
                message = connection.receive()
                if message.verb == Verb.LEAVE:
                    with self._changed:
                        self._is_over |= bool(message.value)
                        self._changed.notify_all()
                    connection.send(message)
                    return
                try:
                    reply = self._handle(worker, message)
                    if message.verb == Verb.HELLO:
                        with self._changed:
                            self._joined[worker] = connection
                except PlaitError as error:
                    reply = error_message(error)
                connection.send(reply)
        except CommError:
            self._report_loss(worker, connection)
        finally:
            with self._changed:
                if self._joined.get(worker) is connection:
                    del self._joined[worker]
                    if self.index == 0 and self._is_active:
                        with contextlib.suppress(CommError):  # replaced by its replica, which sees it too
                            self._change_clocks("remove", worker)
                del self._connected[number]
                self._changed.notify_all()
            connection.close()

    def _follow(self, connection: Connection, address: ServerAddress) -> None:
        """Execute, on a replica, what its server forwards, until it ends or is lost."""
        while True:
            try:
                message = connection.receive()
                with contextlib.suppress(CommError):
                    connection.send(Message(message.verb))
            except CommError:
                break
            if message.verb == Verb.LEAVE:
                return
            assert self._primary is not None
            self._handle(self._primary, message)
        if not address.claim():
            return
        with self._changed:
            self._is_active = True
            for worker in self.clocks.workers.keys() - self._joined.keys():
                self.clocks.remove(worker)
            self._changed.notify_all()
            if self._joined and not self._is_over:
                report(f"server {self.index} is gone: its replica goes on")

    def _forward(self, message: Message) -> None:
        if self._replica is None:
            return
        if message.verb == Verb.SUM and all(map(self._reads_gradients_of, members(message.value))):
            message = replace(message, payload=message.payload[:0])  # the replica reads them too
        self._replica.forward(message)

    def _reads_gradients_of(self, worker: int) -> bool:
        source = self._workers[worker]
        return source.memory is not None and not source.staged

    def _change_clocks(self, change: str, *arguments: object) -> Any:
        """Call a method of the clocks, on the replica first. Call it locked."""
        self._forward(Message.of_json(Verb.CLOCKS, [change, *arguments]))
        return getattr(self.clocks, change)(*arguments)

    def _load_change(self, _worker: int, message: Message) -> Message:
        change, *arguments = message.json()
        assert change in _CHANGES, f"no change of clocks: {change}"
        with self._changed:
            getattr(self.clocks, change)(*arguments)
            self._changed.notify_all()
        return message

    def _may_read(self, worker: int) -> bool:
        """Return whether a worker may pull. Call it locked."""
        is_admitted = self.clocks.may_read(worker)
        if is_admitted:
            self._forward(Message.of_json(Verb.CLOCKS, ["may_read", worker]))
        return is_admitted

    def _report_loss(self, worker: int, connection: Connection) -> None:
        """Print that a worker has died, on one server. Without worker 0 the job ends: see `_check_first`."""
        with self._changed:
            if worker == 0 and self._joined.get(0) is connection and not self._is_over:
                self._has_lost_first = True
                self._changed.notify_all()
                return
            others = sorted(self.clocks.workers.keys() - {worker})
            is_known = self._joined.get(worker) is connection and worker in self.clocks.workers
            if not (is_known and self._is_active) or self.index or self._is_over or not others:
                return
            clock = self.clocks.workers[worker].clock
        names = "worker" + "s" * (len(others) > 1) + f" {', '.join(map(str, others))}"
        go = "go" if len(others) > 1 else "goes"
        report(f"worker {worker} is gone in {self._turn} {clock + 1}: {names} {go} on without it")

    def _check_first(self) -> None:
        """Raise CommError on the other workers when worker 0 has died."""
        if self._has_lost_first and not self._is_over:
            raise CommError(
                "worker 0 is gone, which logs, saves and ends the job",
                given=f"its connection with server {self.index} is closed",
                expected="a worker 0 that runs until the job ends",
                hint="look for its error, or for a signal; a run continues from its newest checkpoint",
            )

    def _handle(self, worker: int, message: Message) -> Message:
        self._check_first()
        handler = _HANDLERS.get(message.verb)
        if handler is None or (message.verb == Verb.CLOCKS and worker != self._primary):
            raise CommError("an unknown request", given=f"verb {message.verb} of worker {worker}")
        if not self._is_active and worker != self._primary and message.verb != Verb.HELLO:
            with self._changed:
                if self._wait_for(lambda: self._is_active, _TAKE_OVER_S) is None and not self._is_over:
                    raise CommError(
                        f"server {self.index} is lost to worker {worker}, and not to its replica",
                        hint="look for a network that was interrupted: the server is alive",
                    )
        return handler(self, worker, message)

    def _wait_for(self, find: Callable[[], T | None], limit_s: float = math.inf) -> T | None:
        """Wait until `find` returns a value; None if the job is over, or at the limit. Call it locked. Raises
        CommError if the worker that waits for the reply is gone."""
        until_s = time.monotonic() + limit_s
        while not self._is_over and time.monotonic() < until_s:
            self._check_first()
            found = find()
            if found is not None and found is not False:
                return found
            if not self._changed.wait(_NOTICE_S) and (
                connection := getattr(self._of_thread, "connection", None)
            ):
                connection.check_is_open()
        return None

    # --- requests; each returns the reply

    def _hello(self, worker: int, message: Message) -> Message:
        hello = message.json()
        if hello["digest"] != self._digest:
            raise ModelError(
                "a worker trains another model than the servers",
                given=f"worker {worker} with parameters {hello['digest']}, server {self.index} with "
                f"{self._digest}",
                expected="the same model, plan and parameter groups in all processes",
                hint="start all processes with the same script or recipe, and the same plan",
            )
        with self._changed:
            self._workers[worker] = _Worker(hello, self._num_processes)
            clock = 0
            if self.index == 0 and self._is_active:
                clock = self._add(worker)
            self._changed.notify_all()
        return Message(Verb.HELLO, clock=clock)

    def _add(self, worker: int) -> int:
        """Let a worker join; return its clock. Call it locked."""
        present = self.clocks.workers.get(worker)
        if present is not None:
            if self._primary is None:
                raise CommError("a worker with this rank is present", given=f"worker {worker}")
            return present.clock  # the server died before it replied
        clock: int = self._change_clocks("add", worker)
        if self.clocks.counts.joined == self._num_workers:
            announce_begin()
        if self.clocks.counts.joined > self._num_workers:
            report(f"worker {worker} has joined in {self._turn} {clock + 1}")
        return clock

    def _push(self, worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        numel = self.state.chunks[index].numel
        gradient = decode(message, numel, self._precision.master, self._push_format)
        self._workers[worker].staged[index] = gradient
        return Message(Verb.PUSH)

    def _commit(self, worker: int, message: Message) -> Message:
        with self._changed:
            self._check_clock(worker, message.clock)
            self._change_clocks("commit", worker, message.clock, message.json())
            self._changed.notify_all()
            decision = self._wait_for(lambda: self.clocks.decision(worker, message.clock))
            if decision is None:
                return Message(Verb.OVER)
            present = len(self.clocks.workers)
            unfinished = self._unfinished()
            content = {**asdict(decision), "present": present, "unfinished": unfinished, "squares": None}
            is_dropped = self._policy.sums and worker not in decision.workers
            is_late = is_dropped and self.clocks.is_finished(message.clock)
        if self._is_only and self._policy.sums and not is_late:  # it would be asked for the sum next
            content["squares"] = self.state.sum(decision.clock, decision.workers, self._gradient)
        return Message.of_json(Verb.COMMIT, content, value=int(is_late))

    def _unfinished(self) -> list[tuple[int, int, str]]:
        return [(*key, update) for key, update in self.clocks.unfinished().items()]

    def _sum(self, worker: int, message: Message) -> Message:
        workers = members(message.value)
        if worker == self._primary and message.payload.numel():
            self.state.load_sum(message.clock, workers, message.payload)
            return message
        if worker != self._primary:
            self._await_pushes(workers)
        return Message.of_json(Verb.SUM, self.state.sum(message.clock, workers, self._gradient))

    def _apply(self, worker: int, message: Message) -> Message:
        workers = members(message.value)
        if worker != self._primary:
            if self.index == 0:
                with self._changed:
                    update = decode_text(message.payload)
                    self._change_clocks("begin", worker, message.clock, update)
            self._await_pushes(workers)
        done = self.state.apply(message.clock, workers, message.json(), self._gradient)
        return Message(Verb.APPLY, value=int(done))

    def _await_pushes(self, workers: tuple[int, ...]) -> None:
        """Wait, on a replica that took over, until workers have sent the step's pushes again or have died."""
        if self._primary is None:
            return
        with self._changed:
            self._wait_for(lambda: all(w not in self._joined or self._has_pushed(w) for w in workers))

    def _has_pushed(self, worker: int) -> bool:
        source = self._workers[worker]
        return source.memory is not None or len(source.staged) == len(self.state.chunks)

    def _advance(self, worker: int, message: Message) -> Message:
        with self._changed:
            clock = self.clocks.workers[worker].clock
            if self._primary is None or clock <= message.clock:  # or the server died before it replied
                self._check_clock(worker, message.clock)
                clock = self._change_clocks("advance", worker, message.clock)
                self._ends.append((time.time(), worker, clock))
                self._changed.notify_all()
            if self._wait_for(lambda: self._may_read(worker)) is None:
                return Message(Verb.OVER)
        if message.count:
            self._pull(worker, message)
        return Message(Verb.ADVANCE, clock=clock)

    def _pull(self, worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        chunk, source = self.state.chunks[index], self._workers[worker]
        if source.memory is None:
            weights = self.state.read(index).to(self._pulled)
            return Message(Verb.PULL, payload=as_bytes(weights))
        for at in range(index, index + message.count):
            chunk = self.state.chunks[at]
            offset = source.offsets[chunk.unit][0] + chunk.start * self._pulled.itemsize
            self.state.read(at, source.memory.tensor(offset, chunk.numel, self._pulled))
        return Message(Verb.PULL)

    def _read(self, _worker: int, message: Message) -> Message:
        return Message(Verb.READ, payload=pack(self.state.read_state(self._check_chunk(message))))

    def _write(self, _worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        numel = self.state.chunks[index].numel
        tensors = unpack(message.payload, self.state.kinds, numel, self._precision.master)
        self._forward(message)
        self.state.write_state(index, tensors)
        return Message(Verb.WRITE)

    def _ready(self, _worker: int, message: Message) -> Message:
        with self._changed:
            if message.value > self._num_written:  # or the server died before it replied
                self._forward(message)
                self.state.forget_updates()
                self.clocks.restart(message.clock)
                self._num_written = message.value
                self._changed.notify_all()
        return message

    def _wait_ready(self, worker: int, message: Message) -> Message:
        with self._changed:
            written = self._wait_for(lambda: self._num_written >= message.value)
            if written is None or self._wait_for(lambda: self._may_read(worker)) is None:
                return Message(Verb.OVER)
            return Message(Verb.WAIT_READY, clock=self.clocks.workers[worker].clock)

    def _hold(self, _worker: int, message: Message) -> Message:
        with self._changed:
            self._change_clocks("hold", bool(message.value))
            if message.value:
                self._wait_for(lambda: self.clocks.is_quiet or bool(self.clocks.unfinished()))
            self._changed.notify_all()
            return Message.of_json(Verb.HOLD, self._unfinished())

    def _finish(self, _worker: int, message: Message) -> Message:
        with self._changed:
            self._change_clocks("finish", message.worker, message.clock)
            self._changed.notify_all()
        return message

    def _list_unfinished(self, worker: int, _message: Message) -> Message:
        with self._changed:
            self._wait_for(lambda: self.clocks.is_settled(worker), _SETTLE_S)
            return Message.of_json(Verb.UNFINISHED, self._unfinished())

    def _counts(self, _worker: int, _message: Message) -> Message:
        """Counts so far, the steps that have ended since the last call, and bytes by worker."""
        with self._changed:
            ends = [self._ends.popleft() for _ in range(len(self._ends))]
            linked = [*self._connections]
            if self._replica is not None:
                linked.append((self._replica.rank, self._replica.connection))
            connections = [
                (rank, connection.received_bytes, connection.sent_bytes) for rank, connection in linked
            ]
            content = {
                **asdict(self.clocks.counts),
                "seconds": time.time(),
                "ends": ends,
                "pairs": connections,
            }
            return Message.of_json(Verb.COUNTS, content)

    def _gradient(self, worker: int, index: int) -> Tensor:
        """The gradient that a worker has pushed for a chunk."""
        source, chunk, dtype = self._workers[worker], self.state.chunks[index], self._precision.master
        if index in source.staged:
            return source.staged[index]
        if source.memory is None:
            raise CommError("a worker has pushed no gradient", given=f"worker {worker}, chunk {index}")
        offset = source.offsets[chunk.unit][1] + chunk.start * dtype.itemsize
        return source.memory.tensor(offset, chunk.numel, dtype)

    def _check_chunk(self, message: Message) -> int:
        if not 0 <= message.first < len(self.state.chunks):
            raise CommError(
                "a request for a chunk of another server",
                given=f"chunk {message.first}, server {self.index} has {len(self.state.chunks)}",
            )
        return message.first

    def _check_clock(self, worker: int, clock: int) -> None:
        present = self.clocks.workers[worker].clock
        if clock != present:
            raise CommError(
                "a request of another clock", given=f"clock {clock} of worker {worker}", expected=f"{present}"
            )


_HANDLERS: dict[int, Callable[[Server, int, Message], Message]] = {
    Verb.HELLO: Server._hello,
    Verb.PUSH: Server._push,
    Verb.COMMIT: Server._commit,
    Verb.SUM: Server._sum,
    Verb.APPLY: Server._apply,
    Verb.ADVANCE: Server._advance,
    Verb.PULL: Server._pull,
    Verb.READ: Server._read,
    Verb.WRITE: Server._write,
    Verb.READY: Server._ready,
    Verb.WAIT_READY: Server._wait_ready,
    Verb.HOLD: Server._hold,
    Verb.FINISH: Server._finish,
    Verb.UNFINISHED: Server._list_unfinished,
    Verb.COUNTS: Server._counts,
    Verb.CLOCKS: Server._load_change,
}
