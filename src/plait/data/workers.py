"""Processes that read and tokenize for this one.

[Note: worker processes]  They come from a fork server, not from a fork of this process: it has the
threads of torch, of the process group and perhaps of CUDA, whose locks a fork would copy locked. The
server imports this package once; each worker is a cheap fork of it. All end when this process does,
however it ends.

[Note: signals to a whole process group]  torchrun, a terminal and job queues send SIGTERM or SIGINT to all
processes of a rank. The rank then saves, for which it needs those that read for it, the fork server too: it
is started with SIGTERM blocked, which a process hands on to its children, and ignores SIGINT by itself. What
remains is that multiprocessing, when Python ends, asks by SIGTERM and waits: we kill before that.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from plait.data.shards import PartRecord, Setting, write_part
from plait.data.sources import Shard
from plait.data.tokenizer import encoder
from plait.errors import DataError

POLL_S = 0.2  # how often the progress bar moves

Job = tuple[int, Shard]
Report = Callable[[int], None]


def worker_context() -> ForkServerContext:
    """See [Note: worker processes] and [Note: signals to a whole process group]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plait.data"])
    resource_tracker.ensure_running()  # first: the server starts it, and that would unblock SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
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


def deaf_worker(_number: int) -> None:
    """A DataLoader's worker_init_fn. See [Note: signals to a whole process group]."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def write_parts(
    jobs: Sequence[Job], setting: Setting, workers: int, report: Report
) -> Iterator[tuple[int, PartRecord]]:
    """Tokenizes shards, in this process or in `workers` others; gives records as parts are finished.

    Raises DataError for the first shard whose text is bad; the others are stopped within a second.
    """
    if workers == 0:
        tokenizer = encoder(setting.tokenizer)
        for number, shard in jobs:
            yield number, write_part(number, shard, setting, tokenizer, report)
        return
    context = worker_context()
    done_bytes = context.Value("q", 0)
    stop = context.Event()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(setting, done_bytes, stop)
    )
    try:
        yield from _gathered([pool.submit(_work, job) for job in jobs], done_bytes, report)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenizes was killed",
            given=f"build_workers={workers}",
            expected="enough memory: about 0.5 GB for each",
            hint="fewer build_workers; the parts that are finished are kept",
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _gathered(
    futures: Sequence[Future[tuple[int, PartRecord]]], done_bytes: "Synchronized[int]", report: Report
) -> Iterator[tuple[int, PartRecord]]:
    pending = set(futures)
    seen = 0
    while pending:
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
        report(done_bytes.value - seen)
        seen = done_bytes.value
        for future in done:
            yield future.result()


@dataclass
class _Worker:
    setting: Setting
    tokenizer: Any
    done_bytes: "Synchronized[int]"
    stop: Event

    def report(self, num_bytes: int) -> None:
        with self.done_bytes.get_lock():
            self.done_bytes.value += num_bytes
        if self.stop.is_set():
            raise DataError("another shard failed")  # seen by nobody: the first letter is on its way


_worker: list[_Worker] = []  # in a worker process, its one: an executor has no other place for it


def _start(setting: Setting, done_bytes: "Synchronized[int]", stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then sets `stop`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by it the executor ends them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core already
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker[:] = [_Worker(setting, encoder(Path(setting.tokenizer)), done_bytes, stop)]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker without a parent"
    connection.wait([parent.sentinel])
    os._exit(1)  # nobody is left to hear of it; what is unfinished has no name yet


def _work(job: Job) -> tuple[int, PartRecord]:
    number, shard = job
    worker = _worker[0]
    return number, write_part(number, shard, worker.setting, worker.tokenizer, worker.report)
