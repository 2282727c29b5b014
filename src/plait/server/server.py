"""One parameter server: it accepts workers, with a thread for each, and serves their requests.

[Note: threads of a server]
A worker makes one request at a time, so its thread blocks in `receive` between requests, and in a condition
while a request waits for other workers (COMMIT for the decision, ADVANCE for slower workers). The clocks are
read and written under the condition's lock; sums and updates have locks of their own, in `state.py`.

[Note: gradients in the worker's memory]
On one host a worker sends once where its gradients and weights are, and the server maps that memory. A push
is then no message: the server adds up the gradients where they are, between COMMIT and the reply to APPLY,
in which time the worker does not write them. A pull is a copy by the server into the worker's weights, under
the chunk's lock. The mapping outlives the worker: an update that was decided on can be finished without it.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TypeVar

from torch import Tensor

from plait.comm.pair import Meeting, Message, Pair, as_bytes
from plait.comm.shm.remote import RemoteMemory
from plait.comm.shm.rendezvous import HostInfo
from plait.engine.spec import TrainingSpec
from plait.errors import CommError, ModelError, PlaitError
from plait.parallel.zero.rank_context import Precision
from plait.plan.servers import SyncPolicy
from plait.server.chunks import ChunkTable
from plait.server.clocks import ClockTable
from plait.server.protocol import Verb, error_message, pack, unpack
from plait.server.push import decode
from plait.server.state import ServerState

T = TypeVar("T")
_IDLE_S = 7 * 86400.0  # of a worker between two requests; one that dies closes its connection
_POLL_S = 0.02
_NOTICE_S = 0.2  # until a wait notices that its worker is gone
_MAX_EVENTS = 10_000  # ends of steps that are kept until they are asked for
_SETTLE_S = 30.0  # for what a worker did that died, before it joins again


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

    def __init__(self, index: int, spec: TrainingSpec, table: ChunkTable) -> None:
        """`spec`: of the plan with servers. Raises ConfigError."""
        plan = spec.plan
        self.index = index
        self._num_workers = plan.dp
        self._num_processes = 2 * plan.num_ranks  # see `process_world`
        self._is_only = plan.num_servers == 1
        self._reduce = plan.reduce
        self._policy = SyncPolicy.parse(plan.sync)
        self._precision = Precision.from_plan(plan)
        self._digest = table.digest
        self.state = ServerState(table.of_server[index], spec, self._precision.master)
        self.clocks = ClockTable(self._policy, plan.dp)
        self._changed = threading.Condition()
        self._of_thread = threading.local()  # pair: of the worker that the thread serves
        self._workers: dict[int, _Worker] = {}
        self._connected: dict[int, Pair] = {}
        self._pairs: list[tuple[int, Pair]] = []  # of all workers so far
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_MAX_EVENTS)  # time, worker, clock
        self._num_written = 0
        self._num_pairs = 0
        self._is_over = False

    def serve(self, meeting: Meeting) -> None:
        """Accept workers until the job is over or all have left."""
        while not self._has_ended():
            try:
                joined = meeting.accept(_IDLE_S)
            except CommError:  # it died before it was connected
                continue
            if joined is None:
                time.sleep(_POLL_S)
                continue
            worker, pair = joined
            with self._changed:
                self._num_pairs += 1
                self._connected[self._num_pairs] = pair
                self._pairs.append((worker, pair))
            thread = threading.Thread(
                target=self._serve_worker, args=(self._num_pairs, pair, worker), daemon=True
            )
            thread.start()

    def _has_ended(self) -> bool:
        with self._changed:
            enough = self._num_pairs >= self._num_workers
            return not self._connected and (self._is_over or enough)

    def _serve_worker(self, number: int, pair: Pair, worker: int) -> None:
        """Serve one connection until it ends; the worker then has left."""
        has_joined, self._of_thread.pair = False, pair
        try:
            while True:
                message = pair.receive()
                if message.verb == Verb.LEAVE:
                    with self._changed:
                        self._is_over |= bool(message.value)
                        self._changed.notify_all()
                    pair.send(message)
                    return
                try:
                    reply = self._handle(worker, message)
                    has_joined |= message.verb == Verb.HELLO
                except PlaitError as error:
                    reply = error_message(error)
                pair.send(reply)
        except CommError:
            self._report_loss(worker, has_joined=has_joined)
        finally:
            with self._changed:
                if has_joined and self.index == 0:
                    self.clocks.remove(worker)
                del self._connected[number]
                self._changed.notify_all()
            pair.close()

    def _report_loss(self, worker: int, *, has_joined: bool) -> None:
        """Print that a worker has died, on one server."""
        with self._changed:
            others = sorted(self.clocks.workers.keys() - {worker})
            if not has_joined or self.index or self._is_over or not others:
                return
            clock = self.clocks.workers[worker].clock
        names = "worker" + "s" * (len(others) > 1) + f" {', '.join(map(str, others))}"
        go = "go" if len(others) > 1 else "goes"
        _report(f"worker {worker} is gone in step {clock + 1}: {names} {go} on without it")

    def _handle(self, worker: int, message: Message) -> Message:
        handler = _HANDLERS.get(message.verb)
        if handler is None:
            raise CommError("an unknown request", given=f"verb {message.verb} of worker {worker}")
        return handler(self, worker, message)

    def _wait_for(self, find: Callable[[], T | None], limit_s: float = math.inf) -> T | None:
        """Wait until `find` returns a value; None if the job is over, or at the limit. Call it locked. Raises
        CommError if the worker that waits for the reply is gone."""
        until_s = time.monotonic() + limit_s
        while not self._is_over and time.monotonic() < until_s:
            found = find()
            if found is not None and found is not False:
                return found
            if not self._changed.wait(_NOTICE_S) and (pair := getattr(self._of_thread, "pair", None)):
                pair.check_is_open()
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
            )
        with self._changed:
            self._workers[worker] = _Worker(hello, self._num_processes)
            clock = 0
            if self.index == 0:
                if worker in self.clocks.workers:
                    raise CommError("a worker with this rank is present", given=f"worker {worker}")
                clock = self.clocks.add(worker)
                if self.clocks.counts.joined > self._num_workers:
                    _report(f"worker {worker} has joined in step {clock + 1}")
            self._changed.notify_all()
        return Message(Verb.HELLO, clock=clock)

    def _push(self, worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        numel = self.state.chunks[index].numel
        gradient = decode(message, numel, self._precision.master, self._reduce)
        self._workers[worker].staged[index] = gradient
        return Message(Verb.PUSH)

    def _commit(self, worker: int, message: Message) -> Message:
        with self._changed:
            self._check_clock(worker, message.clock)
            self.clocks.commit(worker, message.clock, tuple(message.json()))
            self._changed.notify_all()
            decision = self._wait_for(lambda: self.clocks.decision(worker, message.clock))
            if decision is None:
                return Message(Verb.OVER)
            content = {**asdict(decision), "unfinished": self._unfinished(), "squares": None}
            is_dropped = self._policy.sums and worker not in decision.workers
            is_late = is_dropped and self.clocks.is_finished(message.clock)
        if self._is_only and self._policy.sums and not is_late:  # it would be asked for the sum next
            content["squares"] = self.state.sum(decision.clock, decision.workers, self._gradient)
        return Message.of_json(Verb.COMMIT, content, value=int(is_late))

    def _unfinished(self) -> list[tuple[int, int, str]]:
        return [(*key, update) for key, update in self.clocks.unfinished().items()]

    def _sum(self, _worker: int, message: Message) -> Message:
        workers = _members(message.value)
        return Message.of_json(Verb.SUM, self.state.sum(message.clock, workers, self._gradient))

    def _apply(self, worker: int, message: Message) -> Message:
        workers = _members(message.value)
        if self.index == 0:
            with self._changed:
                self.clocks.begin(worker, message.clock, bytes(message.payload.numpy()).decode())
        done = self.state.apply(message.clock, workers, message.json(), self._gradient)
        return Message(Verb.APPLY, value=int(done))

    def _advance(self, worker: int, message: Message) -> Message:
        with self._changed:
            self._check_clock(worker, message.clock)
            clock = self.clocks.advance(worker, message.clock)
            self._ends.append((time.time(), worker, clock))
            self._changed.notify_all()
            if self._wait_for(lambda: self.clocks.may_read(worker)) is None:
                return Message(Verb.OVER)
        if message.count:
            self._pull(worker, message)
        return Message(Verb.ADVANCE, clock=clock)

    def _pull(self, worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        chunk, source = self.state.chunks[index], self._workers[worker]
        if source.memory is None:
            weights = self.state.read(index).to(self._precision.compute)
            return Message(Verb.PULL, payload=as_bytes(weights))
        for at in range(index, index + message.count):
            chunk = self.state.chunks[at]
            offset = source.offsets[chunk.unit][0] + chunk.start * self._precision.compute.itemsize
            self.state.read(at, source.memory.tensor(offset, chunk.numel, self._precision.compute))
        return Message(Verb.PULL)

    def _read(self, _worker: int, message: Message) -> Message:
        return Message(Verb.READ, payload=pack(self.state.read_state(self._check_chunk(message))))

    def _write(self, _worker: int, message: Message) -> Message:
        index = self._check_chunk(message)
        numel = self.state.chunks[index].numel
        tensors = unpack(message.payload, self.state.kinds, numel, self._precision.master)
        self.state.write_state(index, tensors)
        return Message(Verb.WRITE)

    def _ready(self, _worker: int, message: Message) -> Message:
        with self._changed:
            self.state.forget_updates()
            self.clocks.restart(message.clock)
            self._num_written = message.value
            self._changed.notify_all()
        return message

    def _wait_ready(self, worker: int, message: Message) -> Message:
        with self._changed:
            written = self._wait_for(lambda: self._num_written >= message.value)
            if written is None or self._wait_for(lambda: self.clocks.may_read(worker)) is None:
                return Message(Verb.OVER)
            return Message(Verb.WAIT_READY, clock=self.clocks.workers[worker].clock)

    def _hold(self, _worker: int, message: Message) -> Message:
        with self._changed:
            self.clocks.hold(bool(message.value))
            if message.value:
                self._wait_for(lambda: self.clocks.is_quiet or bool(self.clocks.unfinished()))
            self._changed.notify_all()
            return Message.of_json(Verb.HOLD, self._unfinished())

    def _finish(self, _worker: int, message: Message) -> Message:
        with self._changed:
            self.clocks.finish(message.worker, message.clock)
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
            pairs = [(worker, pair.received_bytes, pair.sent_bytes) for worker, pair in self._pairs]
            content = {**asdict(self.clocks.counts), "seconds": time.time(), "ends": ends, "pairs": pairs}
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


def _report(text: str) -> None:
    sys.stderr.write(f"plait: {text}\n")
    sys.stderr.flush()


def mask_of(workers: tuple[int, ...]) -> int:
    """Workers as the bits of an integer."""
    return sum(1 << worker for worker in workers)


def _members(mask: int) -> tuple[int, ...]:
    return tuple(worker for worker in range(mask.bit_length()) if mask >> worker & 1)


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
}
