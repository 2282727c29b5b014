"""How the ranks of a job find each other, in every order of their starts and deaths, and with limits."""

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from plait.comm import World, rendezvous
from plait.comm.rendezvous import JobProcess, Member, Rendezvous
from plait.comm.store import JobStore
from plait.errors import CommError
from plait.launchers import LAUNCHER_PID, RENDEZVOUS_FILE, start_time

LIMIT_S = 20.0

Start = Callable[[int], Future[JobProcess]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The name under which ranks meet, as `mpirun`'s."""
    monkeypatch.setenv(RENDEZVOUS_FILE, str(tmp_path / "ranks"))
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    monkeypatch.setattr(rendezvous, "_next_join", lambda _: 0)  # all ranks are of this process
    return tmp_path / "ranks"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a rank of two in a thread."""
    with ThreadPoolExecutor(4) as threads:
        yield lambda rank: threads.submit(lambda: Rendezvous(rank, 2, LIMIT_S).join())


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is the rank of an earlier start."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def member_of(process: subprocess.Popen[bytes]) -> Member:
    return replace(Member.this_process(), pid=process.pid, started=start_time(process.pid))


def invite(file: Path, first: Member) -> JobStore:
    """Write the invitation and the store of an earlier start."""
    path = rendezvous._store_file(file, first)
    store = JobStore(dist.FileStore(str(path), 2), 0, LIMIT_S)
    store.set("plait: prepared")
    store.set(rendezvous._key(0), json.dumps(asdict(first)))
    file.write_text(json.dumps(asdict(first)))
    return store


def check_new(ranks: list[Future[JobProcess]]) -> None:
    """Check that the ranks have a store in common which no start before has written to."""
    first, second = (rank.result(LIMIT_S) for rank in ranks)
    assert first.members == second.members
    assert first.store.get("plait: prepared") is None
    first.store.set("ours", "yes")
    assert second.store.get("ours") == "yes"
    for process in (first, second):
        process.store.close()


@pytest.mark.parametrize("was_complete", [False, True])
def test_ranks_meet_in_a_new_store_although_a_killed_start_has_left_its_own(
    file: Path, start: Start, other: subprocess.Popen[bytes], was_complete: bool
) -> None:
    first = member_of(other)
    old = invite(file, first)
    if was_complete:
        old.set(rendezvous._MEMBERS, json.dumps([asdict(first), asdict(first)]))
    old.close()
    other.kill()
    other.wait()
    second = start(1)
    time.sleep(0.3)
    assert not second.done(), "it has joined the killed start"
    check_new([start(0), second])
    assert not list(file.parent.glob(f"*{first.nonce}*"))


def test_a_rank_that_is_first_while_the_old_rank_0_runs_waits_for_the_new_one(
    file: Path, start: Start, other: subprocess.Popen[bytes]
) -> None:
    first = member_of(other)
    old = invite(file, first)
    old.set(rendezvous._MEMBERS, json.dumps([asdict(first), asdict(Member.this_process())]))
    second = start(1)
    time.sleep(0.3)
    assert not second.done(), "it has joined without being a member"
    check_new([start(0), second])
    old.close()


def test_ranks_meet_after_rank_0_has_died_between(
    file: Path, start: Start, other: subprocess.Popen[bytes]
) -> None:
    old = invite(file, member_of(other))
    second = start(1)
    while old.read(rendezvous._key(1)) is None:
        time.sleep(0.01)
    old.close()
    other.kill()
    other.wait()
    time.sleep(0.3)
    check_new([start(0), second])


def test_rank_0_waits_for_a_rank_that_runs(file: Path, start: Start, other: subprocess.Popen[bytes]) -> None:
    first = start(0)
    while rendezvous._invitation(file) is None:
        time.sleep(0.01)
    found = rendezvous._invitation(file)
    assert found is not None
    dead = member_of(other)
    other.kill()
    other.wait()
    path = rendezvous._store_file(file, found)
    store = JobStore(dist.FileStore(str(path), 2), 1, LIMIT_S)
    store.set(rendezvous._key(1), json.dumps(asdict(dead)))
    time.sleep(0.3)
    assert not first.done(), "it has begun with a rank that has died"
    check_new([first, start(1)])
    store.close()


def test_a_rank_leaves_the_store_of_a_rank_0_that_it_cannot_see_for_that_of_the_next(
    file: Path, start: Start
) -> None:
    first = replace(Member.this_process(), host="another host")
    old = invite(file, first)
    second = start(1)
    while old.read(rendezvous._key(1)) is None:
        time.sleep(0.01)
    old.close()
    begin_s = time.monotonic()
    check_new([start(0), second])
    assert time.monotonic() - begin_s < 5.0, "it has waited for a file that was removed"


def test_the_store_of_a_job_that_runs_under_the_same_name_remains(
    file: Path, start: Start, other: subprocess.Popen[bytes]
) -> None:
    running = invite(file, member_of(other))
    running.set("a save", "is complete")
    check_new([start(rank) for rank in (0, 1)])
    assert running.read("a save") == "is complete"
    running.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_that_fails_names_the_ranks_and_leaves_no_file(file: Path, rank: int) -> None:
    with pytest.raises(CommError) as raised:
        Rendezvous(rank, 2, 0.3).join()
    text = str(raised.value)
    assert ("no process runs of rank 1" if rank == 0 else "no process of rank 0 that runs") in text
    assert all(f"\n  {part}" in text for part in ("given", "expected", "try"))
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"[1]", b'{"host": 1}'])
def test_a_damaged_file_is_replaced_by_rank_0_and_waited_for_by_others_with_a_limit(
    file: Path, start: Start, content: bytes
) -> None:
    file.write_bytes(content)
    with pytest.raises(CommError, match="rendezvous of the ranks failed"):
        Rendezvous(1, 2, 0.2).join()
    check_new([start(rank) for rank in (0, 1)])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["a folder", "its folder does not exist"])
def test_a_file_that_cannot_be_is_an_error_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rank: int
) -> None:
    if kind == "a folder":
        file.mkdir()
    else:
        monkeypatch.setenv(RENDEZVOUS_FILE, str(file / "ranks"))
    begin_s = time.monotonic()
    with pytest.raises(CommError, match="rendezvous of the ranks failed") as raised:
        Rendezvous(rank, 2, LIMIT_S).join()
    assert kind in str(raised.value)
    assert time.monotonic() - begin_s < 2.0


def test_a_port_of_a_program_that_accepts_and_does_not_answer_is_an_error_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_MARGIN_S", 0.2)
    monkeypatch.delenv(RENDEZVOUS_FILE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as program:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(program.getsockname()[1]))
        begin_s = time.monotonic()
        with pytest.raises(CommError, match="rendezvous of the ranks failed") as raised:
            Rendezvous(1, 2, 1.0).join()
        assert time.monotonic() - begin_s < 4.0
        assert re.search(r"given   : rank 1 of 2 at 127.0.0.1:\d+: ", str(raised.value))
        assert "another MASTER_PORT" in str(raised.value)


def test_a_rank_that_another_job_at_the_address_does_not_know_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RENDEZVOUS_FILE, raising=False)
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    monkeypatch.setattr(rendezvous, "_next_join", lambda _: 0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    server = dist.TCPStore("127.0.0.1", port, None, True)
    key = f"attempt 0, join 0/{rendezvous._MEMBERS}"
    server.set(key, json.dumps([asdict(Member.this_process())] * 2))
    with pytest.raises(CommError, match="another job has begun at this address"):
        Rendezvous(1, 2, 10.0).join()


def test_a_world_among_servers_keeps_their_number_when_it_renews_connections() -> None:
    base = dist.HashStore()
    process = JobProcess(0, 3, base, JobStore(base, 0, LIMIT_S), LIMIT_S)
    world = World.of_process(process, None)
    world.was_interrupted = True
    world.renew_connections()
    assert world.num_processes == 3
    world.close()


def test_no_thread_of_a_rendezvous_remains(file: Path, start: Start) -> None:
    before = {*threading.enumerate()}  # one of another test may still be in torch's store
    check_new([start(rank) for rank in (0, 1)])
    added = {*threading.enumerate()} - before
    assert not [thread for thread in added if thread.name == "plait-rendezvous"]
    assert not [*file.parent.iterdir()]
