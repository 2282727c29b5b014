"""Compressed exports of one model: their size, and their perplexity on text that it was not trained on.

    python benchmarks/compress.py [--run runs/demo] [--recipe recipes/demo.toml] [--tuning-steps 100]

The run is trained first if there is none. Each row is an export of it (`plait export --weights --sparsity`),
scored from its files as by `plait evaluate`. `tuned`: the export with 2:4 sparsity, trained on with the
recipe's data and model.keep_zeros, and exported again. `size` is that of the safetensors files, `linear` the
part of it that the blocks' linear layers and experts have (codes, scales, shapes); `zeros` of their weights.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from plait.bench.report import machine
from plait.checkpoint import HuggingFaceFiles
from plait.checkpoint.compress import Compression
from plait.comm import World, connect
from plait.models import causal_lm_on_meta
from plait.models.linear_weights import block_linears, expert_weights
from plait.plan import format_bytes
from plait.train.evaluate import EvaluationRequest, evaluate
from plait.train.export import export
from plait.train.run_dir import RunDir

EXPORTS: dict[str, tuple[str, Any, str | None]] = {  # dtype, weights, sparsity
    "fp32": ("fp32", None, None),
    "bf16": ("bf16", None, None),
    "int8": ("bf16", "int8", None),
    "fp8": ("bf16", "fp8", None),
    "int4": ("bf16", "int4", None),
    "0.5": ("fp32", None, "0.5"),
    "2:4": ("fp32", None, "2:4"),
    "2:4 int8": ("bf16", "int8", "2:4"),
}
TUNED = {"2:4 tuned": ("fp32", None), "2:4 tuned, int8": ("bf16", "int8")}


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--run", type=Path, default=Path("runs/demo"))
    made.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"))
    made.add_argument("--set", action="append", default=[], help="of the recipe, for both trainings")
    made.add_argument("--tuning-steps", type=int, default=100)
    made.add_argument("--tuning-lr", type=float, default=5e-4)
    made.add_argument(
        "--text", default="src/plait/data/d*.py", help="a source of documents for plait evaluate"
    )
    small = {"recipe": Path("recipes/tiny.toml"), "tuning_steps": 2, "text": "README.md"}
    args = common.parse(made, **small)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.smallest:
            args.run, args.set = folder / "run", ["run.steps=4", "run.evaluate_every=0"]
            args.set += [f"data.dir={folder / 'data'}", "run.batch=2"]
        report(rows(args, folder), args)


def rows(args: Any, folder: Path) -> list[common.Row]:
    sets = [word for each in args.set for word in ("--set", each)]
    if not (args.run / "recipe.json").exists():
        plait("train", args.recipe, "--set", f"run.dir={args.run}", *sets)
    world = connect(device="cpu")
    outs = {name: folder / str(number) for number, name in enumerate(EXPORTS)}
    found = [row(name, args, world, args.run, out, *EXPORTS[name]) for name, out in outs.items()]
    pruned, tuned = outs["2:4"], folder / "tuned"
    changes = {
        "model.config": "", "model.path": pruned, "model.pretrained": "true", "model.keep_zeros": "true",
        "run.steps": args.tuning_steps, "run.evaluate_every": 0, "optimizer.lr": args.tuning_lr,
        "schedule.warmup": args.tuning_steps // 10, "run.dir": tuned,
    }  # fmt: skip
    changed = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    plait("train", args.recipe, *sets, *changed)
    for name, options in TUNED.items():
        found.append(row(name, args, world, tuned, folder / f"tuned-{options[0]}", *options))
    return found


def row(
    name: str,
    args: Any,
    world: World,
    run: Path,
    out: Path,
    dtype: str,
    weights: Any,
    sparsity: str | None = None,
) -> common.Row:
    """Export, evaluate, measure."""
    export(RunDir(run), out, dtype, compression=Compression.parse(weights, sparsity))
    scores = evaluate(EvaluationRequest(str(out), args.text, "dp=1"), world).to_values()
    files, model = HuggingFaceFiles.open(out), causal_lm_on_meta(out)
    names = [*block_linears(model), *expert_weights(model)]
    with files.reader(model) as reader:
        tensors = [reader.read_full(f"weights/{each}") for each in names]
    zeros = sum(int((tensor == 0).sum()) for tensor in tensors) / sum(tensor.numel() for tensor in tensors)
    layers = {each.removesuffix(".weight") for each in names}
    sizes = {key: entry.stop - entry.start for key, (_, entry) in files.entries.items()}
    return {
        "export": name,
        "bytes": sum(sizes.values()),
        "linear_bytes": sum(size for key, size in sizes.items() if key.rpartition(".")[0] in layers),
        "zeros": zeros,
        "perplexity": scores["perplexity"],
    }


def report(found: list[common.Row], args: Any) -> None:
    first = found[0]
    for each in found:
        each["size"] = f"{format_bytes(each['bytes'])} ({each['bytes'] / first['bytes']:.0%})"
        linear = each["linear_bytes"] / first["linear_bytes"]
        each["linear"] = f"{format_bytes(each['linear_bytes'])} ({linear:.0%})"
        each["of_fp32"] = each["perplexity"] / first["perplexity"]
    common.report("compressed exports", found, {**machine(), "text": args.text}, args.json)


def plait(*words: object) -> None:
    """Run a command of its own processes; print its output if it fails."""
    command = [sys.executable, "-m", "plait", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
