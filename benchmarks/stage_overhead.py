"""Overhead of our step over a bare torch loop: one rank, ZeRO 3, the 8-layer Llama.

    python benchmarks/stage_overhead.py [--plan "dp=1 zero=3"] [--json FILE]

One rank does not communicate, and what is above the bare loop is our own Python: hooks, units, views. The
bare loop does the same arithmetic in the same precision: the loss, backward, the gradient's norm, clipping,
fused AdamW, and one number for the reader. In bf16 its weights are bfloat16 with float32 masters, as ours
are. The two take turns, one thread. The bar is 1.03.
"""

import time

import torch
from transformers import AutoModelForCausalLM

import common
import plait
from llama import Batch, Llama, llama_of
from peers import ADAMW, Step, groups
from plait.bench.report import machine
from plait.comm import World

BARE = "bare torch loop"
CLIP_NORM = 1.0
WARM_UP = 3


def ours(model: Llama, plan: str) -> Step:
    engine = plait.parallelize(
        model.on_meta(),
        plan,
        optimizer_args=ADAMW,
        clip_norm=CLIP_NORM,
        world=World.alone(torch.device("cpu")),
    )
    return lambda batch: engine.step(batch).loss


def bare(llama: Llama, precision: str) -> Step:
    model = AutoModelForCausalLM.from_config(llama.on_meta().config)
    optimizer = torch.optim.AdamW(groups(model), fused=True, **ADAMW)
    return _with_masters(model, optimizer) if precision == "bf16" else _plain(model, optimizer)


def _plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    weights = list(model.parameters())

    def step(batch: Batch) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _with_masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The optimizer keeps the float32 parameters that it was made with; the model gets bfloat16 ones."""
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = []
    for master in masters:
        owner, _, name = names[master].rpartition(".")
        weight = torch.nn.Parameter(master.detach().bfloat16())
        setattr(model.get_submodule(owner), name, weight)
        weights.append(weight)

    def step(batch: Batch) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.item()

    return step


def measure(steps: dict[str, Step], batch: Batch, rounds: int) -> common.Times:
    times: common.Times = {name: [] for name in steps}
    for number in range(rounds + WARM_UP):
        order = (
            list(steps) if number % 2 else list(reversed(steps))
        )  # neither always runs in the other's wake
        for name in order:
            begin = time.perf_counter()
            steps[name](batch)
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--plan", default="dp=1 zero=3", help="of one rank, without its precision")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 1], help="sequences per step")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = common.parse(parser, precisions=["bf16"], batches=[1], rounds=1)
    model = llama_of(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for precision in arguments.precisions:
        name = f"plait {arguments.plan}"
        steps = {BARE: bare(model, precision), name: ours(model, f"{arguments.plan} precision={precision}")}
        for sequences in arguments.batches:
            times = measure(steps, model.batch(sequences), arguments.rounds)
            case = f"{precision}, {sequences} x {model.sequence}"
            rows += common.rows(case, times, yardstick=BARE, peers=[BARE])
    common.report("a step's own cost, one rank, one thread", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
