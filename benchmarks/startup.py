"""Start-up times: commands and imports next to `python -c "import torch"`.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

Each contender is a process of its own; those of a round run one after the other. The yardstick is a process
that imports torch, which a command that trains cannot avoid. Help texts, wrong options and schedules do not
need it, and a program that trains a plain module does not need transformers. The whole of a run of one step
is timed on one rank and on two: the ranks of a host share the imports.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
from plait.bench.report import machine

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


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    arguments = common.parse(
        parser, rounds=1, only=["import plait", "plait train, unknown key", "plait train, 1 step, 2 ranks"]
    )
    times: common.Times = {name: [] for name in dict.fromkeys((YARDSTICK, *arguments.only))}
    for _ in range(arguments.rounds):
        for name, of_program in times.items():
            of_program.append(seconds(name))
    rows = common.rows("start-up", times, yardstick=YARDSTICK, peers=())
    common.report("start-up times", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
