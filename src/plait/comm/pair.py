"""A connection of two processes: messages with a small fixed header, over TCP.

[Note: one connection for each pair]
A worker that dies breaks only its connections with the servers, and one that joins makes new ones: neither
affects other pairs. Each side makes one request at a time, so that a pair needs no tags. Connections are made
through the job's store; payloads are JSON texts or the bytes of tensors, and nothing is unpickled.

[Note: sockets instead of a Gloo group of two]
A request is one small message each way, and the processes of one host take turns on its cores. Gloo's send
and receive each wake a thread of Gloo, which then wakes the caller; the kernel wakes a thread that reads a
socket itself. Header and small payloads are one write.
"""

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import CommError

_HEADER = struct.Struct("<8q")
_CONNECT_S = 30.0
_POLL_S = 0.01
_JOINED_BYTES = 2**16  # payloads up to here are copied, to be one write with the header
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
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


def _memory(payload: Tensor) -> memoryview:
    array: Any = payload.numpy()
    return memoryview(array)


class Pair:
    """This process's side of a connection of two. Methods raise CommError if the other side is gone."""

    def __init__(self, store: dist.Store, name: str, side: int, timeout_s: float) -> None:
        """Both sides call it, with the same unused name. `timeout_s`: limit of waiting for a message."""
        self._name = name
        self.sent_bytes = self.received_bytes = 0
        try:
            self._socket = (_connect if side else _accept)(store, name)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_waits(timeout_s)

    def limit_waits(self, timeout_s: float) -> None:
        """Set the limit of waiting for a message."""
        self._socket.settimeout(timeout_s)

    def send(self, message: Message) -> None:
        content = _memory(message.payload)
        header = _HEADER.pack(
            _MAGIC << 16 | message.verb,
            message.worker,
            message.clock,
            message.first,
            message.count,
            message.value,
            content.nbytes,
            zlib.crc32(content),
        )
        try:
            if content.nbytes <= _JOINED_BYTES:
                self._socket.sendall(b"".join([header, content]))
            else:
                self._socket.sendall(header)
                self._socket.sendall(content)
        except OSError as error:
            raise self._lost(error) from error
        self.sent_bytes += len(header) + content.nbytes

    def receive(self) -> Message:
        """Wait for a message. Raises CommError also for one that is damaged."""
        header = bytearray(_HEADER.size)
        try:
            self._receive_into(memoryview(header))
            first, *numbers, num_bytes, crc = _HEADER.unpack(header)
            self._check(first >> 16 == _MAGIC, "its header is not one of plait's")
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            content = _memory(payload)
            self._receive_into(content)
        except OSError as error:
            raise self._lost(error) from error
        self.received_bytes += len(header) + num_bytes
        self._check(zlib.crc32(content) == crc, "its checksum is wrong")
        worker, clock, first_chunk, count, value = numbers
        return Message(first & 0xFFFF, worker, clock, first_chunk, count, value, payload)

    def check_is_open(self) -> None:
        """Raise CommError if the other side, which waits for a reply, is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            if poll.poll(0) and not self._socket.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the other side has closed it")
        except OSError as error:
            raise self._lost(error) from error

    def _receive_into(self, memory: memoryview) -> None:
        at = 0
        while at < memory.nbytes:
            received = self._socket.recv_into(memory[at:])
            if not received:
                raise ConnectionError("the other side has closed it")
            at += received

    def request(self, message: Message) -> Message:
        """Send a message and wait for the reply."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """End the connection; a wait for a message of it raises, also on the other side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _check(self, is_sound: bool, fact: str) -> None:
        if not is_sound:
            raise CommError("a message is damaged", given=f"{self._name}: {fact}")

    def _lost(self, error: Exception) -> CommError:
        return CommError(f"the connection {self._name} is lost", given=str(error).split("\n")[0][:160])


def _accept(store: dist.Store, name: str) -> socket.socket:
    """The next connection that sends the token in the store."""
    until_s = time.monotonic() + _CONNECT_S
    host, token = _own_address(), secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1) as server:
        store.set(name, json.dumps([host, server.getsockname()[1], token.hex()]))
        while True:
            server.settimeout(max(until_s - time.monotonic(), 1e-3))
            connection = server.accept()[0]
            connection.settimeout(_CONNECT_S)
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                return connection
            connection.close()


def _connect(store: dist.Store, name: str) -> socket.socket:
    store.wait([name], datetime.timedelta(seconds=_CONNECT_S))
    host, port, token = json.loads(store.get(name))
    connection = socket.create_connection((host, port), _CONNECT_S)
    connection.sendall(bytes.fromhex(token))
    return connection


def _own_address() -> str:
    """The address at which other processes of the job reach this one: of the interface that is set for Gloo,
    or of the one on the way to rank 0's host."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class Meeting:
    """The place in the job's store where its processes connect with one server, or with its replica."""

    def __init__(
        self, store: dist.Store, server: int, *, is_replica: bool = False, clones: bool = False
    ) -> None:
        """`clones`: use another connection with the store, for a thread: a wait for a key blocks others."""
        source: Any = store
        self._store = dist.PrefixStore(f"server {server}", source.clone() if clones else store)
        self._role = "replica" if is_replica else "server"
        self.num_joined = 0

    def claim(self) -> bool:
        """Let one of a server and its replica, which have lost each other, go on alone: the first that calls
        it. Return whether it is this one."""
        store: Any = self._store
        return bool(store.compare_set("claim", "", self._role) == self._role.encode())

    def is_lost(self) -> bool:
        """Return whether the other one of a server and its replica goes on alone."""
        return self._store.check(["claim"]) and self._store.get("claim") != self._role.encode()

    def connect(self, worker: int, timeout_s: float) -> Pair:
        """Connect a worker. Raises CommError."""
        number = self._store.add(f"{self._role} joins", 1) - 1
        self._store.set(f"{self._role} join {number}", str(worker))
        name, until_s = self._name(number, worker), time.monotonic() + _CONNECT_S
        while not self._store.check([name]) and time.monotonic() < until_s:
            if self.is_lost():
                raise CommError(f"the {self._role} of the connection {name} has died")
            time.sleep(_POLL_S)
        return Pair(self._store, name, 1, timeout_s)

    def accept(self, timeout_s: float) -> tuple[int, Pair] | None:
        """On the server, return the next worker and its connection; None if none is waiting. Raises CommError
        if the worker died meanwhile."""
        number = self.num_joined
        if not self._store.check([f"{self._role} join {number}"]):
            return None
        self.num_joined += 1
        worker = int(self._store.get(f"{self._role} join {number}").decode())
        return worker, Pair(self._store, self._name(number, worker), 0, timeout_s)

    def _name(self, number: int, worker: int) -> str:
        return f"pair {number} of worker {worker}" + " with the replica" * (self._role == "replica")
