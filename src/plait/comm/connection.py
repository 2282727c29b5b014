"""A connection of two processes: messages with a small fixed header, over TCP.

[Note: one connection for each pair]
A worker that dies breaks only its connections with the servers, and one that joins makes new ones: neither
affects other pairs. Each side makes one request at a time, so that a pair needs no tags. Connections are made
through the job's store; payloads are JSON texts or the bytes of tensors, and nothing is unpickled.

[Note: sockets instead of a Gloo group of two]
A request is one small message each way, and the processes of one host take turns on its cores. Gloo's send
and receive each wake a thread of Gloo, which then wakes the caller; the kernel wakes a thread that reads a
socket itself. Header and small payloads are one write.

[Note: strangers at the port]
Any program that reaches the port may connect while a worker is expected. The worker is the connection that
sends the token in the job's store. All connections are read as their bytes come, and only some are kept: one
that is reset, silent or wrong keeps no other one waiting.
"""

import contextlib
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
from torch import Tensor

from plait.comm.objects import decode_text, encode_text
from plait.comm.store import JobStore
from plait.errors import CommError

_HEADER = struct.Struct("<8q")
_CONNECT_S = 30.0
_TOKEN_S = 5.0  # from a connection to its token
_MAX_CANDIDATES = 64  # connections without a token
_POLL_S = 0.01
_JOINED_BYTES = 2**16  # payloads up to here are copied, to be one write with the header
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_MAGIC = 0x706C6169  # of the header's first number, with the verb
_MAX_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of a payload: this host's memory


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
        return cls(verb, payload=encode_text(json.dumps(content)), **numbers)

    def json(self) -> Any:
        """The payload's JSON."""
        return json.loads(decode_text(self.payload))


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous flat tensor as bytes."""
    return tensor.detach().view(torch.uint8)


def _memory(payload: Tensor) -> memoryview:
    array: Any = payload.numpy()
    return memoryview(array)


class Connection:
    """This process's side of a connection of two. Methods raise CommError if the other side is gone."""

    def __init__(self, store: JobStore, name: str, side: int, timeout_s: float) -> None:
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
            self._check(0 <= num_bytes <= _MAX_BYTES, f"a length of {num_bytes} bytes")
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


class _Candidates:
    """Connections with a server's port that have not sent the token. See [Note: strangers at the port]."""

    def __init__(self, server: socket.socket, token: bytes) -> None:
        self._server = server
        self._token = token
        self._sent: dict[socket.socket, tuple[float, bytes]] = {}  # since when, and its bytes so far
        self._poll = select.poll()
        self._poll.register(server, select.POLLIN)

    def find(self, wait_s: float) -> socket.socket | None:
        """Wait for events; return a connection that has sent the token."""
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * wait_s)}
        for connection in [each for each in self._sent if each.fileno() in ready]:
            since_s, sent = self._sent[connection]
            with contextlib.suppress(OSError):  # it was reset
                sent += (more := connection.recv(len(self._token) - len(sent)))
                if secrets.compare_digest(sent, self._token):
                    self._forget(connection)
                    return connection
                if more and len(sent) < len(self._token):
                    self._sent[connection] = since_s, sent
                    continue
            self._forget(connection).close()
        if self._server.fileno() in ready:
            with contextlib.suppress(OSError):  # it has gone again
                self._add(self._server.accept()[0])
        return None

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._poll.register(connection, select.POLLIN)
        self._sent[connection] = time.monotonic(), b""
        oldest_s = time.monotonic() - _TOKEN_S
        surplus = len(self._sent) - _MAX_CANDIDATES
        for number, (candidate, (since_s, _)) in enumerate([*self._sent.items()]):
            if since_s < oldest_s or number < surplus:
                self._forget(candidate).close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._poll.unregister(connection)
        del self._sent[connection]
        return connection

    def close(self) -> None:
        for connection in [*self._sent]:
            self._forget(connection).close()


def _accept(store: JobStore, name: str) -> socket.socket:
    """Return the first connection that sends the token in the store."""
    until_s = time.monotonic() + _CONNECT_S
    host, token = _own_address(), secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family, backlog=_MAX_CANDIDATES) as server,
        contextlib.closing(_Candidates(server, token)) as candidates,
    ):
        server.setblocking(False)
        store.set(name, json.dumps([host, server.getsockname()[1], token.hex()]))
        while (left_s := until_s - time.monotonic()) > 0:
            if (found := candidates.find(left_s)) is not None:
                return found
    raise TimeoutError("the worker has not connected")


def _connect(store: JobStore, name: str) -> socket.socket:
    until_s = time.monotonic() + _CONNECT_S
    while (text := store.get(name)) is None:
        if time.monotonic() > until_s:
            raise TimeoutError("the other side is not there")
        time.sleep(_POLL_S)
    host, port, token = json.loads(text)
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


class ServerAddress:
    """The place in the job's store where its processes connect with one server, or with its replica."""

    def __init__(self, store: JobStore, server: int, *, is_replica: bool = False) -> None:
        self._store = store
        self._server = server
        self._role = "replica" if is_replica else "server"
        self._claim = f"server {server}/claim"
        self.num_joined = 0

    def claim(self) -> bool:
        """Let one of a server and its replica, which have lost each other, go on alone: the first that calls
        it. Return whether it is this one."""
        return self._store.claim(self._claim, self._role)

    def is_lost(self) -> bool:
        """Return whether the other one of a server and its replica goes on alone."""
        return self._store.get(self._claim) not in (None, self._role)

    def connect(self, worker: int, timeout_s: float) -> Connection:
        """Connect a worker. Raises CommError."""
        number = self._store.count(f"server {self._server}/{self._role} joins")
        self._store.set(self._join(number), str(worker))
        name, until_s = self._name(number, worker), time.monotonic() + _CONNECT_S
        while self._store.get(name) is None and time.monotonic() < until_s:
            if self.is_lost():
                raise CommError(f"the {self._role} of the connection {name} has died")
            time.sleep(_POLL_S)
        return Connection(self._store, name, 1, timeout_s)

    def accept(self, timeout_s: float) -> tuple[int, Connection] | None:
        """On the server, return the next worker and its connection; None if none is waiting. Raises CommError
        if the worker died meanwhile."""
        number = self.num_joined
        worker = self._store.get(self._join(number))
        if worker is None:
            return None
        self.num_joined += 1
        return int(worker), Connection(self._store, self._name(number, int(worker)), 0, timeout_s)

    def _join(self, number: int) -> str:
        return f"server {self._server}/{self._role} join {number}"

    def _name(self, number: int, worker: int) -> str:
        name = f"server {self._server}/pair {number} of worker {worker}"
        return name + " with the replica" * (self._role == "replica")
