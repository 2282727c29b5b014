"""Requests that a parameter server refuses, and what they leave unchanged; waits for messages."""

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.comm import connection
from plait.comm.connection import Connection, Message, ServerAddress, as_bytes
from plait.comm.store import JobStore
from plait.engine.spec import Arguments, validate
from plait.errors import PlaitError
from plait.server.job import chunk_table
from plait.server.protocol import Verb
from plait.server.server import Server


def joined(sync: str = "all") -> Server:
    """A server with one worker, which has read."""
    arguments = Arguments(nn.Linear(8, 8), f"dp=1 servers=1 sync={sync}", optimizer=torch.optim.SGD)
    spec = validate(arguments)
    table = chunk_table(nn.Linear(8, 8), spec)
    server = Server(0, spec, table)
    hello = {"digest": table.digest, "memory": None, "offsets": None}
    server._handle(0, Message.of_json(Verb.HELLO, hello))
    server._handle(0, Message(Verb.READY, clock=3, value=1))
    return server


def push(server: Server, clock: int) -> None:
    for index, chunk in enumerate(server.state.chunks):
        gradient = torch.ones(chunk.numel)
        server._handle(0, Message(Verb.PUSH, clock=clock, first=index, payload=as_bytes(gradient)))
    server._handle(0, Message.of_json(Verb.COMMIT, [1.0, 1.0, 1.0], clock=clock))


def update(clock: int) -> Message:
    return Message.of_json(Verb.APPLY, {"factor": 1.0, "options": {}}, clock=clock, value=1)


def assert_one_step(server: Server, before: list[torch.Tensor]) -> None:
    """One step of SGD, with a learning rate of 0.001 and gradients of 1."""
    for index, weights in enumerate(before):
        assert torch.equal(server.state.read(index), weights - 1e-3)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message(99), "an unknown request"),
        (Message(Verb.PULL, first=1000), "a chunk of another server"),
        (Message(Verb.PUSH, payload=torch.zeros(7, dtype=torch.uint8)), "a gradient of another shape"),
        (Message.of_json(Verb.COMMIT, [0.0, 0.0, 0.0], clock=2), "another clock"),
        (Message.of_json(Verb.HELLO, {"digest": "?", "memory": None, "offsets": None}), "another model"),
        (update(3), "has pushed no gradient"),
    ],
)
def test_a_request_that_is_wrong_is_refused_and_changes_nothing(message: Message, text: str) -> None:
    server = joined()
    before = [server.state.read(index) for index in range(len(server.state.chunks))]
    with pytest.raises(PlaitError, match=text):
        server._handle(0, message)
    push(server, 3)
    assert server._handle(0, update(3)).value == 1
    assert_one_step(server, before)


def test_an_update_that_is_sent_twice_is_applied_once() -> None:
    server = joined()
    before = [server.state.read(index) for index in range(len(server.state.chunks))]
    push(server, 3)
    assert [server._handle(0, update(3)).value for _ in range(2)] == [1, 0]
    assert_one_step(server, before)


@pytest.mark.parametrize("replica_is_first", [False, True])
def test_one_of_a_server_and_its_replica_that_have_lost_each_other_goes_on(replica_is_first: bool) -> None:
    store = dist.HashStore()
    both = [
        ServerAddress(JobStore(store, rank, 60.0), 3, is_replica=is_replica)
        for rank, is_replica in enumerate((replica_is_first, not replica_is_first))
    ]
    assert not any(address.is_lost() for address in both)
    assert [address.claim() for address in both] == [True, False]
    assert [address.is_lost() for address in both] == [False, True]


@pytest.mark.parametrize(("limit_s", "is_lost"), [(60.0, False), (0.3, True)])
def test_a_message_may_come_later_than_a_connection_has_to(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, is_lost: bool
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_S", 1.0)
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(Connection, store, "pair", 0, 60.0)
        worker = Connection(store, "pair", 1, limit_s)
        other.submit(lambda: (server.result().receive(), time.sleep(1.5), server.result().send(Message(2))))
        if is_lost:
            with pytest.raises(PlaitError, match="is lost"):
                worker.request(Message(1))
        else:
            assert worker.request(Message(1)).verb == 2
        worker.close()
        server.result().close()


STRANGERS = {
    "reset": lambda stranger, _: stranger.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    ),
    "silent": lambda *_: None,
    "wrong": lambda stranger, _: stranger.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "half": lambda stranger, token: stranger.sendall(token[:7]),
}


@pytest.mark.parametrize("kind", [*STRANGERS, "many"])
def test_strangers_at_a_servers_port_keep_no_worker_waiting(kind: str) -> None:
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(Connection, store, "pair", 0, 60.0)
        while (text := store.get("pair")) is None:
            time.sleep(0.01)
        host, port, token = json.loads(text)
        strangers = []
        for _ in range(100 if kind == "many" else 1):
            strangers.append(socket.create_connection((host, port), 5.0))
            STRANGERS.get(kind, lambda *_: None)(strangers[-1], bytes.fromhex(token))
            if kind == "reset":
                strangers.pop().close()
        begin_s = time.monotonic()
        worker = Connection(store, "pair", 1, 60.0)
        answer = other.submit(lambda: server.result().send(server.result().receive()))
        assert worker.request(Message(7)).verb == 7
        answer.result()
        assert time.monotonic() - begin_s < 3.0
        for connection in (worker, server.result(), *strangers):
            connection.close()
    store.close()


def test_a_token_that_comes_in_two_parts_is_one() -> None:
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(Connection, store, "pair", 0, 60.0)
        while (text := store.get("pair")) is None:
            time.sleep(0.01)
        host, port, token = json.loads(text)
        with socket.create_connection((host, port), 5.0) as worker:
            worker.sendall(bytes.fromhex(token)[:7])
            time.sleep(0.2)
            worker.sendall(bytes.fromhex(token)[7:])
            server.result(5.0).close()
    store.close()


@pytest.mark.parametrize("num_bytes", [-5, 2**40, 2**62])
def test_a_length_that_no_message_has_is_an_error(num_bytes: int) -> None:
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(Connection, store, "pair", 0, 60.0)
        worker = Connection(store, "pair", 1, 60.0)
        header = connection._HEADER.pack(connection._MAGIC << 16 | 1, 0, 0, 0, 0, 0, num_bytes, 0)
        worker._socket.sendall(header)
        with pytest.raises(PlaitError, match="a message is damaged"):
            server.result().receive()
        worker.close()
        server.result().close()
    store.close()
