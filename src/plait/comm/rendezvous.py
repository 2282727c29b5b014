"""How the processes of a job find each other: a store of this start alone, and the list of its members.

[Note: one store for each start]
A launcher may start a job again after a kill -9, under the same file name: a loop in one `mpirun`. What the
killed start has left in its store must not be taken for the new one's. So rank 0 makes a new FileStore, and
renames a small file into place, the *invitation*, which has its process (id and start time) and a nonce: the
store's name has them too. Every rank writes its own process and nonce into the store. When all are there and
run, rank 0 writes the list of them, the *members*; a rank goes on only if it is one. The orders:
- An invitation of a killed start is there, and rank 1 is first: its rank 0 does not run. Rank 1 waits for
  another one. Where it cannot see that process (another host, or namespace of process ids, or no /proc), it
  waits for a list with itself, and meanwhile for another invitation.
- Rank 1 alone was killed, and is first while the old rank 0 still runs: the members of that store are
  complete without it. It waits for another invitation.
- Rank 0 dies before the list: the others notice, and wait for the next one. If it dies after the list, the
  job has begun, and communications find out. If it ends with an error, so do the others.
- Another rank dies before the list: rank 0 waits for a process of that rank that runs.
- No rank has members of two starts: a list is in one store, and a nonce is of one process.
- Another job runs under the same name: its invitation is gone, and its store stays, as its rank 0 runs.

torch blocks a reader of a FileStore that is removed. So a store is removed by its rank 0 if that fails, and
that of a killed start by the next rank 0, after the list: no member reads another store then.

With an address, the store is in the process of rank 0, or of torchrun, which numbers its starts; a rank that
is not one of the members then ends with an error. Ranks of `launch_local` have a folder of their own: one
that it has started again joins those that are there.

[Note: stores without a limit]
torch's stores wait without a limit for another program that accepts a connection and does not answer. So they
are made in a thread, and later calls go through `JobStore`.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from plait.comm.shm.rendezvous import host_identity
from plait.comm.store import JobStore
from plait.errors import CommError
from plait.fileio import read_json
from plait.launchers import (
    BEGUN,
    LAUNCHER_PID,
    RENDEZVOUS_FILE,
    adopt_ranks,
    has_ended,
    read_number,
    start_time,
)

RANK_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))

_POLL_S, _MAX_POLL_S = 0.002, 0.1
_MARGIN_S = 5.0  # from the limit of a store of torch to that of the thread which makes it
_GONE_S = 1.0  # limit of a wait for a file that was removed, while ranks meet
_MEMBERS = "plait: members"  # key of the list
_MAX_BYTES = 4096  # of an invitation
_MAX_SHOWN = 8  # ranks, in an error message
_NAME = r"([0-9a-f]{8})-(\d+)-(\d*)-[0-9a-f]{16}"  # of a process, in that of its store


@dataclass(frozen=True)
class Member:
    """A process of a job."""

    host: str  # with its namespaces: ids of processes are of those
    pid: int
    started: str
    nonce: str

    @classmethod
    def this_process(cls) -> "Member":
        return cls(host_identity(), os.getpid(), start_time(os.getpid()), secrets.token_hex(8))

    @property
    def name(self) -> str:
        return f"{hashlib.sha256(self.host.encode()).hexdigest()[:8]}-{self.pid}-{self.started}-{self.nonce}"

    def has_ended(self, host: str) -> bool:
        """Return whether it is known on this host to have ended: only of its own processes."""
        return self.host == host and has_ended(self.pid, self.started)


@dataclass(frozen=True)
class JobProcess:
    """This process among those of a job that share a store, and maybe nothing else."""

    rank: int
    size: int
    base: dist.Store  # torch's, whose calls may block
    store: JobStore
    timeout_s: float
    members: tuple[Member, ...] = ()
    ends_with_first: bool = False  # the job ends when the first one leaves

    @property
    def is_one_host(self) -> bool:
        """True if all processes can share memory."""
        return len({member.host for member in self.members}) == 1


class Rendezvous:
    """One attempt of this process to meet the others. See [Note: one store for each start]."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._timeout, self._until_s = datetime.timedelta(seconds=timeout_s), time.monotonic() + timeout_s
        self._me = Member.this_process()
        self._place = ""  # for errors
        self._seen: dict[int, Member] = {}  # on rank 0, by rank

    def join(self) -> JobProcess:
        """Return when all ranks are there. Raises CommError after `timeout_s` at most."""
        path = os.environ.get(RENDEZVOUS_FILE)
        if path is None:
            return self._join_by_address()
        number = _next_join(path)
        file = Path(f"{path}.{number}" if number else path)
        self._place = str(file)
        if file.is_dir() or not file.parent.is_dir():
            raise self._failed("a folder" if file.is_dir() else "its folder does not exist")
        try:
            return self._invite(file) if self._rank == 0 else self._follow(file)
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from error

    def _invite(self, file: Path) -> JobProcess:
        path, process = _store_file(file, self._me), None
        try:
            path.touch(0o600, exist_ok=False)
            invitation = path.with_suffix(".tmp")
            invitation.write_text(json.dumps(asdict(self._me)))
            invitation.replace(file)
            process = self._meet(lambda: dist.FileStore(str(path), self._size), _GONE_S)
            _remove_old_stores(file, self._me)
            return process
        finally:
            if LAUNCHER_PID not in os.environ and _invitation(file) == self._me:
                _unlink(file)
            if process is None:
                _unlink(path)

    def _follow(self, file: Path) -> JobProcess:
        refused: list[Member] = []
        while True:
            found = _invitation(file)
            if found is not None and found not in refused and not found.has_ended(self._me.host):
                process = self._accept(file, found)
                if process.members:
                    return process
                refused.append(found)
            self._pause(lambda: f"no process of rank 0 that runs has written {file}")

    def _accept(self, file: Path, found: Member) -> JobProcess:
        """Join the store of an invitation; no members: this process is none of them, or they never met."""
        path = str(_store_file(file, found))
        return self._meet(
            lambda: dist.FileStore(path, self._size),
            _GONE_S,
            lambda: _invitation(file) != found or found.has_ended(self._me.host),
        )

    def _join_by_address(self) -> JobProcess:
        self._place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        # torchrun may restart the ranks on the same store, and they may join again.
        attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefix = f"{attempt}, join {_next_join(attempt)}"

        def rendezvous() -> dist.Store:
            found = dist.rendezvous("env://", self._rank, self._size, timeout=self._timeout)
            store, _, _ = next(iter(found))
            return dist.PrefixStore(prefix, store)

        process = self._meet(rendezvous, self._timeout_s)
        if not process.members:
            raise CommError(
                "another job has begun at this address",
                given=f"rank {self._rank} of {self._size} at {self._place}",
                expected="an address of this job alone, and all of its ranks started together",
                hint="another MASTER_PORT, or the same when that job has ended",
            )
        return process

    def _meet(
        self, make: Callable[[], dist.Store], limit_s: float, is_stale: Callable[[], bool] = lambda: False
    ) -> JobProcess:
        """Open a store and wait for the members. `limit_s`: of torch's waits meanwhile."""
        base = self._open(make)
        base.set_timeout(datetime.timedelta(seconds=limit_s))
        clients = {*range(1, self._size)} if self._rank == 0 and not has_outer_store() else ()
        store = JobStore(base, self._rank, self._timeout_s, clients)
        members: tuple[Member, ...] = ()
        try:
            members = self._await_members(store, is_stale)
        finally:
            if not members:
                store.close()
        base.set_timeout(self._timeout)
        return JobProcess(self._rank, self._size, base, store, self._timeout_s, members)

    def _open(self, make: Callable[[], dist.Store]) -> dist.Store:
        """See [Note: stores without a limit]."""
        reply: Future[dist.Store] = Future()

        def run() -> None:
            try:
                reply.set_result(make())
            except BaseException as error:
                reply.set_exception(error)

        threading.Thread(target=run, name="plait-rendezvous", daemon=True).start()
        left_s = max(0.0, self._until_s - time.monotonic())
        try:
            return reply.result(left_s + _MARGIN_S)
        except TimeoutError as error:
            raise self._failed(f"no answer within {self._timeout_s:g} s") from error
        except (RuntimeError, ValueError) as error:
            raise self._failed(str(error).splitlines()[0][:160]) from error

    def _await_members(self, store: JobStore, is_stale: Callable[[], bool]) -> tuple[Member, ...]:
        """Return the members; none if this process is not one of them, or if there will be none."""
        store.set(_key(self._rank), json.dumps(asdict(self._me)))
        while True:
            stale = is_stale()  # before the list is read: after that, rank 0 removes the invitation
            if self._rank == 0:
                self._collect(store)
            if (text := store.get(_MEMBERS)) is not None:
                members = tuple(Member(**values) for values in json.loads(text))
                return members if self._me in members or LAUNCHER_PID in os.environ else ()
            if stale:
                return ()
            self._pause(self._why)

    def _collect(self, store: JobStore) -> None:
        """On rank 0, write the list when the processes of all ranks run."""
        for rank in self._missing():
            if (text := store.read(_key(rank))) is not None:
                self._seen[rank] = Member(**json.loads(text))
        if not self._missing():
            store.set(_MEMBERS, json.dumps([asdict(self._seen[rank]) for rank in range(self._size)]))

    def _missing(self) -> list[int]:
        seen, host = self._seen, self._me.host
        return [rank for rank in range(self._size) if rank not in seen or seen[rank].has_ended(host)]

    def _why(self) -> str:
        if self._rank:
            return "not all ranks are there"
        missing = self._missing()
        return f"no process runs of rank {', '.join(map(str, missing[:_MAX_SHOWN]))}"

    def _pause(self, fact: Callable[[], str]) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s < 0:
            raise self._failed(f"{fact()}, within {self._timeout_s:g} s")
        time.sleep(min(max(_POLL_S, (self._timeout_s - left_s) / 50), _MAX_POLL_S))

    def _failed(self, fact: str) -> CommError:
        in_use = "EADDRINUSE" in fact or "address already in use" in fact
        hint = "look for the first rank that ended; then another MASTER_PORT, or TMPDIR"
        return CommError(
            "the rendezvous port is in use" if in_use else "rendezvous of the ranks failed",
            given=f"rank {self._rank} of {self._size} at {self._place}: {fact}",
            expected="all ranks started together, and a "
            + ("free port" if in_use else "place that all reach"),
            hint="another --master-port" if in_use else hint,
        )


_job: tuple[object, JobProcess] | None = None  # of this process, with what announced it


def join_store(timeout_s: float = 600.0, *, ends_with_first: bool = False) -> JobProcess:
    """Join the processes that torchrun or our launcher announced in the environment, without connecting them
    to each other. Waits until all have joined. A second call returns the same. Raises CommError."""
    global _job
    adopt_ranks()
    rank, size = (read_number(os.environ, *variable) for variable in RANK_VARIABLES[:2])
    announced = (rank, size, os.environ.get(RENDEZVOUS_FILE))
    if _job is None or _job[0] != announced:
        if size == 1:
            raise CommError(
                "parameter servers need several processes",
                given="one process",
                expected="a process for each worker and server",
                hint="torchrun, or plait train",
            )
        process = Rendezvous(rank, size, timeout_s).join()
        _job = (announced, replace(process, ends_with_first=ends_with_first))
    return _job[1]


def present_members(store: JobStore, size: int) -> dict[int, Member]:
    """Return the processes by rank, also one that was started again. Raises CommError."""
    texts = {rank: store.read(_key(rank)) for rank in range(size)}
    return {rank: Member(**json.loads(text)) for rank, text in texts.items() if text is not None}


def announce_begin() -> None:
    """Show to `launch_local` that all processes have joined a job, which may go on without some from now."""
    if {LAUNCHER_PID, RENDEZVOUS_FILE} <= os.environ.keys():
        with contextlib.suppress(OSError):  # its directory is gone with the launcher
            Path(os.environ[RENDEZVOUS_FILE] + BEGUN).touch()


def leave_store() -> None:
    """End what `join_store` began; the next call joins again."""
    global _job
    if _job is not None:
        _job[1].store.close()
    _job = None


_num_joins = Counter[str]()  # of this process, by rendezvous file or attempt


def _next_join(rendezvous: str) -> int:
    """Return how often this process has joined there before."""
    _num_joins[rendezvous] += 1
    return _num_joins[rendezvous] - 1


def has_outer_store() -> bool:
    """Return whether the store is a file or in torchrun's process, and not in that of rank 0."""
    return RENDEZVOUS_FILE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _invitation(file: Path) -> Member | None:
    """Return what rank 0 has written; None if there is no such file, or another one."""
    try:
        member = Member(**read_json(file, _MAX_BYTES))
        return member if re.fullmatch(_NAME, member.name) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _store_file(file: Path, first: Member) -> Path:
    return file.with_name(f"{file.name}.{first.name}.store")


def _remove_old_stores(file: Path, me: Member) -> None:
    """Remove what starts under this name have left whose rank 0 has ended, on this host."""
    name = re.compile(rf"{re.escape(file.name)}(?:\.\d+)?\.{_NAME}\.(?:store|tmp)")
    for path in file.parent.glob("*"):
        old = name.fullmatch(path.name)
        if old and me.name.startswith(f"{old[1]}-") and has_ended(int(old[2]), old[3]):
            _unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _key(rank: int) -> str:
    return f"plait: process of rank {rank}"
