"""A step's communication equals the estimate made without ranks: the same lines, calls and bytes."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import plait
from plait.comm import connect
from plait.engine.spec import Arguments
from plait.errors import PlaitError
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import Explanation, explain
from plait.plan import MemoryUse, Plan, subtract_traffic, sum_traffic
from plait.plan.axes import EXPERTS
from plait.plan.comm_log import CommCount, CommKey, Traffic
from plait.plan.grid import Grid
from support import hf_models, programs, quantized_models, routed_experts
from support.pool import Pool

SEQUENCE, BATCH = 12, 2  # of a micro-batch


class Plain(nn.Module):
    """With a tied weight, a buffer that follows the first rank's, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 16, bias=False)
        self.out.weight = self.inp.weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(self.norm(x) + self.shift.to(x.dtype))


def squared_error(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(outputs, batch["labels"], reduction="sum"), outputs.numel()


def model_of(name: str) -> nn.Module:
    if name == "plain":
        torch.manual_seed(1)
        return Plain()
    if name == "wide":  # its dims are multiples of 16
        return programs.llama(hidden=64, ffn=96)
    if name == "frozen":  # most of its blocks
        return quantized_models.frozen_llama()
    if name in ("mixture", "router-loss"):
        mixture: Any = routed_experts.model_with("balanced", exact=False, experts_implementation="grouped_mm")
        mixture.config.output_router_logits = name == "router-loss"
        return mixture
    family, _, tied = name.partition("-")
    more = {"gpt2": {"n_layer": 4}, "llama": {"num_hidden_layers": 4}}.get(family, {})
    config = hf_models.config_of(family, **more, **({"tie_word_embeddings": True} if tied else {}))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def batch_of(name: str, samples: int) -> dict[str, Tensor]:
    if name == "plain":
        return {"x": torch.ones(samples, 16), "labels": torch.zeros(samples, 16)}
    ids = torch.arange(samples * SEQUENCE).view(samples, SEQUENCE) % 29
    return {"input_ids": ids, "labels": ids}


def said(name: str, plan: str) -> tuple[Traffic, MemoryUse]:
    """A rank's traffic in the third step, and its estimate of its memory."""
    engine = plait.parallelize(model_of(name), plan, loss=squared_error if name == "plain" else None)
    batch = batch_of(name, BATCH * engine.plan.micro)
    estimated = engine.estimated_memory((BATCH, SEQUENCE))
    for _ in range(2):
        engine.step(batch)
    before = connect().comm_log.read()
    engine.step(batch)
    return subtract_traffic(before, connect().comm_log.read()), estimated


def explained(name: str, plan: str, transport: str) -> Explanation:
    cluster = HypotheticalRanks(transport, None, torch.device("cpu"))
    loss = squared_error if name == "plain" else None
    return explain(Arguments(model_of(name), plan, loss=loss), batch_of(name, BATCH), cluster)


CASES = [
    ("llama", "dp=2", "host"),
    ("llama", "dp=2 zero=1 micro=2", "gloo"),
    ("llama-tied", "dp=2 zero=2 micro=2", "gloo"),
    ("llama", "dp=2 zero=3 micro=2", "host"),
    ("llama-tied", "dp=2 zero=3 micro=3 recompute=full", "gloo"),
    ("plain", "dp=4 zero=3 shard=2 micro=2 prefetch=0", "gloo"),
    ("gpt2", "dp=2 zero=3 reshard=step accumulate=unsharded micro=2", "gloo"),
    ("plain", "dp=2 micro=2", "gloo"),
    ("llama", "dp=4 zero=1 shard=2 reduce=int8", "gloo"),
    ("llama", "dp=4 zero=2 shard=2 reduce=powersgd:2 micro=2", "host"),
    ("llama", "dp=3 algorithm=ring zero=1", "gloo"),
    ("plain", "dp=4 algorithm=halving reduce=bf16 zero=2 shard=2 micro=2", "host"),
    ("llama", "dp=2 precision=bf16", "gloo"),
    ("llama", "dp=4 zero=1 shard=2 local_steps=3 reduce=bf16", "host"),  # exchanges after the third step
    ("llama", "dp=4 zero=2 shard=2 local_steps=3", "gloo"),
    ("plain", "dp=3 local_steps=3 outer=nesterov:0.7:0.9 exchange=int8", "gloo"),
    ("mixture", "dp=2 ep=2 micro=2", "gloo"),
    ("mixture", "dp=2 ep=2 zero=1", "host"),
    ("mixture", "dp=4 ep=2 zero=3 recompute=full", "gloo"),
    ("mixture", "dp=4 ep=2 zero=2 micro=2", "host"),
    ("mixture", "dp=4 ep=2", "host"),
    ("mixture", "dp=4 ep=4 zero=3 precision=bf16", "gloo"),
    ("mixture", "dp=2 ep=2 tp=2 zero=1", "host"),
    ("mixture", "dp=2 ep=2 tp=2 sp=true recompute=full micro=2", "gloo"),
    ("mixture", "dp=1 cp=2 ep=2 zero=1", "host"),
    ("mixture", "dp=2 cp=2 ep=4 zero=3", "gloo"),
    ("mixture", "dp=4 ep=4 zero=1 shard=2", "host"),
    ("mixture", "dp=2 ep=2 pp=2 zero=1 micro=2 reduce=bf16", "gloo"),
    ("router-loss", "dp=2 ep=2 micro=2 recompute=full", "host"),
    ("router-loss", "dp=2 pp=2 micro=2", "gloo"),
    ("router-loss", "dp=2 ep=2 micro=2 router_balance=step recompute=full", "host"),
    ("router-loss", "dp=2 pp=2 micro=2 zero=3 router_balance=step", "gloo"),
    ("router-loss", "dp=2 ep=2 micro=2 router_balance=step capacity=0.8", "host"),
    ("mixture", "dp=2 ep=2 zero=3 micro=3 accumulate=sharded prefetch=0", "host"),
    ("mixture", "dp=4 ep=2 shard=2 zero=2 accumulate=unsharded micro=2 recompute=full", "gloo"),
    ("mixture", "dp=2 ep=2 tp=2 pp=2 zero=1 micro=2 schedule=zb-h1", "host"),
    ("mixture", "dp=3 ep=1 zero=1 micro=2", "host"),
    ("mixture", "dp=2 ep=2 capacity=0.8 zero=1 micro=2 recompute=full", "gloo"),
    ("mixture", "dp=2 cp=2 ep=4 capacity=1.5 zero=3", "host"),
    ("mixture", "dp=2 ep=2 tp=2 pp=2 capacity=1.25 micro=2", "host"),
    ("llama-tied", "tp=2", "gloo"),
    ("llama", "tp=4 recompute=selective micro=2", "host"),
    ("gpt2", "tp=2x2 recompute=full", "host"),
    ("llama", "tp=2x2 sp=true dp=2 zero=3", "gloo"),
    ("gpt2", "tp=2 sp=true recompute=full micro=2", "gloo"),
    ("llama-tied", "pp=2 micro=3", "gloo"),
    ("llama", "pp=2 schedule=zb-h1 micro=4 dp=2 zero=3", "gloo"),
    ("gpt2", "pp=2 chunks=2 micro=4 tp=2", "host"),
    ("llama-tied", "pp=2 dp=2 tp=2 zero=1 micro=2", "host"),
    ("llama-tied", "pp=2 schedule=zbv micro=4 dp=2 zero=2 precision=bf16", "gloo"),
    ("gpt2", "pp=2 tp=2 sp=true schedule=zb-h1 micro=2 dp=2 zero=3 offload=cpu", "host"),
    ("llama-tied", "pp=3 stages=0,4,0 micro=3 zero=1 dp=2", "gloo"),
    ("gpt2", "pp=3 tp=2 sp=true stages=0,4,0 micro=2 schedule=zb-h1", "host"),
    ("llama", "pp=2 stages=0,2,2,0 schedule=zbv micro=4 dp=2 zero=3", "host"),
    ("llama", "cp=2 dp=2 zero=2 micro=2", "gloo"),
    ("gpt2", "cp=2 cp_method=ulysses tp=2 sp=true recompute=full micro=2", "host"),
    ("llama", "cp=3 pp=2 schedule=zb-h1 micro=2 zero=1 precision=bf16", "host"),
    ("llama", "cp=4 cp_method=2x2 zero=3 recompute=full", "gloo"),
    ("gpt2", "cp=3 cp_method=ring pp=2 micro=2 recompute=selective precision=bf16", "host"),
    ("wide", "tp=2 sp=true dp=2 zero=3 precision=fp8", "gloo"),
    ("frozen", "dp=2 zero=3 micro=2 base=nf4", "gloo"),
    ("frozen", "dp=2 zero=3 base=int8 precision=bf16", "host"),
    ("frozen", "dp=4 zero=1 shard=2 micro=2 base=nf4 precision=bf16", "gloo"),
    ("frozen", "tp=2 sp=true dp=2 zero=3 base=nf4", "gloo"),
    ("frozen", "pp=2 schedule=zb-h1 micro=4 dp=2 zero=3 base=nf4 offload=cpu", "gloo"),
    ("frozen", "dp=4 zero=2 shard=2 local_steps=3 base=int8", "gloo"),
    ("wide", "pp=2 tp=2 sp=true schedule=zb-h1 micro=2 recompute=selective precision=fp8-rowwise", "host"),
]


# All-to-alls of a layer and a micro-batch, and those of them that send rows, by whether it is recomputed.
EXCHANGES = {"none": (5, 4), "full": (8, 6)}


@pytest.mark.parametrize("recompute", EXCHANGES)
@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        ("dp=2 ep=2", 1),
        ("dp=4 ep=2", 2),
        ("dp=4 ep=4", 1),
        ("dp=4 ep=2 micro=2", 2),
        ("dp=2 ep=2 micro=3", 1),
    ],
)
def test_experts_send_the_bytes_and_messages_of_the_formulas(
    pool: Pool, plan: str, copies: int, recompute: str
) -> None:
    """Those of docs/experts.md, under "Bytes", and the counts of each expert."""
    words = Plan.parse(plan)
    exchanges, rows = EXCHANGES[recompute]
    along = Grid.from_plan(words).used(*EXPERTS)
    model, peers, layers = model_of("mixture"), words.ep - 1, 2
    tokens, hidden, experts, choices = BATCH * SEQUENCE, 48, 4, 2
    numel = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) // words.ep
    counts = (1 if recompute == "none" else 2) * peers * (1 + experts // words.ep) * 8
    sent = rows * peers * tokens * choices // words.ep * hidden * 4 + counts
    for traffic, _ in pool.run(said, words.num_ranks, "mixture", f"{plan} recompute={recompute}"):
        times = layers * words.micro
        assert traffic[CommKey(along, "", "messages")] == CommCount(exchanges * times, sent * times)
        reduced = [count for key, count in traffic.items() if key.axes == ("replicate",)]
        assert sum(count.num_bytes for count in reduced) == (numel * 4 if copies > 1 else 0)


WORDS = {
    "pp": "1 1 2",
    "tp": "1 1 2 4 2x1 2x2",
    "dp": "1 2 2 3 4",
    "ep": "1 1 2 2 4",
    "sp": "false false true",
    "zero": "0 1 2 3 3 3",
    "shard": "0 0 1 2",
    "micro": "1 2 3 4",
    "accumulate": "auto unsharded sharded",
    "prefetch": "0 1 1 2",
    "reshard": "use use step",
    "precision": "fp32 bf16 fp64",
    "reduce": "fp32 fp32 fp32 bf16 fp16 int8 powersgd:2",
    "algorithm": "auto auto auto ring tree halving naive two-level",
    "recompute": "none none full selective every=2",
    "offload": "none none none cpu",
    "schedule": "1f1b gpipe interleaved bfs zb-h1 zbv dualpipev",
}
SEED, NUM_SAMPLED, MOST_RANKS = 7, 120, 8


def sampled(number: int) -> tuple[str, str, str]:
    """A plan that there can be."""
    random_words = random.Random(f"{SEED} {number}")
    while True:
        words = {key: random_words.choice(options.split()) for key, options in WORDS.items()}
        kept = {key: word for key, word in words.items() if random_words.random() < 0.7}
        plan = " ".join(f"{key}={word}" for key, word in kept.items())
        name = random_words.choice(["llama", "llama-tied", "gpt2", "plain", "mixture"])
        if name == "plain" and {"tp", "pp"} & kept.keys():  # what is between its blocks is no stage's
            continue
        try:
            if 1 < Plan.parse(plan).num_ranks <= MOST_RANKS:
                explained(name, plan, "gloo")
                return name, plan, random_words.choice(["host", "gloo"])
        except PlaitError:
            continue


@pytest.mark.parametrize(("name", "plan", "transport"), CASES)
def test_traffic_and_memory_of_ranks_are_those_estimated(
    pool: Pool, name: str, plan: str, transport: str
) -> None:
    check(pool, name, plan, transport)


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(NUM_SAMPLED))
def test_traffic_and_memory_of_any_plan_are_those_estimated(pool: Pool, number: int) -> None:
    check(pool, *sampled(number))


def check(pool: Pool, name: str, plan: str, transport: str) -> None:
    explanation = explained(name, plan, transport)
    found = pool.over(transport).run(said, Plan.parse(plan).num_ranks, name, plan)
    for rank, (traffic, memory) in enumerate(found):
        row = explanation.of_rank(rank)
        assert sum_traffic([*row.traffic.values(), row.exchange]) == traffic, (
            f"rank {rank} of {name} under {plan} over {transport}"
        )
        assert row.memory == memory, f"rank {rank} of {name} under {plan} over {transport}"
