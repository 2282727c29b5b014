"""Requests that a parameter server refuses, and what they leave unchanged; waits for messages."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.comm import pair
from plait.comm.pair import Meeting, Message, Pair, as_bytes
from plait.comm.store import JobStore
from plait.engine.spec import validate
from plait.errors import PlaitError
from plait.plan import Plan
from plait.server.job import chunk_table
from plait.server.protocol import Verb
from plait.server.server import Server


def joined(sync: str = "all") -> Server:
    """A server with one worker, which has read."""
    spec = validate(nn.Linear(8, 8), Plan.parse(f"dp=1 servers=1 sync={sync}"), optimizer=torch.optim.SGD)
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
    assert server.state.versions == [1] * len(before)


def test_an_update_that_is_sent_twice_is_applied_once() -> None:
    server = joined()
    push(server, 3)
    assert [server._handle(0, update(3)).value for _ in range(2)] == [1, 0]
    assert server.state.versions == [1] * len(server.state.chunks)


@pytest.mark.parametrize("replica_is_first", [False, True])
def test_one_of_a_server_and_its_replica_that_have_lost_each_other_goes_on(replica_is_first: bool) -> None:
    store = dist.HashStore()
    both = [
        Meeting(JobStore(store, rank, 60.0), 3, is_replica=is_replica)
        for rank, is_replica in enumerate((replica_is_first, not replica_is_first))
    ]
    assert not any(meeting.is_lost() for meeting in both)
    assert [meeting.claim() for meeting in both] == [True, False]
    assert [meeting.is_lost() for meeting in both] == [False, True]


@pytest.mark.parametrize(("limit_s", "is_lost"), [(60.0, False), (0.3, True)])
def test_a_message_may_come_later_than_a_connection_has_to(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, is_lost: bool
) -> None:
    monkeypatch.setattr(pair, "_CONNECT_S", 1.0)
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(Pair, store, "pair", 0, 60.0)
        worker = Pair(store, "pair", 1, limit_s)
        other.submit(lambda: (server.result().receive(), time.sleep(1.5), server.result().send(Message(2))))
        if is_lost:
            with pytest.raises(PlaitError, match="is lost"):
                worker.request(Message(1))
        else:
            assert worker.request(Message(1)).verb == 2
        worker.close()
        server.result().close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ThreadPoolExecutor, JobStore, tuple[str, int], bytes]]:
    """A server's side of a connection that is being made: threads, store, address and token."""
    monkeypatch.setattr(pair, "_CONNECT_S", 10.0)
    store = JobStore(dist.HashStore(), 0, 60.0)
    with ThreadPoolExecutor(2) as threads:
        threads.submit(Pair, store, "pair", 0, 10.0)
        while (text := store.get("pair")) is None:
            time.sleep(0.01)
        host, number, token = json.loads(text)
        yield threads, store, (host, number), bytes.fromhex(token)
    store.close()
