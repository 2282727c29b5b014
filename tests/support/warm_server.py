"""A process that has imported what a command needs, and forks one for each request: see `warm.py`.

The imports of torch and transformers take four seconds of a core, more than most commands of the tests. A
command's process is forked before anything is computed, so that it is like one that has just imported them.
What is imported is excluded from garbage collection: one that visits it takes each process 0.3 s and copies
120 MB.

A client connects to the socket, sends a JSON object and the process's files, and gets the pid, and later the
wait status. A process is killed when its client disconnects or the server's stdin ends.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

PRELOADED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "PIL.PngImagePlugin",
    "pytest",
    "rich._emoji_codes",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "plait.cli.main",
    "plait.comm.launch",
    "plait.parallel.ddp",
    "plait.planner",
    "plait.server.job",
    "plait.train.explain_recipe",
    "plait.train.prepare",
    "plait.train.trainer",
    "plait.verify.runner",
)
JOB_BYTES, MOST_FILES = 1 << 20, 8


def serve(path: str, first_import: str) -> None:
    gc.disable()
    for name in (first_import, *PRELOADED) if first_import else PRELOADED:
        importlib.import_module(name)
    conversions = importlib.import_module("transformers.conversion_mapping")
    conversions.get_checkpoint_conversion_mapping("llama")  # makes its table of all models once
    gc.collect()
    gc.freeze()
    gc.enable()
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
            job, files, _, _ = socket.recv_fds(client, JOB_BYTES, MOST_FILES)
            pid = os.fork()
            if not pid:
                launch = sys.modules["plait.comm.launch"]  # not imported at the top: it imports torch
                launch.run_and_exit(partial(run, json.loads(job), files))
            client.sendall(struct.pack("i", pid))
            clients[pid] = client
            for file in files:
                os.close(file)


def run(job: dict[str, Any], files: list[int]) -> None:
    """Be the process of `python *argv`, where `argv` begins with a script, `-` or `-m` and a module.

    `leads`: whether it leads a session; `targets`: the numbers of the files in the process.
    """
    atexit._clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if job["leads"]:
        os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    os.closerange(3, 1000)
    for target, file in zip(job["targets"], high, strict=True):
        os.dup2(file, target)
    os.closerange(1000, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(job["env"])
    if "PLAIT_LAUNCHER_PID" in job["env"]:
        os.environ["PLAIT_LAUNCHER_PID"] = str(os.getppid())  # with which the process is to end
    if "network" in job:
        enter_network(Path(job["network"]))
    os.chdir(job["cwd"])
    program, *words = job["argv"]
    if program == "-":
        sys.argv, sys.path[0] = job["argv"], job["cwd"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), vars(main))
        return
    if program != "-m":
        sys.argv, sys.path[0] = [program, *words], str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        return
    sys.argv, sys.path[0] = words, job["cwd"]
    if words[0] == "plait":
        importlib.import_module("plait.__main__").main()
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def enter_network(namespace: Path) -> None:
    """Be on the same host as the client, where a test makes hosts of network namespaces."""
    if namespace.stat().st_ino != Path("/proc/self/ns/net").stat().st_ino:
        with namespace.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace of the client")


if __name__ == "__main__":
    serve(*sys.argv[1:])
