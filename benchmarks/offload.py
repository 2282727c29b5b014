"""Offload: under a cap on GPU memory, the largest model that trains without it, and one 10 times larger with.

    python benchmarks/offload.py [--cap-gib 2] [--times 10] [--json FILE]

The model is a Llama that grows by layers. Both plans compute in bf16 and recompute blocks in backward; what
they differ in is `offload=cpu`. Each trial is a process of its own, so that one that ran out of memory leaves
no memory allocated, with torch's own cap on what its allocator may take from the GPU
(`torch.cuda.set_per_process_memory_fraction`). A model trains when its loss falls on a repeated batch. The
host needs about 20 bytes per parameter of the larger model. Without a GPU there is nothing to measure.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import common
import plait
from plait.bench.report import machine
from plait.comm import World
from plait.models import causal_lm_on_meta

PLAN = "dp=1 zero=3 precision=bf16 recompute=full"
OFFLOADED = "dp=1 zero=3 precision=bf16 offload=cpu recompute=full"
ADAMW = {"lr": 1e-4, "weight_decay": 0.1}
WIDTH = 1024
VOCABULARY = 8192
MOST_LAYERS = 4096
Found = dict[str, Any]  # what a trial found; {"fits": False} when it ran out of GPU memory


def llama(layers: int, sequence: int) -> dict[str, Any]:
    """12.6 M parameters a layer, and 16.8 M in embedding and head."""
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2752,
        "num_hidden_layers": layers,
        "num_attention_heads": WIDTH // 64,
        "max_position_embeddings": sequence,
        "tie_word_embeddings": False,
    }


def trial(arguments: argparse.Namespace) -> Found:
    """Trains for some steps on one batch under the cap, in this process."""
    device = torch.device("cuda", 0)
    cap_bytes = arguments.cap_gib * 2**30
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(
        cap_bytes / torch.cuda.get_device_properties(device).total_memory
    )
    torch.set_num_threads(os.cpu_count() or 1)  # for the optimizer on the host
    torch.manual_seed(0)
    try:
        return train(arguments, device)
    except torch.OutOfMemoryError:
        return {"fits": False}


def train(arguments: argparse.Namespace, device: torch.device) -> Found:
    model = causal_lm_on_meta(llama(arguments.trial, arguments.sequence))
    engine = plait.parallelize(model, arguments.plan, optimizer_args=ADAMW, world=World.alone(device))
    ids = torch.randint(0, VOCABULARY, (arguments.batch, arguments.sequence), device=device)
    losses, seconds = [], []
    for _ in range(arguments.steps):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        result = engine.step({"input_ids": ids, "labels": ids})
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(result.loss)
    if not losses[-1] < losses[0]:
        sys.exit(f"{arguments.trial} layers under {arguments.plan} do not train: losses {losses}")
    return {
        "fits": True,
        "parameters": engine.num_parameters,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "step_s": statistics.median(seconds[1:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def in_a_process(arguments: argparse.Namespace, plan: str, layers: int) -> Found:
    """A trial in a fresh process. Ends the program when the trial fails otherwise than for GPU memory."""
    command = [sys.executable, str(Path(__file__).resolve()), "--trial", str(layers), "--plan", plan]
    for key in ("cap_gib", "batch", "sequence", "steps"):
        command += [f"--{key.replace('_', '-')}", str(getattr(arguments, key))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the trial of {layers} layers under {plan} failed")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    print(f"{plan}, {layers} layers: {'trains' if found['fits'] else 'out of memory'}", flush=True)
    return found


def largest(attempt: Callable[[int], Found]) -> tuple[int, Found]:
    """The most layers that fit, and what their trial found: doubled until too many, then halved between."""
    fits, found, too_many = 0, {"fits": False}, 1
    while (now := attempt(too_many))["fits"]:
        fits, found, too_many = too_many, now, 2 * too_many
        if too_many > MOST_LAYERS:
            sys.exit("the model never runs out of memory: is the cap smaller than the GPU?")
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        now = attempt(middle)
        if now["fits"]:
            fits, found = middle, now
        else:
            too_many = middle
    return fits, found


def layers_of_times(layers: int, times: float, sequence: int) -> int:
    """Layers of a model with at least `times` the parameters of one with `layers`."""

    def size(num_layers: int) -> int:
        return causal_lm_on_meta(llama(num_layers, sequence)).num_parameters()

    per_layer = size(2) - size(1)
    return layers + -int(-(times - 1) * size(layers) // per_layer)


def row(case: str, layers: int, found: Found, baseline: Found, cap_bytes: float) -> common.Row:
    return {
        "case": case,
        "layers": layers,
        "parameters": found["parameters"],
        "times_larger": found["parameters"] / baseline["parameters"],
        "peak_bytes": found["peak_bytes"],
        "reserved_of_cap": found["peak_reserved_bytes"] / cap_bytes,
        "step_s": found["step_s"],
        "first_loss": found["first_loss"],
        "last_loss": found["last_loss"],
    }


def compare(arguments: argparse.Namespace) -> None:
    layers, without = largest(lambda number: in_a_process(arguments, PLAN, number))
    if not layers:
        sys.exit("not even one layer trains under this cap: --cap-gib")
    more = layers_of_times(layers, arguments.times, arguments.sequence)
    offloaded = in_a_process(arguments, OFFLOADED, more)
    if not offloaded["fits"]:
        sys.exit(f"with offload, {more} layers do not fit: not {arguments.times:g} times larger")
    cap_bytes = arguments.cap_gib * 2**30
    rows = [
        row(PLAN, layers, without, without, cap_bytes),
        row(OFFLOADED, more, offloaded, without, cap_bytes),
    ]
    facts = machine() | {
        "gpu": torch.cuda.get_device_name(),
        "cap": f"{arguments.cap_gib:g} GiB",
        "batch": f"{arguments.batch} x {arguments.sequence}",
    }
    common.report("offload: how large a model trains under a cap", rows, facts, arguments.json)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--cap-gib", type=float, default=2.0, help="what the GPU is taken to have")
    parser.add_argument("--times", type=float, default=10.0, help="how much larger the offloaded model is")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trial", type=int, metavar="LAYERS", help="only this trial, in this process")
    parser.add_argument("--plan", default=PLAN, help="of the only trial")
    arguments = common.parse(parser, cap_gib=1.0, steps=2)
    if not torch.cuda.is_available():
        print("offload: left out, it measures GPU memory and there is no GPU here")
    elif arguments.trial is not None:
        print(json.dumps(trial(arguments)))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
