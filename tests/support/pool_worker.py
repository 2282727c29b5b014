"""Pool worker: imports torch once, then runs functions as the requested rank."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import reduce
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from plait.comm import connect
from plait.comm.launch import end_with_parent


def serve(pool: connection.Connection, stacks: Path) -> None:
    """Run jobs until the pool closes the connection."""
    end_with_parent()
    faulthandler.enable()
    stacks_file = stacks.open("a")  # the pool empties it
    while True:
        # A stuck rank cannot answer requests: a signal handler in C writes its stack. A training run restores
        # Python's handler after its own, not this one.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        try:
            job = pool.recv()
        except EOFError:
            return
        if job == "leave":  # after a run that failed here and was left immediately
            continue
        before = dict(os.environ), Path.cwd()
        answer = _answer(job)
        pool.send(answer)
        if "result" in answer:
            assert pool.recv() == "leave"
        _leave(*before)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    rank = str(job["rank"])
    os.environ.update(job["environment"], RANK=rank, LOCAL_RANK=rank)
    sys.path[:] = job["sys_path"]
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for entry in job["warning_filters"]:
                warnings.filterwarnings(*entry)
            fn = _find(*job["function"])
            args, kwargs = pickle.loads(job["arguments"])
            if job["transport"] != "auto":
                connect(transport=job["transport"])
            return {"result": pickle.dumps(fn(*args, **kwargs))}
    except BaseException as error:  # pytest.fail and skip derive from BaseException
        answer = {
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "at_s": time.monotonic(),
            "exception": _pickled(error),
        }
        # Its frames hold tensors and groups; the group must be destroyed now for peers to see it.
        traceback.clear_frames(error.__traceback__)
        return answer


def _find(module: str, file: str | None, qualname: str) -> Callable[..., Any]:
    if module not in sys.modules and file is not None:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        _keep_modules()
    found: Callable[..., Any] = reduce(getattr, qualname.split("."), importlib.import_module(module))
    return found


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception for the test's `__cause__`; None for the many classes that cannot be pickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _leave(environ: dict[str, str], cwd: Path) -> None:
    """Leave the process group and restore what the function may have changed."""
    connect_module: ModuleType = sys.modules["plait.comm.world"]
    groups = [*dist.distributed_c10d._world.pg_map]
    if connect_module._world is not None:
        connect_module._world.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if groups:  # Gloo's event loop closes each connection in up to 10 ms
        threading.Thread(target=groups.clear).start()
    # Counter in process group names: ranks with different counts would wait for one another.
    dist.distributed_c10d._world.group_count = 0
    if "torch._dynamo" in sys.modules:  # its limit of compilations per function is one of the process
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    _default_torch()


def _keep_modules() -> None:
    """Exclude imported objects from garbage collection, which would cost 0.2 s each time."""
    gc.collect()
    gc.freeze()


def _default_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    _default_torch()
    _keep_modules()
    serve(connection.Connection(int(sys.argv[1])), Path(sys.argv[2]))
