"""Worker processes that read and tokenize.

[Note: worker processes]  Workers are forked by a fork server, not by this process: it has the threads of
torch, of the process group and perhaps of CUDA, whose locks a fork would copy locked. The server imports this
package once; each worker is a cheap fork of it. All end when this process does, in any way.

[Note: signals to a process group]  torchrun, a terminal and job queues send SIGTERM or SIGINT to all
processes of a rank. The rank then saves, which needs its workers and the fork server: the server is started
with both blocked, which children inherit; it ignores SIGINT only when it has imported. At exit,
multiprocessing would send SIGTERM and wait, so the workers are killed before that.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from plait.data.shards import BuildSettings, PartRecord, write_part
from plait.data.sources import Shard
from plait.data.tokenizer import encoder
from plait.errors import DataError
from plait.launchers import missing_semaphores

_NUM_SEMAPHORES = 4  # for each worker, and some for all; each takes a page and a file's number
_QUIET = "ignore:resource_tracker"
POLL_S = 0.2  # update interval of the progress bar

Job = tuple[int, Shard]
Report = Callable[[int], None]


def worker_context(workers: int) -> ForkServerContext:
    """Context of the fork server, for so many workers. See [Note: worker processes] and [Note: signals to a
    process group]. Raises DataError if they cannot share semaphores."""
    if reason := missing_semaphores(_NUM_SEMAPHORES * (workers + 2)):
        raise DataError(
            "worker processes cannot share semaphores",
            given=f"{workers} workers, {reason}",
            expected="a /dev/shm that can be written to, with free space",
            hint="data.workers=0 and data.build_workers=0, or a larger /dev/shm (docker run --shm-size=1g)",
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plait.data.loader", "plait.data.workers"])
    sys.warnoptions.append(_QUIET)  # the tracker, which removes the semaphores of a killed rank
    resource_tracker.ensure_running()  # first: else the server starts it, which would unblock SIGTERM
    sys.warnoptions.remove(_QUIET)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    return context


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def init_loader_worker(_number: int) -> None:
    """Ignore signals in a DataLoader worker: its worker_init_fn. See [Note: signals to a process group]."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def write_parts(
    jobs: Sequence[Job], settings: BuildSettings, workers: int, report: Report
) -> Iterator[tuple[int, PartRecord]]:
    """Tokenize shards, in this process or in `workers` others; yield records as parts are finished.

    Raises DataError for the first shard with bad text; the others are stopped within a second.
    """
    if workers == 0:
        tokenizer = encoder(settings.tokenizer)
        for number, shard in jobs:
            yield number, write_part(number, shard, settings, tokenizer, report)
        return
    context = worker_context(workers)
    done_bytes = context.Value("q", 0)
    stop = context.Event()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_init_worker, initargs=(settings, done_bytes, stop)
    )
    try:
        pending, reported = {pool.submit(_write_part, job) for job in jobs}, 0
        while pending:
            done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            total = done_bytes.value
            report(total - reported)
            reported = total
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process was killed",
            given=f"build_workers={workers}",
            expected="enough memory: about 0.5 GB for each",
            hint="fewer build_workers; finished parts are kept",
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@dataclass
class _Worker:
    settings: BuildSettings
    tokenizer: Any
    done_bytes: "Synchronized[int]"
    stop: Event

    def report(self, num_bytes: int) -> None:
        with self.done_bytes.get_lock():
            self.done_bytes.value += num_bytes
        if self.stop.is_set():
            raise DataError("another shard failed")  # never shown: the first error is being raised already


_worker: list[_Worker] = []  # of a worker process, one element: executors have no other storage for it


def _init_worker(settings: BuildSettings, done_bytes: "Synchronized[int]", stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and sets `stop`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the executor terminates workers with it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process per core already
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker[:] = [_Worker(settings, encoder(Path(settings.tokenizer)), done_bytes, stop)]


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "worker has no parent process"
    connection.wait([parent.sentinel])
    os._exit(1)  # no process is left to report to; unfinished files have temporary names


def _write_part(job: Job) -> tuple[int, PartRecord]:
    number, shard = job
    worker = _worker[0]
    return number, write_part(number, shard, worker.settings, worker.tokenizer, worker.report)
