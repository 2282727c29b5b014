"""Memory of models with adapters: as estimated, and only adapters have masters, gradients and states."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.models.adapters import adapter_layers
from plait.train.config import Recipe, parse_recipe
from plait.train.explain_recipe import cluster_from_recipe, explain_recipe
from plait.train.model import initial_model
from plait.train.optimizer import optimizer_class
from support import programs
from support.pool import Pool

PLANS = ("dp=1", "dp=2 micro=3", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "dp=2 tp=2 zero=3")
LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}


def _lora_over_bf16() -> nn.Module:
    """PEFT's default: adapters in float32 over a base in bfloat16."""
    import peft  # noqa: PLC0415 - takes seconds

    torch.manual_seed(5)
    model = programs.llama(on_meta=False, hidden=128, ffn=256).to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of transformers and PEFT, about names
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)


def _num_trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _memory(plan: str) -> Any:
    model = _lora_over_bf16()
    given = {n: p.detach().clone() for n, p in model.named_parameters()}
    dtypes = ({p.dtype for n, p in given.items() if ("lora_" in n) is of} for of in (True, False))
    assert [*dtypes] == [{torch.float32}, {torch.bfloat16}], "PEFT's default has changed"
    num_trained = _num_trained(model)
    engine = plait.parallelize(model, plan, loss=programs.summed_loss)
    held = engine.full_parameters()  # on rank 0
    assert all(torch.equal(of.float(), given[name].float()) for name, of in held.items())
    layer: Any = next(module for _, module in adapter_layers(engine.model))
    computed: list[torch.dtype] = []
    layer.lora_A["default"].register_forward_hook(
        lambda module, x, y: computed.extend((module.weight.dtype, x[0].dtype, y.dtype))
    )
    rows = programs.SEQUENCES // engine.data_ranks // engine.plan.micro
    predicted = engine.estimated_memory((rows, programs.LENGTH))
    for batch in programs.batches(2):
        engine.step(programs.share_of(batch, engine))
    states = {key: of.dtype for key, of in engine.state().items() if "exp_avg" in key}
    return num_trained, set(computed), states, predicted, engine.memory()


@pytest.mark.parametrize("plan", PLANS)
def test_memory_is_within_3_percent_of_the_estimate(pool: Pool, plan: str) -> None:
    parsed = plait.Plan.parse(f"{plan} precision=bf16")
    shards = parsed.dp if parsed.zero else 1
    results = pool.run(_memory, parsed.num_ranks, str(parsed))
    for num_trained, computed, _, predicted, measured in results:
        assert measured.total == pytest.approx(predicted.total, rel=0.03), (str(predicted), str(measured))
        assert (measured.parameters, measured.buffers) == (predicted.parameters, predicted.buffers)
        assert computed == {torch.bfloat16}
        assert 0 <= measured.optimizer - 2 * measured.master < 64  # AdamW's moments, and counts of steps
        if parsed.cols == 1:
            assert measured.master == 4 * num_trained // shards
        else:  # factors of which a column has all are there twice
            assert 2 * num_trained // shards < measured.master < 4 * num_trained // shards
    states = results[0][2]
    assert all(".lora_" in key and dtype is torch.float32 for key, dtype in states.items())
    assert len(states) == 2 * 2 * 7 * 2  # moments of A and B, of seven layers of two blocks


def _recipe(plan: str) -> Recipe:
    return parse_recipe(
        {
            "plan": plan,
            "run": {"dir": "run", "steps": 2, "batch": 4},
            "model": {"config": LLAMA},
            "adapter": {"r": 4},
            "data": {"dir": "data", "sources": ["README.md"], "sequence": 32},
            "tokenizer": {"vocab_size": 512},
            "optimizer": {"lr": 1e-3},
        },
        source="a test",
    )


def _of_recipe(plan: str) -> tuple[Any, Any]:
    """Memory as the engine of a recipe estimates it before the first step, and as measured."""
    recipe = _recipe(plan)
    model, weights = initial_model(recipe.model, recipe.adapter)
    optimizer: dict[str, Any] = {
        "optimizer": optimizer_class(recipe.optimizer),
        "optimizer_args": recipe.optimizer.torch_args(),
    }
    engine = plait.parallelize(model, plan, weights=weights, **optimizer)
    ids = torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(1))
    predicted = engine.estimated_memory((4 // engine.data_ranks, 32))
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        engine.step(engine.shard(batch))
    return predicted, engine.memory()


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=2 tp=2 zero=1"])
def test_a_recipe_is_explained_with_the_memory_of_its_engine(pool: Pool, plan: str) -> None:
    parsed = plait.Plan.parse(f"{plan} precision=bf16")
    explained = explain_recipe(recipe := _recipe(str(parsed)), cluster_from_recipe(recipe))
    by_rank = {rank: of.memory for of in explained.rank_classes for rank in of.ranks}
    for rank, (predicted, measured) in enumerate(pool.run(_of_recipe, parsed.num_ranks, str(parsed))):
        assert by_rank[rank] == predicted
        assert measured.total == pytest.approx(predicted.total, rel=0.03), (str(predicted), str(measured))
