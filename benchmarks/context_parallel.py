"""Context parallelism: our steps on long rows, Ulysses by hand over Gloo, one process, and no communication.

    python benchmarks/context_parallel.py [--ranks 4] [--tokens 4K 16K] [--precisions bf16] [--only WORD ...]

A Llama of 2.8 M parameters with one layer, so that attention takes most of a step of one row of 16,384
tokens: 4 heads of 64, 2 kv heads. One thread for each rank. The contenders live in the same processes and
take turns; a time is that of the slowest rank, of a step with fused AdamW. The yardstick is plain torch in
one process, the other ranks idle: 1 / ranks of it would be perfect, if there are as many cores. "No
communication" is what a rank has to compute, on all ranks at once: its part of the tokens, and an equal share
of one process' attention (`context_peers.py`, which has "Ulysses by hand", too).

  of_no_comm   the step by that without communication, of the same round
  processor_ms of a rank's process, for machines with other work; of_one_process and of_share are ratios
               of it to one process, and to the step without communication
  comm_ms      of the training thread, including the time in which it waits for other ranks
  pairs        of queries and keys that the rank with most of them computes, by an equal share

Before they are measured, all contenders train from the same weights on one row of 1,024 tokens, and have to
get the losses of one process: within 1e-4 in fp32, and 0.1 in bf16, where one process and the peer update
weights of bfloat16, and ours of float32. `loss_apart` is how far off they are.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import common
import tensor_parallel
from context_peers import NO_COMMUNICATION, ULYSSES, no_communication, ulysses
from llama import TOY, Batch, Llama, weights_folder
from plait.bench.report import machine
from plait.comm import World, all_reduce, connect
from plait.plan.context import METHODS
from tensor_parallel import WARM_UP, ours, takes_part
from tensor_peers import DTYPES, ONE_PROCESS, Contender, one_process

LONG = Llama(
    {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    sequence=16384,
)
CHECKED_TOKENS = 1024
MOST_APART = {"fp32": 1e-4, "bf16": 0.1}  # at 5 steps; bfloat16 weights lose small updates, ours are float32
Step = Callable[[Batch], float]
Clocks = list[tuple[float, float]]  # seconds of the processor, and of communication, of each step


KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Pairs(TorchDispatchMode):
    """Counts the pairs of queries and keys whose scores torch's kernel of the CPU computes in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.name() == KERNEL and not args[0].is_meta:
            (batch, heads, queries, _), keys = args[0].shape, args[1].shape[2]
            is_causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
            of_head = queries * (queries + 1) // 2 if is_causal else queries * keys
            self.number += batch * heads * of_head
        return function(*args, **kwargs)


def contenders(precision: str, world: World, weights: Path, arguments: argparse.Namespace) -> list[Contender]:
    """The yardsticks and, of all others, those whose names have one of the words `only`."""

    def wanted(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only)

    found = [one_process(weights, precision), no_communication(weights, precision, world)]
    for method in METHODS:
        name, words = f"plait {method}", f"cp={world.size} cp_method={method}"
        if method != "auto" and wanted(name):
            made = ours(llama(arguments), words, precision, world)
            found.append(replace(made, name=name, passes=made.step))  # its passes have the loss of one rank
    return [*found, ulysses(weights, precision, world)] if wanted(ULYSSES) else found


def llama(arguments: argparse.Namespace) -> Llama:
    if not arguments.smallest:
        return LONG
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    return Llama(TOY.config | heads, sequence=1024)


def pairs_of(contender: Contender, batch: Batch, world: World) -> float:
    """The pairs of the rank that computes most of them, in a step."""
    with Pairs() as pairs:
        if takes_part(contender, world):
            contender.step(batch)
    most = torch.tensor([pairs.number], dtype=torch.float64)
    all_reduce(most, world.group, "max")
    return most.item()


def clocked(step: Step, clocks: Clocks, world: World) -> Step:
    """A step that adds its processor time, and the time in which it communicates."""

    def call(batch: Batch) -> float:
        before_s = time.process_time(), world.clock.seconds
        loss = step(batch)
        clocks.append((time.process_time() - before_s[0], world.clock.seconds - before_s[1]))
        return loss

    return call


def measured(
    found: list[Contender], batch: Batch, world: World, rounds: int
) -> tuple[common.Times, common.Times, common.Times]:
    """Seconds of steps by the clock, of the processor, and of communication, each of the rank where they are
    most."""
    calls: dict[str, Step | None] = {contender.name: None for contender in found}
    clocks: dict[str, Clocks] = {contender.name: [] for contender in found}
    for contender in found:
        if takes_part(contender, world):
            calls[contender.name] = clocked(contender.step, clocks[contender.name], world)
    times = tensor_parallel.measure(calls, batch, world, rounds)
    processor: common.Times = {}
    communication: common.Times = {}
    for name, seconds in clocks.items():
        most = torch.tensor(seconds[WARM_UP:] or [(0.0, 0.0)] * rounds)
        all_reduce(most, world.group, "max")
        processor[name], communication[name] = most.T.tolist()
    return times, processor, communication


def rows_of(precision: str, world: World, weights: Path, arguments: argparse.Namespace) -> list[common.Row]:
    """Makes, checks and measures the contenders of a precision."""
    found = contenders(precision, world, weights, arguments)
    batches = {word: batch_of(llama(arguments), common.size_of(word)) for word in arguments.tokens}
    first = batch_of(llama(arguments), CHECKED_TOKENS)
    trained = [contender for contender in found if contender.name != NO_COMMUNICATION]
    apart = tensor_parallel.check(trained, precision, first, world, MOST_APART)
    pairs = {contender.name: pairs_of(contender, first, world) for contender in found}
    equal_share = pairs[ONE_PROCESS] / world.size
    rows = []
    for word, batch in batches.items():
        times, processor, communication = measured(found, batch, world, arguments.rounds)
        for row in common.rows(f"{precision}, {word}", times, yardstick=ONE_PROCESS, peers=[ULYSSES]):
            name = row["contender"]
            more = {
                "of_no_comm": common.ratio(times[name], times[NO_COMMUNICATION]),
                "processor_ms": 1e3 * statistics.median(processor[name]),
                "of_one_process": common.ratio(processor[name], processor[ONE_PROCESS]),
                "of_share": common.ratio(processor[name], processor[NO_COMMUNICATION]),
                "comm_ms": 1e3 * statistics.median(communication[name]),
                "least_comm_ms": 1e3 * min(communication[name]),
                "pairs": pairs[name] / equal_share,
                "loss_apart": apart.get(name),
            }
            rows.append(row | more)
    return rows


def batch_of(model: Llama, num_tokens: int) -> Batch:
    torch.manual_seed(0)  # the same row on all ranks
    return replace(model, sequence=num_tokens).batch(1)


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport=arguments.transport)
    rows = []
    with weights_folder(llama(arguments), world) as weights:
        for precision in arguments.precisions:
            rows += rows_of(precision, world, weights, arguments)
            gc.collect()  # its contenders end before the next one's begin
    if world.rank == 0:
        facts = machine() | {
            "ranks": world.size,
            "load": f"{os.getloadavg()[0]:.1f}",
            "plait's transport": world.group.transport.name,
            "peer's backend": dist.get_backend(),
        }
        common.report("context parallelism", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose names have one of these words"
    )
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--tokens", nargs="+", default=["4K", "16K", "32K"], help="of a row")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "host", "gloo"], help="ours; the peer has Gloo"
    )
    arguments = common.parse(parser, precisions=["bf16"], tokens=["1K"], rounds=1)
    common.on_ranks(__file__, arguments.ranks, lambda: worker(arguments))


if __name__ == "__main__":
    main()
