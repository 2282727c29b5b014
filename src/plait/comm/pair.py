"""A connection of two processes: messages with a small fixed header, over a Gloo group of two.

[Note: one group for each pair]
A worker that dies breaks only its connections with the servers, and one that joins makes new ones: neither
affects other pairs. Each side makes one request at a time, so that a pair needs no tags. Connections are made
through the job's store; payloads are JSON texts or the bytes of tensors, and nothing is unpickled.
"""

import contextlib
import datetime
import json
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import CommError

_FIELDS = 8
_CONNECT_S = 30.0
_MAGIC = 0x706C6169  # of the header's first number, with the verb


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Message:
    """One message. Integers are those of the header; see `server/protocol.py` for their use."""

    verb: int
    worker: int = 0
    clock: int = 0
    first: int = 0  # chunk
    count: int = 0  # of chunks
    value: int = 0
    payload: Tensor = _NO_BYTES

    @classmethod
    def of_json(cls, verb: int, content: object, **numbers: int) -> "Message":
        """A message whose payload is JSON."""
        text = json.dumps(content).encode()
        return cls(verb, payload=torch.frombuffer(bytearray(text), dtype=torch.uint8), **numbers)

    def json(self) -> Any:
        """The payload's JSON."""
        return json.loads(bytes(self.payload.numpy()).decode())


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous flat tensor as bytes."""
    return tensor.detach().view(torch.uint8)


def _checksum(payload: Tensor) -> int:
    content: Any = payload.numpy()
    return zlib.crc32(content)


class Pair:
    """This process's side of a connection of two. Methods raise CommError if the other side is gone."""

    def __init__(self, store: dist.Store, name: str, side: int, timeout_s: float) -> None:
        """Both sides call it, with the same unused name. `timeout_s`: limit of waiting for a message."""
        self._other = 1 - side
        self._name = name
        try:
            self._group: Any = dist.ProcessGroupGloo(
                dist.PrefixStore(name, store), side, 2, datetime.timedelta(seconds=_CONNECT_S)
            )
        except RuntimeError as error:
            raise self._lost(error) from error
        self.limit_waits(timeout_s)

    def limit_waits(self, timeout_s: float) -> None:
        """Set the limit of waiting for a message. The group's own stays that of connecting, whatever its
        `set_timeout` is given."""
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def send(self, message: Message) -> None:
        header = torch.tensor(
            [
                _MAGIC << 16 | message.verb,
                message.worker,
                message.clock,
                message.first,
                message.count,
                message.value,
                message.payload.numel(),
                _checksum(message.payload),
            ]
        )
        try:
            self._group.send([header], self._other, 0).wait(self._timeout)
            if message.payload.numel():
                self._group.send([message.payload], self._other, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self) -> Message:
        """Wait for a message. Raises CommError also for one that is damaged."""
        header = torch.empty(_FIELDS, dtype=torch.int64)
        try:
            self._group.recv([header], self._other, 0).wait(self._timeout)
            first, *numbers, num_bytes, crc = header.tolist()
            self._check(first >> 16 == _MAGIC, "its header is not one of plait's")
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes:
                self._group.recv([payload], self._other, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._check(_checksum(payload) == crc, "its checksum is wrong")
        worker, clock, first_chunk, count, value = numbers
        return Message(first & 0xFFFF, worker, clock, first_chunk, count, value, payload)

    def request(self, message: Message) -> Message:
        """Send a message and wait for the reply."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """End the connection; a wait for a message of it raises, also on the other side."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _check(self, is_sound: bool, fact: str) -> None:
        if not is_sound:
            raise CommError("a message is damaged", given=f"{self._name}: {fact}")

    def _lost(self, error: RuntimeError) -> CommError:
        return CommError(f"the connection {self._name} is lost", given=str(error).splitlines()[0][:160])


class Meeting:
    """The place in the job's store where its processes connect with one server."""

    def __init__(self, store: dist.Store, server: int, *, clones: bool = False) -> None:
        """`clones`: use another connection with the store, for a thread: a wait for a key blocks others."""
        source: Any = store
        self._store = dist.PrefixStore(f"server {server}", source.clone() if clones else store)
        self.num_joined = 0

    def connect(self, worker: int, timeout_s: float) -> Pair:
        """Connect a worker. Raises CommError."""
        number = self._store.add("joins", 1) - 1
        self._store.set(f"join {number}", str(worker))
        return Pair(self._store, f"pair {number} of worker {worker}", 1, timeout_s)

    def accept(self, timeout_s: float) -> tuple[int, Pair] | None:
        """On the server, return the next worker and its connection; None if none is waiting. Raises CommError
        if the worker died meanwhile."""
        if not self._store.check([f"join {self.num_joined}"]):
            return None
        number, self.num_joined = self.num_joined, self.num_joined + 1
        worker = int(self._store.get(f"join {number}").decode())
        return worker, Pair(self._store, f"pair {number} of worker {worker}", 0, timeout_s)
