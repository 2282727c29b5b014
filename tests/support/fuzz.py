"""Run cases of `fuzz_cases.py`, each in a forked process with limits, and check the law that holds for all.

The law: a case succeeds, or ends with an error of four parts; no traceback, no control characters on the
terminal; in bounded time and memory; nothing is left outside of its folder: files, processes, shared memory.

As a program: `fuzz.py KIND FIRST LAST BASE OUT` writes a line of JSON for each case.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.fuzz_cases import GENERATORS

LIMIT_S = 60.0
MEMORY_BYTES = 2 << 30  # beyond what the process had when it was forked
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ERROR = re.compile(r"^\w+Error: |^Usage: ", re.MULTILINE)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Result:
    """The result of a case. `error`: the first line of its error; `problem`: how it breaks the law, if it
    does."""

    kind: str
    number: int
    code: int
    seconds: float
    peak_bytes: int
    error: str
    problem: str


def run_cases(kind: str, numbers: range, base: Path, out: Path) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with out.open("w") as file:
        for number in numbers:
            file.write(json.dumps(asdict(_run_case(kind, number, base))) + "\n")
            file.flush()


def _run_case(kind: str, number: int, base: Path) -> Result:
    with _folder(base, kind, number) as here:
        start_s = time.monotonic()
        pid = os.fork()
        if not pid:
            _be_case(kind, number, here)
        deadline_s, done, usage = start_s + LIMIT_S, 0, None
        while not done and time.monotonic() < deadline_s:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            time.sleep(0.0 if done else 0.005)
        elapsed_s = time.monotonic() - start_s
        if not done:
            os.kill(pid, signal.SIGABRT)  # faulthandler prints where it is
            _, status, usage = os.wait4(pid, 0)
        assert usage is not None
        peak_bytes = usage.ru_maxrss * 1024 - _resident_bytes()
        said = (here / "said").read_bytes().decode("utf-8", "replace")
        code = os.waitstatus_to_exitcode(status)
        problem = _broken_law(kind, code, said) if done else f"more than {LIMIT_S} s\n{said}"
        if left := _children():
            problem += f"left processes: {left}"
        if files := _elsewhere(here, pid):
            problem += f"left files: {files}"
        found = re.search(r"^\w+Error: .*", said, re.MULTILINE)
        return Result(kind, number, code, elapsed_s, peak_bytes, found[0] if found else "", problem)


def _broken_law(kind: str, code: int, said: str) -> str:
    tail = f"exit code {code}\n{said[-3000:]}"
    if "Traceback (most recent call last)" in said:
        return f"a traceback: {tail}"
    if code not in (0, 1, 2):
        return f"another exit code: {tail}"
    if code == 2 and not _ERROR.search(said):
        return f"no error: {tail}"
    if _CONTROL.search(said):
        return f"control characters: {tail!a}"
    return ""


def _be_case(kind: str, number: int, here: Path) -> None:
    """Be the process of a case."""
    code: object = 1
    try:
        said = os.open(here / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        os.chdir(here)
        os.environ |= {
            "HOME": str(here), "TMPDIR": str(here), "XDG_CACHE_HOME": str(here), "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        }  # fmt: skip
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable()
        action: Any = GENERATORS[kind](random.Random(f"{kind} {number}"), here)
        action()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


@contextlib.contextmanager
def _folder(base: Path, kind: str, number: int) -> Iterator[Path]:
    """A copy of the base folder, with a pipe and a circular link in it; its run is of the base's data."""
    here = base.parent / kind / str(number)
    shutil.copytree(base, here)
    os.mkfifo(here / "pipe")
    (here / "circle").symlink_to(here / "circle")
    try:
        yield here
    finally:
        shutil.rmtree(here)


def _elsewhere(here: Path, pid: int) -> set[str]:
    """The files next to the folder of a case, and the shared memory of its process."""
    shared = {str(path) for path in Path("/dev/shm").iterdir() if str(pid) in path.name}
    return shared | {str(path) for path in here.parent.iterdir() if path != here}


def _children() -> list[int]:
    """The processes that a case has left, which are then killed."""
    me = os.getpid()
    left = [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return left


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    kind, first, last, base, out = sys.argv[1:]
    run_cases(kind, range(int(first), int(last)), Path(base), Path(out))
