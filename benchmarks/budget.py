"""Processor time of a step: by part in a pipeline and with tensor parallelism; Python by unit and gradient.

    python benchmarks/budget.py [--precisions bf16] [--rounds 7] [--json FILE]

The tables of docs/performance.md. First a step of `pipeline.py` under 1f1b, on both ranks, next to torch's
Schedule1F1B: milliseconds of a rank's processor by part, without other parts inside of it, medians of rounds
in which the two take turns. The sums of gradients of float32 products that add are parts of them. The same of
a step of `tensor_parallel.py` in bf16 with compiled blocks, of tp=1 on the first rank and tp=2 on both; the
first also has all of a step of plain torch, uncompiled.

Then models of blocks whose parameters have two elements, on one rank, next to a bare torch loop (forward,
backward, fused AdamW), in microseconds: a `unit` is what a block adds to a step, a `hook` what one more
parameter of a block adds, both less what they add to the bare loop.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import common
import pipeline_peers
import plait
import tensor_parallel
import tensor_peers
from llama import Batch, llama_of, weights_folder
from peers import Step
from pipeline import MICROS, PLANS, RANKS, ours, stops
from plait.bench.report import machine
from plait.comm import World, connect
from plait.comm.objects import gather_texts
from plait.comm.shm.transport import ShmTransport
from plait.engine import loss
from plait.engine.stage import StageRunner
from plait.engine.update import LocalUpdater
from plait.parallel.compile import CompiledForward
from plait.parallel.linear_products import PlainProducts
from plait.parallel.pipeline.p2p import Outbox, PostedReceive
from plait.parallel.zero import grad_reduce
from plait.parallel.zero.grad_buffer import GradBuffer
from plait.parallel.zero.sharded_model import ShardedStage

OURS, TORCH = "plait 1f1b", "torch 1F1B"
REST = "all else"
Parts = dict[str, list[tuple[Any, str]]]
PARTS: Parts = {
    "forward": [(StageRunner, "outputs"), (StageRunner, "summed_loss"), (PipelineStage, "forward_one_chunk")],
    "backward": [
        (ShardedStage, "backward"),
        (ShardedStage, "backward_weight"),
        (PipelineStage, "backward_one_chunk"),
    ],
    "sums of gradients": [(GradBuffer, "add"), (pipeline_peers, "_add_in_float32")],
    "norm": [(grad_reduce, "squared_norm")],
    "optimizer": [(LocalUpdater, "apply"), (pipeline_peers.Float32Weights, "update")],
    "messages": [(PostedReceive, "wait"), (Outbox, "send_tensors"), (torch.distributed, "batch_isend_irecv")],
}
BLOCKS, PARAMETERS = (8, 64), (1, 16)
STEPS = 4  # between two readings of the clock


class PartTimes:
    """Processor time of the calling thread by part, without the parts that it calls."""

    def __init__(self, parts: Parts) -> None:
        self.names = [*parts, REST, "step"]
        self.ms: dict[str, float] = defaultdict(float)
        self._parts = [REST]
        self._since = time.process_time()
        for part, places in parts.items():
            for owner, name in places:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._parts.pop()

        return call

    def switch(self) -> None:
        """Add the time since the last switch to the current part."""
        now = time.process_time()
        self.ms[self._parts[-1]] += 1e3 * (now - self._since)
        self._since = now

    def of(self, step: Callable[[], object]) -> dict[str, float]:
        self.switch()
        self.ms.clear()
        step()
        self.switch()
        return {**self.ms, "step": sum(self.ms.values())}


def by_part(
    arguments: argparse.Namespace, precision: str, world: World, times: PartTimes
) -> list[common.Row]:
    """Rows of all ranks, on rank 0."""
    model = llama_of(arguments)
    with weights_folder(model, world) as folder:
        shape = pipeline_peers.Shape(stops(arguments), MICROS, 1, model.sequence)
        steps = {
            OURS: ours(OURS, model, PLANS[OURS], precision, world)[0].step,
            TORCH: pipeline_peers.torch_pipeline(TORCH, folder, precision, shape).step,
        }
        torch.manual_seed(0)
        return measured(steps, model.batch(MICROS), precision, world, times, arguments.rounds)


def measured(
    steps: dict[str, Step], batch: Batch, precision: str, world: World, times: PartTimes, num_rounds: int
) -> list[common.Row]:
    """Rows of all ranks, on rank 0, of steps that take turns. Rank 0 has steps that others have not."""
    found = defaultdict[str, list[dict[str, float]]](list)
    names = json.loads(gather_texts(json.dumps([*steps]), world.group, world.device)[0])
    for number in range(num_rounds + 1):
        for name in names[:: 1 if number % 2 else -1]:
            world.barrier()
            if name in steps:
                spent = times.of(partial(steps[name], batch))
                if number:
                    found[name].append(spent)
    own = {
        name: {part: statistics.median(r.get(part, 0.0) for r in rounds) for part in times.names}
        for name, rounds in found.items()
    }
    ranks = [json.loads(text) for text in gather_texts(json.dumps(own), world.group, world.device)]
    return [
        {"case": f"{precision}, rank {rank}", "contender": name, **parts}
        for rank, of_rank in enumerate(ranks)
        for name, parts in of_rank.items()
    ]


def tensor_parts(*, compiled: bool) -> Parts:
    called: list[list[tuple[Any, str]]] = [[], []]  # by compiled code
    if compiled:
        import_module("torch._inductor.lowering")  # adds the products
        products = torch._inductor.select_algorithm.extern_kernels
        called = [[(products, "mm"), (products, "addmm")], [(products, "bmm")]]
    own = "output", "input_gradient", "weight_gradient"
    return {
        "products": [*called[0], *((PlainProducts, name) for name in own)],
        "products of attention": called[1],
        "head and loss": [(loss, "head_loss")],
        "other forward of blocks": [(CompiledForward, "__call__")],
        "other backward": [(ShardedStage, "backward")],
        "messages": [(ShmTransport, name) for name in ("run", "start", "_finish")],
        **{name: PARTS[name] for name in ("sums of gradients", "norm", "optimizer")},
    }


def of_tensor(arguments: argparse.Namespace, world: World) -> list[common.Row]:
    """Rows of all ranks, on rank 0. Uncompiled in the smallest form."""
    model, lone = llama_of(arguments), World.alone(world.device)
    plans, compiled = {"tp=1": lone, f"tp={RANKS}": world}, not arguments.smallest
    words = f"compile={str(compiled).lower()}"
    with weights_folder(model, world) as folder:
        steps = {
            f"plait {plan}": tensor_parallel.ours(model, f"{plan} {words}", "bf16", plans[plan]).step
            for plan in plans
            if world.rank == 0 or plans[plan] is world
        }
        if world.rank == 0:
            steps[tensor_peers.ONE_PROCESS] = tensor_peers.one_process(folder, "bf16").step
        times = PartTimes(tensor_parts(compiled=compiled))
        torch.manual_seed(0)
        batch = model.batch(tensor_parallel.SEQUENCES)
        return measured(steps, batch, "bf16", world, times, arguments.rounds)


class Block(nn.Module):
    """A block whose kernels cost next to nothing."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def bare(blocks: list[nn.Module]) -> Step:
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: Batch) -> float:
        loss = model(batch["x"]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def engine_step(blocks: list[nn.Module], plan: str) -> Step:
    alone = World.alone(torch.device("cpu"))
    engine = plait.parallelize(blocks, plan, loss=lambda outputs, _: (outputs.sum(), 1), world=alone)
    return lambda batch: engine.step(batch).loss


def by_unit(arguments: argparse.Namespace) -> list[str]:
    """Microseconds by unit and by hook, in words, of each plan."""
    make: dict[str, Callable[[list[nn.Module]], Step]] = {"bare": bare}
    make |= {plan: partial(engine_step, plan=plan) for plan in ("dp=1", "dp=1 zero=3")}
    sizes, batch = list(product(BLOCKS, PARAMETERS)), {"x": torch.ones(1, 2)}
    steps = {
        (name, size): maker([Block(size[1]) for _ in range(size[0])])
        for name, maker in make.items()
        for size in sizes
    }
    times = defaultdict[Any, list[float]](list)
    for _ in range(arguments.rounds):
        for key, step in steps.items():
            step(batch)
            begin = time.process_time()
            for _ in range(STEPS):
                step(batch)
            times[key].append(1e6 * (time.process_time() - begin) / STEPS)
    us = {key: statistics.median(of_key) for key, of_key in times.items()}

    def of_block(plan: str, parameters: int) -> float:
        few, many = ((blocks, parameters) for blocks in BLOCKS)
        above = [us[plan, size] - us["bare", size] for size in (few, many)]
        return (above[1] - above[0]) / (BLOCKS[1] - BLOCKS[0])

    words = []
    for plan in list(make)[1:]:
        least, most = (of_block(plan, parameters) for parameters in PARAMETERS)
        hook = (most - least) / (PARAMETERS[1] - PARAMETERS[0])
        words.append(f"{plan}: unit {least - hook:.1f} us, hook {hook:.2f} us")
    return words


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport="host")
    units = by_unit(arguments) if world.rank == 0 else []
    world.barrier()
    times, rows = PartTimes(PARTS), list[common.Row]()
    for precision in arguments.precisions:
        rows += by_part(arguments, precision, world, times)
    tensor_rows = of_tensor(arguments, world)
    if world.rank == 0:
        facts = machine() | dict(word.split(": ") for word in units)
        common.report("processor time of a step by part, ms", rows, facts, arguments.json)
        json_path = (
            None if arguments.json is None else arguments.json.with_stem(f"{arguments.json.stem}_tensor")
        )
        common.report("processor time of a step of tensor parallelism, ms", tensor_rows, facts, json_path)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = common.parse(parser, precisions=["bf16"], rounds=1)
    arguments.stages = ()
    common.on_ranks(__file__, RANKS, lambda: worker(arguments))


if __name__ == "__main__":
    main()
