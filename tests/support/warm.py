"""Commands in processes that have imported their libraries already: `Popen` for `python -m plait`, `install`
for the `plait` or `python` of a shell.

Their own start, with the imports, is what tests/one/test_startup.py and benchmarks/startup.py run.
"""

import atexit
import functools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])


def install(folder: Path, *names: str) -> dict[str, str]:
    """Write commands, `plait` or `python`, to the folder, and return the environment that its shell needs
    besides PATH. torchrun starts its ranks with this `python`, too."""
    for name in names:
        command = folder / name
        command.write_text(f"#!{sys.executable} -IS\n{(HERE / 'warm_command.py').read_text()}")
        command.chmod(0o755)
    torchrun = {"PYTHON_EXEC": str(folder / "python")} if "python" in names else {}
    return {"PLAIT_WARM": server(), **torchrun}


@functools.cache
def server(first_import: str = "") -> str:
    """The path of the server's socket: of that of the processes that run all tests, or of one that is started
    and ends with this process. `first_import`: a module that it imports before all others, torch among them.
    """
    if "PLAIT_WARM" in os.environ and not first_import:
        return os.environ["PLAIT_WARM"]
    folder = tempfile.mkdtemp(prefix="plait-warm-")
    path = str(Path(folder) / "socket")
    server = subprocess.Popen(
        [sys.executable, str(HERE / "warm_server.py"), path, first_import],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    @atexit.register
    def end() -> None:
        server.kill()
        server.communicate()
        Path(path).unlink(missing_ok=True)
        Path(folder).rmdir()

    return path


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of `python -m module *args`, or of `python script *args`, forked from the server."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        module: str = "plait",
        script: Path | None = None,
        first_import: str = "",
        **options: Any,
    ) -> None:
        self._program = [str(script)] if script else ["-m", module]
        self._first_import = first_import
        super().__init__(args, env=env, **options)

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        """Ask the server instead of `fork` and `exec`. The signature is that of Python 3.11 and 3.12."""
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes = options[:15]
        leads = options[-2]
        ends = [ours if ours != -1 else target for target, ours in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(server(self._first_import))
        job = {
            "argv": [*self._program, *args],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "leads": bool(leads),
            "targets": [0, 1, 2, *pass_fds],
        }
        socket.send_fds(self._connection, [json.dumps(job).encode()], [*ends, *pass_fds])
        [self.pid] = struct.unpack("i", self._connection.recv(4))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        [status] = struct.unpack("i", self._connection.recv(4))
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode
