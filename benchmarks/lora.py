"""LoRA: our step next to PEFT in plain torch on one process, and next to transformers' Trainer on two ranks.

    python benchmarks/lora.py [--rounds 3] [--steps 10]

A Llama with LoRA of rank 8 on all linear layers: base in bf16, adapters in float32, bf16 compute, AdamW,
one thread for each rank. Each contender runs in processes of its own, with the same rows; they take turns in
every round. `1 process`: PEFT's model under autocast and torch's AdamW, and ours under `dp=1`. `2 ranks`: the
Trainer (DDP on Gloo), and ours under `dp=2`; all ranks are started by torchrun.

`seconds` are of a step, after the first ones, the median of all rounds. `ahead`: the other's seconds by ours,
of the same round. `loss` is the mean of all steps, on which both must agree. `bytes_ratio`: of a checkpoint
of the adapter and one of all weights with their states, of the same model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import common
import plait
from llama import llama_of
from plait.bench.report import machine
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach

WARM_UP = 2
MOST_APART = 3e-2  # mean losses, in bf16
LR = 1e-3
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
CASES = {"ours, 1 process": 1, "plain torch": 1, "ours, 2 ranks": 2, "Trainer": 2}
PEERS = {"ours, 1 process": "plain torch", "ours, 2 ranks": "Trainer"}


def rows_of(folder: Path, steps: int, samples: int) -> list[torch.Tensor]:
    """The rows of each step, of all ranks."""
    facts = json.loads((folder / "facts.json").read_text())
    generator = torch.Generator().manual_seed(0)
    shape = (samples, facts["sequence"])
    return [torch.randint(0, facts["vocabulary"], shape, generator=generator) for _ in range(steps)]


def of_peft(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base.config.use_cache = False
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))


def ours(folder: Path, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = attach(causal_lm_on_meta(folder), LORA)
    options = {"lr": LR, "weight_decay": 0.0}
    engine = plait.parallelize(
        model, f"dp={ranks} precision=bf16", weights=folder, optimizer_args=options, clip_norm=1.0
    )
    ends, losses = [], []
    for ids in rows_of(folder, arguments.steps, arguments.batch):
        losses.append(engine.step(engine.shard({"input_ids": ids, "labels": ids})).loss)
        ends.append(time.perf_counter())
    if ranks == 1 and not (folder / "adapter").exists():
        engine.save(folder / "adapter")
    return ends, losses


def plain(folder: Path, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    model = of_peft(folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    ends, losses = [], []
    for ids in rows_of(folder, arguments.steps, arguments.batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return ends, losses


def trainer(folder: Path, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = torch.cat(rows_of(folder, arguments.steps, arguments.batch))
    options = TrainingArguments(
        str(folder / "trainer"), max_steps=arguments.steps, per_device_train_batch_size=arguments.batch // 2,
        learning_rate=LR, weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant", bf16=True,
        use_cpu=True, save_strategy="no", logging_steps=arguments.steps, report_to=[], disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    done = Trainer(of_peft(folder), options, train_dataset=data, callbacks=[Clock()]).train()
    torch.distributed.destroy_process_group()  # else Gloo's threads abort the process, at times
    return ends, [done.training_loss]


PROGRAMS = {"ours": ours, "plain": plain, "Trainer": trainer}


def contend(name: str, arguments: argparse.Namespace) -> None:
    """Be one process of a contender; the first one writes what it found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = arguments.folder
    ends, losses = PROGRAMS[name](folder, arguments)
    if os.environ.get("RANK", "0") == "0":
        seconds = (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)
        (folder / "found.json").write_text(json.dumps([seconds, statistics.mean(losses)]))


def started(name: str, folder: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Run a contender to its end. Returns the seconds of a step, and the mean loss."""
    ranks = CASES[name]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [__file__, "--be", name.split()[0].rstrip(","), "--folder", folder]
    words += ["--steps", arguments.steps, "--batch", arguments.batch]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-3000:]}")
    seconds, loss = json.loads((folder / "found.json").read_text())
    return seconds, loss


def prepare_folder(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the base in bf16, and a checkpoint of all of its weights after a step, with their states."""
    model = llama_of(arguments)
    base: Any = model.with_weights()
    base.to(torch.bfloat16).save_pretrained(folder)
    facts = {"vocabulary": model.config["vocab_size"], "sequence": model.sequence}
    (folder / "facts.json").write_text(json.dumps(facts))
    engine = plait.parallelize(causal_lm_on_meta(folder), "dp=1 precision=bf16", weights=folder)
    engine.step(model.batch(1))
    engine.save(folder / "full")


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, over all ranks")
    parser.add_argument("--be", choices=sorted(PROGRAMS), help="be a process of this contender, in --folder")
    parser.add_argument("--folder", type=Path)
    arguments = common.parse(parser, steps=WARM_UP + 1, rounds=1, batch=2)
    if arguments.be:
        contend(arguments.be, arguments)
        return
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as name:
        folder = Path(name)
        prepare_folder(folder, arguments)
        for _ in range(arguments.rounds):
            for name, runs in found.items():
                runs.append(started(name, folder, arguments))
        bytes_ratio = bytes_in(folder / "adapter") / bytes_in(folder / "full")
    rows: list[common.Row] = []
    for name, runs in found.items():
        seconds, losses = zip(*runs, strict=True)
        row: common.Row = {"contender": name, "ranks": CASES[name], "seconds": statistics.median(seconds)}
        row |= {"loss": losses[0], "ahead": None, "bytes_ratio": None}
        if name in PEERS:
            theirs, their_losses = zip(*found[PEERS[name]], strict=True)
            if abs(losses[0] - their_losses[0]) > MOST_APART:
                sys.exit(f"not the same training: {name} {losses[0]}, {PEERS[name]} {their_losses[0]}")
            row |= {"ahead": common.ratio(theirs, seconds), "bytes_ratio": bytes_ratio}
        rows.append(row)
    facts = machine() | {"steps": arguments.steps, "rows": arguments.batch}
    common.report("LoRA", rows, facts, arguments.json)


if __name__ == "__main__":
    main()
