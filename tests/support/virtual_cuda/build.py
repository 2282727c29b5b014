"""Compile the simulated device once per version of torch and of its sources.

It is built without torch's own extension builder, which imports torch: see `device.py`. The library is
written under build/, and rebuilt when the hash of the sources changes.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MODULE = "virtual_cuda_native"
SOURCE = HERE / "native" / "module.cpp"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")


class BuildError(Exception):
    """The simulated device cannot be built here."""


@functools.cache
def library() -> Path:
    """Return the path of the compiled library; compile it first if needed. Raises BuildError.

    Processes that need it at the same time wait for the first one, which compiles (about a minute).
    """
    path = ROOT / "build" / f"virtual_cuda-{importlib.metadata.version('torch')}" / _digest() / f"{MODULE}.so"
    if path.exists():
        return path
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler (g++, or CXX)")
    folder = path.parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)
    return path


def _digest() -> str:
    """Return a hash of everything that the library is made from, besides torch."""
    digest = hashlib.sha256(sysconfig.get_python_version().encode())
    for source in sorted(SOURCE.parent.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    spec = importlib.util.find_spec("torch")  # does not import it
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    torch = Path(spec.origin).parent
    includes = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    command = [
        *(compiler, *FLAGS, *(f"-I{include}" for include in includes), str(SOURCE)),
        *(f"-L{torch / 'lib'}", *(f"-l{name}" for name in ("torch", "torch_cpu", "c10", "torch_python"))),
        *(f"-Wl,-rpath,{torch / 'lib'}", "-o", str(unfinished)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
        raise BuildError(f"{compiler} failed: {errors[0] if errors else run.returncode}")
    for other in path.parents[1].iterdir():  # of earlier sources
        if other.is_dir() and other != path.parent:
            shutil.rmtree(other)
    unfinished.rename(path)
