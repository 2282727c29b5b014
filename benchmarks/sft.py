"""Fine-tuning: our recipe and TRL's SFTTrainer on the same chats, padded and packed.

    python benchmarks/sft.py [--peer-python PATH] [--rounds 3]

The Llama of 33.7 M parameters, 2 ranks with one thread each, bf16 compute, AdamW, conversations from the
docstrings of Python's standard library (`python-docs`) in the same order. Each contender runs in processes of
its own, as its users start it: `plait train` and torchrun; they take turns in every round. Without TRL in
--peer-python (`make bench` installs it), ours runs alone.

Rates are tokens with a target per second of training, with the loading of batches, after the first steps;
columns with `cpu`: ratios of rates per second of processor time, for machines that others use, too.
`padded`: a micro-batch of --batch conversations, padded to the longest, the same ones for both. `packed`: one
of --rows rows of 256 tokens (ours `data.samples = "bins"`, TRL's best fit decreasing). `targets` are those of
a step, `loss` the mean of all steps: for `padded` both must agree. `of_padded`: of TRL's padded rate.

`ahead`: of TRL's rate of the same case. Heads are the defaults, and both leave tokens without a target out:
ours is one operator with the loss, in chunks; TRL's computes entropy and accuracy, too.
`separate`: a document of a packed row does not change the logits of another one, as TRL's program finds
before it trains.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from llama import Llama, llama_of
from plait.bench.report import machine
from plait.data.python_docs import conversations
from plait.data.sources import list_source
from plait.data.tokenizer import save_tokenizer, train_tokenizer
from plait.train.callbacks import Callback, CallbackRun
from plait.train.metrics import read_metrics
from plait.train.run_dir import RunDir

HERE = Path(__file__).resolve().parent
RANKS = 2
WARM_UP = 3
LENGTH = 256
MOST_APART = 2e-2  # mean losses, in bf16
RECIPE = """
plan = "dp=2 precision=bf16"
task = "sft"
[run]
dir = "{folder}/run"
steps = {steps}
batch = {batch}
evaluate_every = 0
checkpoint_every = 0
log_every = {steps}
device = "cpu"
transport = "{transport}"
report_to = []
callbacks = ["sft:Clock"]
[model]
path = "{folder}"
[data]
dir = "{folder}/tokens-{samples}"
sources = ["{folder}/chats.jsonl"]
samples = "{samples}"
sequence = {length}
order = "sequential"
validation = 0
workers = 0
[optimizer]
lr = 1e-4
clip_norm = 1.0
[schedule]
name = "linear"
"""


class Clock(Callback):
    """Writes wall and processor seconds at the end of each step, as TRL's program does."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def on_step(self, *_: Any) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def on_end(self, run: CallbackRun) -> None:
        (run.folder / f"clock-{run.rank}.json").write_text(json.dumps(self._ends))


@dataclass(frozen=True)
class Found:
    """A run's wall and processor seconds at the end of each step, summed over the ranks; its targets; and the
    mean loss."""

    ends: list[tuple[float, float]]
    targets: list[int]
    loss: float
    separate: bool | None = None

    def rates(self) -> list[float]:
        """Targets per second, of the clock and of the processor, after the first steps."""
        spent = (last - first for first, last in zip(self.ends[WARM_UP - 1], self.ends[-1], strict=True))
        return [RANKS * sum(self.targets[WARM_UP:]) / seconds for seconds in spent]


def prepare_folder(folder: Path, model: Llama, number: int) -> None:
    """Write the model, a tokenizer with a chat template, and conversations that fit into a row."""
    files = [Path(item.name) for item in list_source("python-docs")]
    rows = list(itertools.chain.from_iterable(conversations(file, file.read_bytes()) for file in files))
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer = train_tokenizer(texts, model.config["vocab_size"], None)
    tokenizer.chat_template = (HERE.parent / "recipes" / "chat.jinja").read_text()
    save_tokenizer(tokenizer, folder)
    model.with_weights().save_pretrained(folder)
    random.Random(0).shuffle(rows)
    fitting = (
        row for row in rows if len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) <= LENGTH
    )
    lines = [json.dumps(row) + "\n" for row in itertools.islice(itertools.cycle(fitting), number)]
    (folder / "chats.jsonl").write_text("".join(lines))


def started(*words: object, python: Path | str) -> None:
    """Run a program of Python to its end, in the folder of this file, which has our clock."""
    command, environment = [str(python), *map(str, words)], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-3000:]}")


def ours(folder: Path, arguments: argparse.Namespace, *, is_packed: bool) -> Found:
    recipe = folder / "recipe.toml"
    batch, samples = (arguments.rows, "bins") if is_packed else (arguments.batch, "documents")
    values = {"steps": arguments.steps, "batch": RANKS * batch, "samples": samples, "length": LENGTH}
    recipe.write_text(RECIPE.format(folder=folder, transport=arguments.transport, **values))
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as here:
        run = RunDir(Path(here, "run"))
        started("-m", "plait", "train", recipe, "--set", f"run.dir={run.path}", python=sys.executable)
        steps = [record for record in read_metrics(run.metrics) if "loss" in record]
        clocks = [json.loads((run.path / f"clock-{rank}.json").read_text()) for rank in range(RANKS)]
    ends = [tuple(map(sum, zip(*ranks, strict=True))) for ranks in zip(*clocks, strict=True)]
    total = [0, *(record["tokens"] for record in steps)]
    targets = [after - before for before, after in itertools.pairwise(total)]
    return Found(ends, targets, statistics.mean(record["loss"] for record in steps))


def trl(folder: Path, arguments: argparse.Namespace, *, is_packed: bool) -> Found:
    out = folder / "trl.json"
    words = ["--batch", arguments.rows if is_packed else arguments.batch, "--length", LENGTH]
    words += ["--steps", arguments.steps, *["--packed"] * is_packed]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    started(*torchrun, HERE / "trl_peer.py", folder, out, *words, python=arguments.peer_python)
    return Found(**json.loads(out.read_text()))


def has_trl(python: Path) -> bool:
    command = [str(python), "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"]
    return not subprocess.run(command, check=False).returncode


def rows_of(found: dict[str, list[Found]]) -> list[common.Row]:
    """A row for each contender; ratios are those of the same round, by the clock and by the processor."""
    rates = {name: list(zip(*(run.rates() for run in runs), strict=True)) for name, runs in found.items()}
    rows: list[common.Row] = []
    for name, runs in found.items():
        row: common.Row = {"contender": name, "targets_per_s": statistics.median(rates[name][0])}
        row |= {
            "targets": statistics.mean(runs[0].targets),
            "loss": runs[0].loss,
            "separate": runs[0].separate,
        }
        for column, peer in (("ahead", f"TRL {name.split()[1]}"), ("of_padded", "TRL padded")):
            for unit, own, other in zip(("", "_cpu"), rates[name], rates.get(peer, ((), ())), strict=True):
                row[column + unit] = common.ratio(own, other) if other else None
        rows.append(row)
    return rows


def check(found: dict[str, list[Found]]) -> None:
    """End the program unless padded runs have the same targets and mean loss."""
    one, other = found["plait padded"][0], found.get("TRL padded", found["plait padded"])[0]
    if one.targets != other.targets or abs(one.loss - other.loss) > MOST_APART:
        sys.exit(f"not the same training: {one} and {other}")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="where TRL is installed"
    )
    parser.add_argument("--batch", type=int, default=8, help="conversations of a padded micro-batch")
    parser.add_argument("--rows", type=int, default=4, help="rows of a packed micro-batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="auto", choices=["auto", "host", "gloo"], help="ours")
    arguments = common.parse(parser, steps=WARM_UP + 1, rounds=1, batch=2, rows=2)
    model = llama_of(arguments)
    if arguments.smallest:
        model = Llama(model.config | {"vocab_size": 300, "max_position_embeddings": LENGTH}, LENGTH)
    contenders: dict[str, Any] = {"plait": ours}
    if has_trl(arguments.peer_python):
        contenders["TRL"] = trl
    else:
        print(f"TRL: left out, it is not installed in {arguments.peer_python} (`make bench` installs it)")
    found: dict[str, list[Found]] = {
        f"{name} {case}": [] for case in ("padded", "packed") for name in contenders
    }
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        # packed rows have about LENGTH / 64 conversations
        number = arguments.steps * RANKS * max(arguments.batch, arguments.rows * LENGTH // 48)
        prepare_folder(Path(folder), model, number)
        for _ in range(arguments.rounds):
            for name, runs in found.items():
                run = contenders[name.split()[0]]
                runs.append(run(Path(folder), arguments, is_packed=name.endswith("packed")))
        check(found)
    facts = machine() | {"ranks": RANKS, "steps": arguments.steps, "plait's transport": arguments.transport}
    common.report("fine-tuning", rows_of(found), facts, arguments.json)


if __name__ == "__main__":
    main()
