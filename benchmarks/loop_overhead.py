"""Cost of the training loop: `plait train` on one rank and a bare torch loop of the same model.

    python benchmarks/loop_overhead.py [--json FILE]

The model and data of recipes/demo.toml. The bare loop has its batches in memory and does what a step cannot
do without: forward, backward, clipping, fused AdamW, the loss's value. The training loop has everything on:
loader, schedule, metrics.jsonl, TensorBoard, progress, signals, the non-finite check. Its time per step is
that of a long run minus that of a short one, so that start, last checkpoint and export cancel.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import common
from plait.bench.report import machine
from plait.comm import connect
from plait.data.dataset import open_store
from plait.models import causal_lm_on_meta
from plait.train.config import Recipe
from plait.train.prepare import prepare
from plait.train.trainer import train

SHORT = 5


def plait_run(
    arguments: argparse.Namespace, folder: Path, precision: str, steps: int
) -> tuple[float, Recipe]:
    """Seconds of a whole run of `steps` steps."""
    run = folder / f"{precision}-{steps}-{time.monotonic_ns()}"
    sets = [
        f"run.dir={run}",
        f"run.steps={steps}",
        f"run.batch={arguments.batch}",
        "run.log_every=10",
        "run.evaluate_every=0",
        "run.checkpoint_every=0",
        "schedule.warmup=1",
        "sample.tokens=0",
        f"data.dir={folder / 'data'}",
    ]
    recipe = prepare(arguments.recipe, sets=sets, plan=f"dp=1 precision={precision}").recipe
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        train(recipe, connect())
    return time.perf_counter() - begin, recipe


def bare_run(recipe: Recipe, precision: str, steps: int) -> float:
    """Seconds of `steps` steps of the loop that one would write without any library."""
    assert recipe.model.config is not None
    sequence, batch = recipe.data.sequence, recipe.run.batch
    model = AutoModelForCausalLM.from_config(causal_lm_on_meta(recipe.model.config).config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(open_store(recipe.data, verify=False).train.read(0, 64 * sequence)).long()
    windows = tokens.view(-1, sequence)
    times = []
    for number in range(steps + 2):
        ids = windows[torch.arange(number, number + batch) % len(windows)]
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - begin)
    return sum(times[2:])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"))
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    arguments = common.parse(parser, recipe=Path("recipes/tiny.toml"), steps=3, rounds=1, precisions=["bf16"])
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in arguments.precisions:
            loops: common.Times = {"bare torch loop": [], "plait train": []}
            for _ in range(arguments.rounds):
                short_s, recipe = plait_run(arguments, Path(folder), precision, SHORT)
                loops["bare torch loop"].append(
                    bare_run(recipe, precision, arguments.steps) / arguments.steps
                )
                long_s, _ = plait_run(arguments, Path(folder), precision, SHORT + arguments.steps)
                loops["plait train"].append((long_s - short_s) / arguments.steps)
            rows += common.rows(precision, loops, yardstick="bare torch loop", peers=("bare torch loop",))
            print(f"{precision}: {statistics.median(loops['plait train']) * 1e3:.1f} ms a step")
    common.report("the loop's own cost, one rank, one thread", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
