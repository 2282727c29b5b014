"""Programs of their own process group, with a log and a limit of their time."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

END_S = 90.0  # for the ranks of a program to end after SIGTERM


def run_limited(
    command: Sequence[str],
    log: IO[str],
    limit_s: float,
    *,
    folder: Path,
    environment: Mapping[str, str],
    end_s: float = END_S,
) -> str | None:
    """Run a command in a session of its own, which ends with it. Return why it failed, if it did.

    `end_s`: seconds from SIGTERM, when the time is over, to SIGKILL.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit_s)
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s"
    finally:
        _end(process, end_s)


def _end(process: "subprocess.Popen[bytes]", end_s: float) -> None:
    """End a program that still runs: its launcher ends the ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(end_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
