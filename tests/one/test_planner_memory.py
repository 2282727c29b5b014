"""The planner's memory and traffic are those of `plait explain`, which runs the engine on meta tensors."""

import warnings
from typing import Any, Literal

import pytest
import torch

import plait
from plait.engine.spec import Arguments
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import explain
from plait.models import causal_lm_on_meta
from plait.plan import Plan
from plait.plan.comm_log import sum_traffic
from plait.plan.events import ring_bytes, step_events, sum_events
from plait.planner import ModelShape, Software, Workload, cluster, estimate_step
from plait.planner.memory import kept_bytes
from plait.planner.traffic import rank_facts, sent_bytes

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512}
LLAMA |= {
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GPT: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 512, "n_layer": 4, "n_head": 8}
GPT |= {"n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
SIX_EXPERTS = MIXTRAL | {"num_local_experts": 6}
# Equal widths of keys and values, without which explain has no fused attention.
DEEPSEEK: dict[str, Any] = LLAMA | {"model_type": "deepseek_v3", "num_key_value_heads": 8}
DEEPSEEK |= {"moe_intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4}
DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"q_lora_rank": 192, "kv_lora_rank": 128, "v_head_dim": 96}
DEEPSEEK |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
SEQUENCES, LENGTH = 2, 512
# Relative differences: what recomputation gathers again, and the last block's gather under sp, are left out.
# Routers, which sp leaves complete, too.
TRAFFIC = {"pp": 1e-4, "replicate": 1e-3, "shard": 0.08, "cp": 1e-4, "row": 0.11, "col": 0.19}
TRAFFIC |= {"ep_replicate": 3e-3, "ep_shard": 1e-4, "ep_cp": 1e-4}
STATES = ("parameters", "gradients", "master", "optimizer", "buffers", "runtime", "host")


@pytest.mark.parametrize(
    ("config", "text", "limit"),
    [
        (LLAMA, "dp=8 zero=1", 0.015),
        (LLAMA, "dp=8 zero=3 shard=4 recompute=full", 0.015),
        (LLAMA, "dp=2 tp=4 sp=true zero=2", 0.015),
        (LLAMA, "tp=4 sp=true recompute=selective", 0.06),
        (LLAMA, "tp=2x2 recompute=every=2", 0.015),
        (LLAMA, "pp=2 tp=4 sp=true micro=4", 0.015),
        (LLAMA, "pp=4 dp=2 micro=8", 0.015),
        (LLAMA, "pp=2 micro=4 schedule=zb-h1", 0.015),
        (LLAMA, "pp=2 micro=4 schedule=zbv", 0.015),
        (LLAMA, "pp=2 stages=0,2,2,0 micro=4 schedule=zbv", 0.015),
        (LLAMA, "pp=3 tp=2 sp=true stages=1,3,0 micro=4", 0.015),
        (LLAMA, "cp=4 zero=1", 0.015),
        (LLAMA, "cp=4 cp_method=ulysses", 0.015),
        (LLAMA, "cp=4 cp_method=2x2", 0.015),
        (LLAMA, "cp=4 cp_method=ring", 0.015),
        (LLAMA, "dp=2 cp=2 tp=2 sp=true zero=3 recompute=full", 0.07),
        (LLAMA, "pp=2 cp=2 micro=4 recompute=selective", 0.06),
        (LLAMA, "dp=2 zero=1 offload=cpu recompute=selective", 0.01),
        (MIXTRAL, "dp=8 zero=1", 0.015),
        (MIXTRAL, "dp=8 ep=4 zero=1", 0.015),
        (MIXTRAL, "dp=8 ep=2 zero=1 recompute=selective", 0.06),
        (MIXTRAL, "dp=8 ep=2 zero=2 shard=4 recompute=full", 0.015),
        (MIXTRAL, "dp=4 ep=2 tp=2 zero=2", 0.015),
        (MIXTRAL, "dp=2 cp=2 ep=2 tp=2", 0.015),
        (MIXTRAL, "dp=2 cp=2 ep=4 recompute=selective", 0.06),
        (MIXTRAL, "dp=2 ep=2 tp=2 sp=true recompute=selective", 0.06),
        (MIXTRAL, "dp=2 tp=4 sp=true", 0.02),
        (SIX_EXPERTS, "dp=2 ep=2 tp=2 sp=true", 0.02),
        (MIXTRAL, "pp=2 dp=4 ep=4 micro=4", 0.015),
        (DEEPSEEK, "dp=8 ep=4 zero=1", 0.06),
        (DEEPSEEK, "pp=2 dp=4 ep=4 micro=4 recompute=full", 0.04),
        (GPT, "dp=8 zero=1", 0.02),
        (GPT, "pp=2 tp=2 micro=4 schedule=interleaved", 0.05),
    ],
)
def test_the_planner_and_explain_count_the_same_bytes(
    config: dict[str, Any], text: str, limit: float
) -> None:
    """On every rank, what is kept of micro-batches, and what is sent along every axis; on the fullest one,
    each category of model states."""
    arguments = Arguments(causal_lm_on_meta(config), Plan.parse(f"{text} precision=bf16"))
    compare(arguments, ModelShape.from_config(config), limit)


def adapted(config: dict[str, Any]) -> Any:
    """The model on the meta device, with LoRA on all linear layers."""
    import peft  # noqa: PLC0415 - takes seconds

    options = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of transformers and PEFT, about names
        return peft.get_peft_model(causal_lm_on_meta(config), options, low_cpu_mem_usage=True)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("dp=8 zero=1", 0.02),
        ("dp=8 zero=3 shard=4 recompute=full base=nf4", 0.02),
        ("dp=2 tp=2 zero=2 base=int8", 0.05),
        ("dp=2 tp=2 sp=true zero=3 base=nf4", 0.07),
        ("pp=2 dp=2 zero=1 micro=4 recompute=selective", 0.02),
    ],
)
def test_the_planner_and_explain_count_the_same_bytes_of_an_adapter_over_a_frozen_base(
    text: str, limit: float
) -> None:
    config = LLAMA | {"vocab_size": 256, "num_hidden_layers": 8}  # TRAFFIC is for blocks
    arguments = Arguments(adapted(config), Plan.parse(f"{text} precision=bf16"))
    compare(arguments, ModelShape.from_config(config).with_adapter(8), limit)


@pytest.mark.parametrize("text", ["dp=8 zero=1", "dp=2 pp=2 zero=2 micro=2"])
def test_the_planner_and_explain_count_the_same_bytes_of_states_in_8_bits(text: str) -> None:
    arguments = Arguments(
        causal_lm_on_meta(LLAMA), Plan.parse(f"{text} precision=bf16"), optimizer=plait.AdamW8bit
    )
    compare(arguments, ModelShape.from_config(LLAMA), 0.015, "AdamW8bit")


def compare(
    arguments: Arguments, model: ModelShape, limit: float, optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"
) -> None:
    plan = arguments.plan
    ids = torch.zeros((SEQUENCES, LENGTH), dtype=torch.long, device="meta")
    node = HypotheticalRanks("nccl", 8, torch.device("cuda"))
    explained = explain(arguments, {"input_ids": ids, "labels": ids}, node)
    work = Workload(LENGTH, SEQUENCES * plan.data_ranks * plan.micro)
    for ranks in explained.rank_classes:
        kept = kept_bytes(model, plan, ranks.coord["pp"], SEQUENCES, LENGTH, Software())
        assert kept == pytest.approx(ranks.memory.activations, rel=limit)
        uneven = Software(expert_rows=plan.ep * model.expert_columns(plan.cols, plan.ep))
        more = kept_bytes(model, plan, ranks.coord["pp"], SEQUENCES, LENGTH, uneven) - kept
        assert more == pytest.approx(ranks.uneven_bytes, rel=limit)
        sent = sent_bytes(model, plan, work, ranks.ranks[0])
        traffic = sum_traffic(ranks.traffic.values())
        for axis, num_bytes in sent.items():
            along = {key: count for key, count in traffic.items() if key.axes == (axis,)}
            assert num_bytes == pytest.approx(ring_bytes(along, explained.grid), rel=TRAFFIC[axis]), axis
    program = Software(optimizer=optimizer)
    ours = estimate_step(model, plan, cluster("dgx-h100:1"), work, program).memory
    theirs = max((ranks.memory for ranks in explained.rank_classes), key=lambda use: use.total)
    for name in STATES:
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=0.005), name


@pytest.mark.parametrize("recompute", ["none", "selective", "every=2", "full"])
@pytest.mark.parametrize(
    "text",
    [
        "cp=2",
        "cp=4",
        "cp=8 cp_method=ring",
        "cp=4 cp_method=allgather",
        "cp=4 cp_method=ulysses",
        "cp=4 cp_method=2x2",
        "cp=2 tp=4",
    ],
)
def test_the_messages_of_attention_are_those_of_explain_to_the_byte(text: str, recompute: str) -> None:
    """Calls and bytes of each operation, of gradients and of what is recomputed too."""
    plan = Plan.parse(f"{text} micro=3 precision=bf16 recompute={recompute}")
    ids = torch.zeros((SEQUENCES, LENGTH), dtype=torch.long, device="meta")
    node = HypotheticalRanks("nccl", plan.num_ranks, torch.device("cuda"))
    explained = explain(Arguments(causal_lm_on_meta(LLAMA), plan), {"input_ids": ids, "labels": ids}, node)
    facts = rank_facts(ModelShape.from_config(LLAMA), plan, Workload(LENGTH, 3 * SEQUENCES), 0)
    events = [event for event in step_events(facts) if event.strand == "layers"]
    [ranks, *_] = explained.rank_classes
    theirs = {key: count for key, count in ranks.traffic["layers"].items() if key.axes == ("cp",)}
    assert theirs
    assert {key: count for key, count in sum_events(events).items() if key.axes == ("cp",)} == theirs


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (MIXTRAL, "dp=2 cp=2 ep=2"),
        (MIXTRAL, "dp=2 cp=2 ep=4"),
        (MIXTRAL, "dp=2 cp=2 ep=2 tp=2"),
        (MIXTRAL, "dp=2 ep=2 tp=2 sp=true"),
        (SIX_EXPERTS, "dp=2 cp=2 ep=2 tp=2"),
        (MIXTRAL, "dp=2 ep=2 tp=2 capacity=1.3"),
        (MIXTRAL, "dp=2 cp=2 ep=4 capacity=0.7"),
        (SIX_EXPERTS, "dp=2 ep=2 tp=2 sp=true"),
    ],
)
def test_the_messages_of_experts_and_their_columns_are_those_of_explain(
    config: dict[str, Any], text: str, recompute: str
) -> None:
    """To the byte, apart from the sums of the loss over columns."""
    plan = Plan.parse(f"{text} precision=bf16 recompute={recompute}")
    ids = torch.zeros((SEQUENCES, LENGTH), dtype=torch.long, device="meta")
    node = HypotheticalRanks("nccl", plan.num_ranks, torch.device("cuda"))
    explained = explain(Arguments(causal_lm_on_meta(config), plan), {"input_ids": ids, "labels": ids}, node)
    facts = rank_facts(ModelShape.from_config(config), plan, Workload(LENGTH, SEQUENCES * plan.dp), 0)
    ours = sum_events(event for event in step_events(facts) if event.strand == "layers")
    theirs = explained.rank_classes[0].traffic["layers"]
    assert {key.axes for key in ours} == {key.axes for key in theirs}
    loss = 3 * 4 * SEQUENCES * LENGTH // plan.cp  # largest logits, sums and targets, in float32
    for axes in {key.axes for key in ours}:
        sent, expected = (
            ring_bytes({key: count for key, count in of.items() if key.axes == axes}, explained.grid)
            for of in (ours, theirs)
        )
        over_columns = axes == ("col",)
        assert sent == pytest.approx(expected - over_columns * loss, rel=1e-6), axes
