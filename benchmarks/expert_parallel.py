"""Expert parallelism: our steps, those of ZeRO 3 and of transformers, and a step whose rows are not sent.

    python benchmarks/expert_parallel.py [--ranks 4] [--tokens 256 2048] [--rounds 9] [--transport gloo]

A Mixtral with two layers of 16 experts, two for each token, 13.2 M parameters; so many tokens on every rank,
with one thread each. Routers choose by a token's number, so that every expert gets as many. The contenders
live in the same processes and take turns; a time is that of the slowest rank, of a step with fused AdamW in
float32. The yardstick is the step of expert parallelism with a copy in place of each all-to-all: what a rank
receives is what it has sent. transformers has its own expert parallelism over Gloo, by `DistributedConfig`,
with FSDP2 for all else.

  processor_ms of a rank's process, for machines with other work; of_copied is its ratio to the yardstick
  comm_ms      of the training thread, including the time in which it waits for other ranks

Before they are measured, all contenders but the yardstick train from the same weights on one batch, and have
to get the losses of ZeRO 3: within 1e-4. `loss_apart` is how far off they are.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.distributed import DistributedConfig
from transformers.models.mixtral import modeling_mixtral

import common
import tensor_peers
from context_parallel import measured
from llama import Batch, Llama, weights_folder
from plait.bench.report import machine
from plait.comm import World, all_reduce, connect
from plait.parallel.experts import dispatch
from tensor_parallel import ours
from tensor_peers import Contender

EXPERTS, CHOSEN, SEQUENCES = 16, 2, 4
MIXTRAL = Llama(
    {
        "model_type": "mixtral",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "max_position_embeddings": 1024,
    },
    sequence=512,
)
TOY = Llama(MIXTRAL.config | {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}, sequence=16)
COPIED, PEER = "rows copied", "transformers ep"
CHECKED_STEPS = 3
MOST_APART = 1e-4


def balanced(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of a router that chooses experts by a token's number, with the weights of its logits."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
    number = torch.arange(len(logits))[:, None]
    chosen = (number + torch.arange(CHOSEN) * (EXPERTS // CHOSEN)) % EXPERTS
    weights = torch.softmax(logits.float(), -1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def copied(contender: Contender) -> Contender:
    """The same, with a copy in place of each all-to-all of experts."""

    def step(batch: Batch) -> float:
        with mock.patch.object(dispatch, "all_to_all_list", _copy):
            return contender.step(batch)

    return replace(contender, name=COPIED, step=step)


def _copy(outs: Sequence[Tensor], parts: Sequence[Tensor], *_: Any, **__: Any) -> None:
    for out, part in zip(outs, parts, strict=True):
        out.copy_(part)


def transformers_ep(folder: Path, world: World) -> Contender:
    """`from_pretrained` with the model's own plan: tokens are sent to experts, all else is FSDP2's."""
    config = DistributedConfig(fsdp_size=world.size, ep_size=world.size)
    model = tensor_peers.load(folder, "fp32", distributed_config=config)
    return tensor_peers.contender(PEER, model)


def contenders(folder: Path, world: World, arguments: argparse.Namespace) -> list[Contender]:
    made = TOY if arguments.smallest else MIXTRAL
    words = f"dp={world.size} ep={world.size}"
    plans = (f"dp={world.size} zero=3", words, f"{words} zero=3")
    found = [ours(made, plan, "fp32", world) for plan in plans]
    if tensor_peers.installed("transformers tp"):
        found.append(transformers_ep(folder, world))
    elif world.rank == 0:
        print(f"{PEER}: left out, accelerate is not installed (`make bench` installs it)")
    return [*found, copied(ours(made, words, "fp32", world))]


def check(found: list[Contender], batch: Batch, world: World) -> dict[str, float]:
    """How far each contender's losses are from those of the first one. Ends the program if it is too far."""
    apart: dict[str, float] = {}
    right = torch.zeros(0)
    for contender in found:
        losses = torch.tensor([contender.step(batch) for _ in range(CHECKED_STEPS)])
        if contender.name == PEER:  # of this rank's tokens
            all_reduce(losses, world.group)
            losses /= world.size
        right = losses if not apart else right
        apart[contender.name] = (losses - right).abs().max().item()
        if apart[contender.name] > MOST_APART:
            sys.exit(
                f"{contender.name} does not train as ZeRO 3 does: {losses.tolist()}, not {right.tolist()}"
            )
    return apart


@mock.patch.object(modeling_mixtral.MixtralTopKRouter, "forward", balanced)
def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport=arguments.transport)
    made = TOY if arguments.smallest else MIXTRAL
    with weights_folder(made, world) as folder:
        found = contenders(folder, world, arguments)
    torch.manual_seed(world.rank)
    apart = check(found[:-1], made.batch(SEQUENCES), world)
    rows = []
    for tokens in arguments.tokens:
        batch = replace(made, sequence=tokens // SEQUENCES).batch(SEQUENCES)
        times, processor, communication = measured(found, batch, world, arguments.rounds)
        for row in common.rows(f"{tokens} tokens", times, yardstick=COPIED, peers=[PEER]):
            name = row["contender"]
            more = {
                "processor_ms": 1e3 * statistics.median(processor[name]),
                "of_copied": common.ratio(processor[name], processor[COPIED]),
                "comm_ms": 1e3 * statistics.median(communication[name]),
                "loss_apart": apart.get(name),
            }
            rows.append(row | more)
    if world.rank == 0:
        facts = machine() | {
            "ranks": world.size,
            "load": f"{os.getloadavg()[0]:.1f}",
            "plait's transport": world.group.transport.name,
            "peer's backend": dist.get_backend(),
        }
        common.report("expert parallelism", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048], help="of a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "host", "gloo"], help="ours; the peer has Gloo"
    )
    arguments = common.parse(parser, tokens=[64], rounds=1)
    common.on_ranks(__file__, arguments.ranks, lambda: worker(arguments))


if __name__ == "__main__":
    main()
