"""Tokens per second of `engine.generate`, next to transformers' `generate` on one process, and on two ranks.

    python benchmarks/generate.py [--rounds 3] [--rows 8] [--prompt 64] [--tokens 64]

The Llama of the other benchmarks, in float32, greedy, one thread for each rank; contenders are processes of
their own, and take turns in every round. `1 process`: transformers' `generate`, and ours under `dp=1`. `2
ranks`: the same prompts under `tp=2` and `pp=2`; under `dp=2 zero=3`, each rank has half of them.

`tokens_per_s` are new tokens of all prompts, the prompts' own forward included: the median of all rounds.
`of_one_process`: the ratio to ours under `dp=1`, of the same round; `by_processor`: of the processor time of
rank 0, which other programs disturb less. All contenders generate the same tokens.
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

import torch

import common
import plait
from llama import llama_of
from plait.bench.report import machine

CASES = {"transformers": 1, "dp=1": 1, "tp=2": 2, "pp=2": 2, "dp=2 zero=3": 2}  # and their ranks


def contend(plan: str, arguments: argparse.Namespace) -> None:
    """Be a rank of a contender; the first one writes the seconds, and the tokens."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    llama = llama_of(arguments)
    shape, generator = (arguments.rows, arguments.prompt), torch.Generator().manual_seed(0)
    ids = torch.randint(0, llama.config["vocab_size"], shape, generator=generator)
    if plan == "transformers":
        model: Any = llama.with_weights()
        model.config.use_cache = True

        def run(tokens: int) -> list[list[int]]:
            given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
            lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            found = model.generate(ids, **given, **lengths)[:, ids.shape[1] :]
            return [row.tolist() for row in found]
    else:
        engine = plait.parallelize(llama.on_meta(), plan, optimizer=torch.optim.SGD)
        own = engine.shard({"input_ids": ids}, trains=False)["input_ids"].tolist()

        def run(tokens: int) -> list[list[int]]:
            sampling = plait.Sampling(max_new_tokens=tokens, stop_tokens=())
            return [each.ids for each in engine.generate(own, sampling)]

    run(2)
    begin, processor = time.perf_counter(), time.process_time()
    found = run(arguments.tokens)
    seconds = [time.perf_counter() - begin, time.process_time() - processor]
    if os.environ.get("RANK", "0") == "0":
        (arguments.folder / "found.json").write_text(json.dumps([seconds, found]))


def started(plan: str, folder: Path, arguments: argparse.Namespace) -> tuple[list[float], list[list[int]]]:
    """Run a contender to its end. Returns the seconds, by the clock and of rank 0's processor, and the tokens
    of its rows."""
    ranks = CASES[plan]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [__file__, "--be", plan, "--folder", folder, *(["--smallest"] if arguments.smallest else [])]
    words += ["--rows", arguments.rows, "--prompt", arguments.prompt, "--tokens", arguments.tokens]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-3000:]}")
    seconds, found = json.loads((folder / "found.json").read_text())
    return seconds, found


def ratio(seconds: dict[str, list[list[float]]], plan: str, kind: int) -> float:
    """How much faster than ours on one process. `kind` of seconds: 0 of the clock, 1 of the processor."""
    one, own = ([pair[kind] for pair in seconds[name]] for name in ("dp=1", plan))
    return common.ratio(one, own)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="prompts, over all ranks")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each")
    parser.add_argument("--be", choices=sorted(CASES), help="be a rank of this contender, in --folder")
    parser.add_argument("--folder", type=Path)
    arguments = common.parse(parser, rounds=1, rows=2, prompt=4, tokens=3)
    if arguments.be:
        contend(arguments.be, arguments)
        return
    seconds: dict[str, list[list[float]]] = {plan: [] for plan in CASES}
    tokens: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        for _ in range(arguments.rounds):
            for plan, times in seconds.items():
                elapsed_s, found = started(plan, Path(folder), arguments)
                tokens = tokens or found  # transformers'
                if found != tokens[: len(found)]:
                    sys.exit(f"not the same tokens: {plan}")
                times.append(elapsed_s)
    count = arguments.rows * arguments.tokens
    rows: list[common.Row] = [
        {
            "contender": plan,
            "ranks": CASES[plan],
            "tokens_per_s": statistics.median(count / clock for clock, _ in times),
            "of_one_process": ratio(seconds, plan, 0),
            "by_processor": ratio(seconds, plan, 1),
        }
        for plan, times in seconds.items()
    ]
    facts = machine() | {"rows": arguments.rows, "prompt": arguments.prompt, "tokens": arguments.tokens}
    common.report("generation", rows, facts, arguments.json)


if __name__ == "__main__":
    main()
