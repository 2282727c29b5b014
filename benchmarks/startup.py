"""Start-up times: commands and imports next to `python -c "import torch"`.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

Each contender is a process of its own; those of a round run one after the other. The yardstick is a process
that imports torch, which a command that trains cannot avoid. Help texts, wrong options and schedules do not
need it, and a program that trains a plain module does not need transformers. The whole of a run of one step
is timed on one rank and on two: the ranks of a host share the imports.

The second table is the budget of a start: processor seconds from the command to the end of step 1 of the
demo's model, on 2 ranks, with data that is there. The launcher's are spent once for a host: what it imports
(the same imports in a process of their own), and all else until the ranks run (checks of recipe, model and
data). Each rank builds its engine, and takes a step of 4 x 256 tokens. The program ends with an error if
launcher and rank together take more than --limit-s.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
from plait.bench.report import machine
from plait.train.callbacks import Callback, CallbackRun
from plait.train.metrics import StepMetrics

YARDSTICK = "import torch"
PLAIN = """
import plait, torch
engine = plait.parallelize(
    torch.nn.Sequential(torch.nn.Linear(4, 4)),
    "dp=1",
    loss=lambda outputs, batch: (outputs.square().sum(), outputs.numel()),
    optimizer_args={"lr": 0.1},
)
"""
HERE = "HERE"  # a new directory for each process
TRAIN = [
    *("-m", "plait", "train", "recipes/tiny.toml", "--set", f'run.dir="{HERE}/run"', "--set", "run.steps=1"),
    *("--set", f'data.dir="{HERE}/data"', "--set", "schedule.warmup=0"),
]
PROGRAMS = {
    YARDSTICK: ["-c", "import torch"],
    "import transformers.PreTrainedModel": ["-c", "from transformers import PreTrainedModel"],
    "import plait": ["-c", "import plait; plait.Plan"],
    "plait --version": ["-m", "plait", "--version"],
    "plait --help": ["-m", "plait", "--help"],
    "plait train --help": ["-m", "plait", "train", "--help"],
    "plait train, unknown key": ["-m", "plait", "train", "recipes/tiny.toml", "--set", "run.stepz=1"],
    "plait schedule": ["-m", "plait", "schedule", "1f1b", "--pp", "4", "--micro", "8"],
    "plait checkpoint show, none there": ["-m", "plait", "checkpoint", "show", tempfile.gettempdir()],
    "parallelize a plain module": ["-c", PLAIN],
    "plait train, 1 step, 1 rank": [*TRAIN, "--plan", "dp=1"],
    "plait train, 1 step, 2 ranks": [*TRAIN, "--plan", "dp=2"],
}


ROOT = Path(__file__).resolve().parent.parent
IMPORTS = """
import gc, os
gc.set_threshold(50_000)  # as the command line
import plait.comm.launch, plait.train.prepare
os._exit(0)
"""
SETS = {
    "run.dir": f"{HERE}/run",
    "run.steps": 1,
    "run.evaluate_every": 0,
    "run.callbacks": ["startup:Marks"],
    "schedule.warmup": 0,
    "sample.tokens": 0,
    "data.dir": f"{HERE}/data",
    "data.sources": [str(ROOT / "README.md"), str(ROOT / "docs" / "*.md")],
    "tokenizer.vocab_size": 512,
}
DEMO = [
    str(ROOT / "recipes" / "demo.toml"),
    *(word for key, value in SETS.items() for word in ("--set", f"{key}={json.dumps(value)}")),
]

USER_ERRORS = ("plait train, unknown key", "plait checkpoint show, none there")  # that are timed


def seconds(name: str) -> float:
    """Time a contender. Ends the program if it does not end as it should: an error is soon over."""
    words, expected = PROGRAMS[name], 2 if name in USER_ERRORS else 0
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *(word.replace(HERE, folder) for word in words)],
            cwd=Path(__file__).resolve().parent.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        elapsed_s = time.perf_counter() - begin
    if done.returncode != expected:
        sys.exit(f"{name} ended with {done.returncode}, not {expected}: {done.stderr}")
    return elapsed_s


class Marks(Callback):
    """Writes what the launcher and rank 0 have spent when the first step ends."""

    def on_start(self, run: CallbackRun) -> None:  # noqa: ARG002
        self._built_s = time.process_time()

    def on_step(self, run: CallbackRun, metrics: StepMetrics) -> None:  # noqa: ARG002
        if run.rank == 0 and run.step == 1:
            fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            launcher_s = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            step_s = time.process_time() - self._built_s
            (run.folder / "marks.json").write_text(json.dumps([launcher_s, self._built_s, step_s]))


def spent(words: list[str]) -> float:
    """Processor seconds of a Python process that ends as it should."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=ROOT / "benchmarks", stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def budget() -> dict[str, float]:
    """Processor seconds of a start, by part."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace(HERE, folder) for word in DEMO]
        spent(["-m", "plait", "data", "build", *words])
        imports_s = spent(["-c", IMPORTS])
        spent(["-m", "plait", "train", *words])
        launcher_s, built_s, step_s = json.loads((Path(folder) / "run" / "marks.json").read_text())
    return {
        "launcher: imports": imports_s,
        "launcher: all else": launcher_s - imports_s,
        "rank: engine": built_s,
        "rank: step 1": step_s,
        "launcher and rank": launcher_s + built_s + step_s,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit-s", type=float, default=12.0, help="of the budget; an idle machine takes half"
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    arguments = common.parse(parser, rounds=1, only=["import plait", "plait train, unknown key"])
    times: common.Times = {name: [] for name in dict.fromkeys((YARDSTICK, *arguments.only))}
    for _ in range(arguments.rounds):
        for name, of_program in times.items():
            of_program.append(seconds(name))
    rows = common.rows("start-up", times, yardstick=YARDSTICK, peers=())
    common.report("start-up times", rows, machine(), arguments.json)
    starts = [budget() for _ in range(arguments.rounds)]
    parts = [
        {
            "part": name,
            "median_s": statistics.median(of := [start[name] for start in starts]),
            "least_s": min(of),
        }
        for name in starts[0]
    ]
    common.report("budget of a start, processor time", parts, machine(), None)
    if parts[-1]["least_s"] > arguments.limit_s:
        sys.exit(
            f"a start takes {parts[-1]['least_s']:.1f} s of the processor, more than {arguments.limit_s}"
        )


if __name__ == "__main__":
    main()
