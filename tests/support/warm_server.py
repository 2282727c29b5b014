"""A process that has imported what a command needs, and forks one for each request: see `warm.py`.

The imports of torch and transformers take four seconds of a core, more than most commands of the tests. A
command's process is forked before anything is computed, so that it is like one that has just imported them.

A client connects to the socket, sends a JSON object and the three standard files, and gets the pid; when the
process ends, its wait status. A client that disconnects, or the end of the server's stdin, kills the process.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from typing import Any, NoReturn

PRELOADED = (
    "matplotlib.figure",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "plait.cli.main",
    "plait.comm.launch",
    "plait.train.prepare",
    "plait.train.trainer",
    "plait.verify.runner",
)
JOB_BYTES = 1 << 20


def serve(path: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    clients: dict[int, socket.socket | None] = {}  # by pid of the process; None: has disconnected
    while True:
        open_clients = [client for client in clients.values() if client is not None]
        ready, _, _ = select.select([sys.stdin.fileno(), listener, wake, *open_clients], [], [])
        if sys.stdin.fileno() in ready:
            for pid in clients:
                os.kill(pid, signal.SIGKILL)
            return
        if wake in ready:
            os.read(wake, 1 << 16)
        for pid, client in [*clients.items()]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del clients[pid]
                if client is not None:
                    with contextlib.suppress(OSError), client:
                        client.sendall(struct.pack("i", status))
            elif client in ready and client is not None:
                os.kill(pid, signal.SIGKILL)
                client.close()
                clients[pid] = None
        if listener in ready:
            client, _ = listener.accept()
            job, files, _, _ = socket.recv_fds(client, JOB_BYTES, 3)
            pid = os.fork()
            if not pid:
                run(json.loads(job), files)
            client.sendall(struct.pack("i", pid))
            clients[pid] = client
            for file in files:
                os.close(file)


def run(job: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the process of a command: `argv`, `env`, `cwd`, `leads` (its own session)."""
    code: object = 1
    try:
        atexit._clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if job["leads"]:
            os.setsid()
        for target, file in enumerate(files):
            os.dup2(file, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        sys.argv, sys.path[0] = ["plait", *job["argv"]], job["cwd"]
        importlib.import_module("plait.__main__").main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
