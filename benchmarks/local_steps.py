"""Local steps over a slow link: two hosts of one rank each, connected by 100 Mbit/s.

The hosts are those of `two_hosts.py`. `exchange_ms` is a step with an exchange less the median step without
one; `link_ms` is what the bytes that a rank sends take on the link. `step_ms` is a mean over whole rounds.
"""

import argparse
import os
import statistics
import time
from typing import Any

import common
import plait
import two_hosts
from llama import Llama
from plait.bench.report import machine
from plait.comm import connect
from plait.plan import Plan, subtract_traffic
from plait.plan.events import ring_bytes
from plait.plan.grid import Grid

LLAMA = Llama(
    {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    sequence=64,
)
DILOCO = "outer=nesterov:0.7:0.9"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="of the link, per second and direction")
    parser.add_argument("--local-steps", type=int, default=32)
    parser.add_argument("--dp-steps", type=int, default=6, help="steps that are measured without local steps")
    parser.add_argument("--layers", type=int, default=LLAMA.config["num_hidden_layers"])
    arguments = common.parse(parser, local_steps=3, dp_steps=2, layers=1, mbit=2000)
    if "RANK" in os.environ:
        measure(arguments)
        return
    found = two_hosts.run(__file__, arguments.mbit)
    rows, facts = table(found.results, found.mbit), machine() | {"link": found.link}
    common.report("plain data parallelism and local steps", rows, facts, arguments.json)


# --- ranks


def measure(arguments: argparse.Namespace) -> None:
    """Measure the steps of every plan on this rank; rank 0 writes them."""
    world, steps = connect(transport="gloo"), arguments.local_steps
    plans = [f"dp=2 local_steps={steps} {DILOCO} exchange={dtype}" for dtype in ("fp32", "bf16", "int8")]
    plans.append(f"{plans[1]} exchange_parts=2")
    found = {plan: steps_of(plan, arguments.layers, 2 * steps) for plan in plans}
    found["dp=2"] = steps_of("dp=2", arguments.layers, arguments.dp_steps)
    two_hosts.write_first(world, found)


def steps_of(words: str, layers: int, num_steps: int) -> dict[str, Any]:
    """Times and bytes sent of the steps after a warm-up: the first, or for islands the first exchange."""
    plan = Plan.parse(words)
    engine = plait.parallelize(LLAMA.on_meta(num_hidden_layers=layers), plan, optimizer_args={"lr": 1e-3})
    batch, grid = LLAMA.batch(1), Grid.from_plan(plan)
    for _ in range(plan.local_steps or 1):
        engine.step(batch)
    seconds, sent, first_s = [], [], time.perf_counter()
    for _ in range(num_steps):
        if plan.local.started_after(engine.num_steps + 1) is not None:
            engine.world.barrier()  # otherwise the exchange waits for the slower island's steps
        before, begin = engine.world.comm_log.read(), time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - begin)
        sent.append(ring_bytes(subtract_traffic(before, engine.world.comm_log.read()), grid))
    mean_s = (time.perf_counter() - first_s) / num_steps
    return {"seconds": seconds, "sent": sent, "steps": plan.local_steps, "mean": mean_s}


def table(found: dict[str, Any], mbit: int | None) -> list[common.Row]:
    """A row per plan. `mbit`: of the link; None if it is not limited."""
    data_parallel = found.pop("dp=2")
    dp_s = data_parallel["mean"]
    rows = [_row("dp=2", dp_s, dp_s, [], data_parallel["sent"], mbit)]
    for words, of_plan in found.items():
        seconds, sent, steps = of_plan["seconds"], of_plan["sent"], of_plan["steps"]
        is_exchange = [(number + 1) % steps == 0 for number in range(len(seconds))]
        alone = statistics.median(
            s for s, exchanges in zip(seconds, is_exchange, strict=True) if not exchanges
        )
        exchanges = [s - alone for s, is_one in zip(seconds, is_exchange, strict=True) if is_one]
        per_exchange = [sum(sent[at : at + steps]) for at in range(0, len(sent), steps)]
        overlaps = "exchange_parts" in words
        rows.append(_row(words, of_plan["mean"], dp_s, [] if overlaps else exchanges, per_exchange, mbit))
    return rows


def _row(
    name: str, step_s: float, dp_s: float, exchanges: list[float], sent: list[int], mbit: int | None
) -> common.Row:
    """`exchanges`: seconds of each; empty if they overlap with steps."""
    exchange_s = statistics.median(exchanges) if exchanges else None
    link_s = statistics.median(sent) * 8 / (mbit * 1e6) if mbit else None
    return {
        "case": "two hosts",
        "contender": name,
        "step_ms": 1e3 * step_s,
        "times_dp": dp_s / step_s,
        "sent_mb": statistics.median(sent) / 1e6,
        "exchange_ms": exchange_s and 1e3 * exchange_s,
        "link_ms": link_s and 1e3 * link_s,
        "of_link": exchange_s / link_s if exchange_s and link_s else None,
    }


if __name__ == "__main__":
    main()
