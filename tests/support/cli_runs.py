"""Helpers of command line tests: a small recipe, commands as real processes, their results."""

import atexit
import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from plait import checkpoint
from support import warm

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
LIMIT_S = 120.0
LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net writes it

RECIPE = """
plan = "dp=2 micro=2"
[run]
dir = "{here}/run"
steps = 24
batch = 16
log_every = 1
evaluate_every = 8
evaluate_batches = 2
checkpoint_every = 6
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
attention_dropout = 0.1
[data]
dir = "{here}/data"
sources = ["{here}/text/*.txt"]
sequence = 64
validation = 0.2
workers = 0
[tokenizer]
vocab_size = 300
[optimizer]
lr = 1e-3
weight_decay = 0.1
clip_norm = 0.5
[schedule]
warmup = 4
[sample]
prompt = "The ship"
tokens = 8
"""


def write_recipe(here: Path) -> Path:
    """Write a recipe and its text under `here`."""
    (here / "text").mkdir()
    for number in range(40):
        lines = [f"The ship {number} sails {count} miles to harbour {number * count}." for count in range(40)]
        (here / "text" / f"{number:02}.txt").write_text("\n".join(lines))
    recipe = here / "recipe.toml"
    recipe.write_text(RECIPE.format(here=here))
    return recipe


def environment() -> dict[str, str]:
    """Environment of a command typed in a terminal: without rank variables."""
    return {
        **{
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        },
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


PLAIT = (sys.executable, "-m", "plait")  # for `entry`


def start(*words: object, entry: Sequence[str] = (), script: str = "") -> subprocess.Popen[str]:
    """Start `plait words...` as the leader of its own process group, like a shell; with `entry`, that command
    instead of `plait`; with `script`, that Python file, which need not import libraries."""
    forked = functools.partial(warm.Popen, script=Path(script)) if script else warm.Popen
    return _start(subprocess.Popen if entry else forked, [*entry, *map(str, words)])


def limited_to(file_bytes: int, folder: Path) -> str:
    """A script for `start` that is `plait` with a limit on the size of files, as of `ulimit -f`."""
    script = folder / "limited.py"
    script.write_text(
        "import resource\nfrom plait.__main__ import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}))\nmain()\n"
    )
    return str(script)


def start_torchrun(*words: object) -> subprocess.Popen[str]:
    """Start `torchrun --nproc-per-node 2 words...`, where a later option replaces an earlier one. Neither it
    nor its ranks have to import libraries."""
    torchrun = functools.partial(warm.Popen, module="torch.distributed.run")
    return _start(torchrun, ["--nproc-per-node", "2", *map(str, words)], warm_python()[1])


def start_mpirun(*words: object) -> subprocess.Popen[str]:
    """Start `mpirun -n 2 python words...`. The ranks do not have to import libraries."""
    python, variables = warm_python()
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", str(python))
    return _start(subprocess.Popen, [*mpirun, *map(str, words)], variables)


@functools.cache
def warm_python() -> tuple[Path, dict[str, str]]:
    """A command `python` that has imported libraries, and the environment that it needs."""
    folder = Path(tempfile.mkdtemp(prefix="plait-python-"))
    atexit.register(shutil.rmtree, folder)
    return folder / "python", warm.install(folder, "python")


def _start(
    popen: Callable[..., subprocess.Popen[str]], words: list[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **(variables or {})},
        start_new_session=True,
    )


@contextmanager
def two_ranks(
    program: str, meet: Path, *words: str, is_warm: bool = False
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a program in two processes as the ranks of one world, with a rendezvous file; killed at the end.
    `is_warm`: they need not import libraries, and do not end by Python's own exit."""
    shared = {"WORLD_SIZE": "2", "PLAIT_RENDEZVOUS_FILE": str(meet)}
    script = meet.with_suffix(".py")
    script.write_text(program)
    popen = functools.partial(warm.Popen, script=script) if is_warm else subprocess.Popen
    ranks = [
        popen(
            [*words] if is_warm else [sys.executable, "-W", "error", str(script), *words],
            env=environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for a process, check its exit code, and return its stdout and stderr."""
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return out, err


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Wait until the run prints this step or a later one."""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words[:1] == ["step"] and "tok/s" in words and int(words[1].split("/")[0]) >= step:
            return
    raise AssertionError(f"the run ended before step {step}: {process.communicate()}")


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Wait until the run prints a line that matches the pattern."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"the run ended before {pattern}: {process.communicate()}")


def last_state(run: Path) -> dict[str, Tensor]:
    """Tensors of the run's newest checkpoint: weights and optimizer state."""
    found = checkpoint.newest(run / "checkpoints")
    assert found is not None
    return found.read()


def last_step(run: Path) -> int:
    found = checkpoint.newest(run / "checkpoints")
    return 0 if found is None else found.step


def listening(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, on which a process listens."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:")}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/{pid}/net/{table}").exists()
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    listen = "0A"
    return [row[1].partition(":")[0] for row in rows if row[3] == listen and row[9] in inodes]


def ranks_of(launcher: int) -> list[int]:
    """The processes of a launcher's ranks, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if _is_rank(pid)]


def _is_rank(pid: str) -> bool:
    """Forked ranks are named so; fresh ones, where there is an accelerator, have a command line of their
    own."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return "rank" in Path(f"/proc/{pid}/comm").read_text() or b"rank" in arguments


def family(pid: int) -> list[int]:
    """A process and all its descendants, but for those of processes that end meanwhile."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found
