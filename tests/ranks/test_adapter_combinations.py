"""Adapters with quantized bases, magnitudes and pairs: what one strand alone does not show."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import plait
from plait.checkpoint import newest
from plait.errors import CheckpointError, ModelError
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach
from plait.parallel.zero.block_codes import rounded
from plait.train.export import convert
from support import adapters, hf_models, programs
from support.pool import Pool

PLANS = ["dp=1", "dp=2 zero=3", "tp=2", "pp=2 micro=2", "dp=2 tp=2 zero=3 micro=2", "cp=2"]
DORA = adapters.LORA | {"use_dora": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shards on two columns have complete blocks of 64."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    programs.llama(on_meta=False, layers=2, hidden=128, ffn=256).save_pretrained(folder)
    return folder


def _trained(base: Path, config: dict[str, Any], plan: str, folder: Path | None = None) -> list[float]:
    """Losses of three steps; with `folder`, saved there."""
    engine = adapters.engine_of(base, config, plan)
    losses = [adapters.step(engine, seed) for seed in range(3)]
    if folder is not None:
        engine.save(folder)
    return losses


def _by_peft(base: Path, config: dict[str, Any], *, form: str) -> float:
    """The first loss of PEFT's model in one process, over the base as it is stored."""
    import peft  # noqa: PLC0415 - takes seconds

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for name, weight in model.named_parameters():
        if form and ".layers." in name and weight.ndim == 2:
            weight.data.copy_(rounded(weight.data.float(), form))
    with adapters.without_warnings_of_peft():
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    batch = adapters.batch_of(0)
    return float(adapted(**batch).loss.detach())


@pytest.mark.parametrize("config", [adapters.LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("form", ["", "nf4"])
def test_files_of_a_base_train_as_in_one_process(
    pool: Pool, base: Path, config: dict[str, Any], form: str
) -> None:
    """The first loss is PEFT's, so magnitudes are the norms of the weights as they are stored."""
    stored = f" base={form}" if form else ""
    alone = pool.run(_trained, 1, base, config, "dp=1" + stored)[0]
    assert alone[0] == pytest.approx(_by_peft(base, config, form=form), rel=1e-6)
    for plan in PLANS[1:]:
        ranks = plait.Plan.parse(plan).num_ranks
        assert pool.run(_trained, ranks, base, config, plan + stored)[0] == pytest.approx(alone, rel=1e-9)


def test_an_adapter_is_merged_into_the_base_as_it_was_stored(pool: Pool, base: Path, tmp_path: Path) -> None:
    pool.run(_trained, 2, base, adapters.LORA, "tp=2 base=nf4", tmp_path / "run")
    saved = newest(tmp_path / "run")
    assert saved is not None
    convert(saved, tmp_path / "merged", "fp64")
    convert(saved, tmp_path / "exact", "fp64", exact=True)
    original = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    merged, exact = (load_file(tmp_path / kind / "model.safetensors")[name] for kind in ("merged", "exact"))
    delta = exact - original[name]
    assert delta.abs().max() > 1e-4
    torch.testing.assert_close(
        merged - rounded(original[name].float(), "nf4"), delta, rtol=0, atol=1e-6, check_dtype=False
    )


def _pairs(base: Path, plan: str) -> list[float]:
    """Losses of pairs, with the model without its adapter as the reference."""
    engine = adapters.engine_of(base, adapters.LORA, plan, loss=plait.Preference())
    losses = []
    for seed in range(3):
        share = engine.shard(_batch(seed))
        with engine.adapters_off():
            share = plait.with_reference(engine, share)
        losses.append(float(engine.step(share).loss))
    return losses


def _batch(seed: int) -> dict[str, Tensor]:
    batch = adapters.batch_of(seed)
    return {**batch, "labels": batch["labels"].clone().index_fill_(1, torch.tensor([0, 1]), -100)}


@pytest.mark.parametrize("stored", ["", " base=int8"])
def test_pairs_are_relative_to_the_model_without_its_adapter(pool: Pool, base: Path, stored: str) -> None:
    """B is 0 before the first step: the loss is log 2, to the last bit."""
    alone = pool.run(_pairs, 1, base, "dp=1" + stored)[0]
    assert alone[0] == float(torch.log(torch.tensor(2.0, dtype=torch.float64)))
    assert alone[2] != alone[1] != alone[0]
    for plan in PLANS[1:]:
        ranks = plait.Plan.parse(plan).num_ranks
        assert pool.run(_pairs, ranks, base, plan + stored)[0] == pytest.approx(alone, rel=1e-9), plan


# --- what was silently wrong once


def test_a_checkpoint_over_a_base_in_codes_is_refused_over_another(
    pool: Pool, base: Path, tmp_path: Path
) -> None:
    pool.run(_trained, 1, base, adapters.LORA, "dp=1 base=nf4", tmp_path / "run")
    saved = newest(tmp_path / "run")
    assert saved is not None
    for plan, is_same in (("dp=1", False), ("dp=1 base=int8", False), ("dp=2 zero=3 base=nf4", True)):
        ranks = plait.Plan.parse(plan).num_ranks
        assert pool.run(_loads, ranks, base, plan, saved.path)[0] == ("" if is_same else "another base")


def _loads(base: Path, plan: str, saved: Path) -> str:
    engine = adapters.engine_of(base, adapters.LORA, plan)
    try:
        engine.load(saved)
    except CheckpointError as error:
        return "another base" if "base=nf4" in str(error) and "another base" in error.fact else str(error)
    return ""


def test_factors_of_another_alpha_are_refused(base: Path, tmp_path: Path) -> None:
    engine = adapters.engine_of(base, adapters.LORA, "dp=1")
    adapters.step(engine, 0)
    engine.save_adapter(tmp_path / "adapter")
    engine.save(tmp_path / "run")
    saved = newest(tmp_path / "run")
    assert saved is not None
    other = adapters.engine_of(base, adapters.LORA | {"lora_alpha": 32}, "dp=1")
    for load, path in ((other.load_adapter, tmp_path / "adapter"), (other.load, saved.path)):
        with pytest.raises(CheckpointError, match="lora_alpha"):
            load(path)


def test_a_frozen_adapter_is_not_quantized(base: Path) -> None:
    model = attach(causal_lm_on_meta(base), adapters.LORA)
    model.requires_grad_(False)
    found = plait.parallelize(model, "dp=1 base=nf4", weights=base).full_parameters()
    exact = plait.parallelize(attach(causal_lm_on_meta(base), adapters.LORA), "dp=1", weights=base)
    for name, values in exact.full_parameters().items():
        if "lora_A" in name:
            assert torch.equal(found[name], values), name


@pytest.mark.parametrize("stored", ["precision=fp64 base=nf4", "precision=bf16", "precision=fp32"])
def test_a_drawn_model_with_magnitudes_begins_as_its_base(base: Path, stored: str) -> None:
    model = attach(causal_lm_on_meta(base), DORA)
    engine = plait.parallelize(model, f"dp=1 {stored}", seed=3)
    batch = adapters.batch_of(0)
    found = engine.evaluate(batch).loss_sum
    with engine.adapters_off():
        assert found == pytest.approx(engine.evaluate(batch).loss_sum, rel=5e-3 if "bf16" in stored else 1e-6)
    magnitudes = [v for name, v in engine.full_parameters().items() if "magnitude" in name]
    weights = [v for name, v in engine.full_parameters().items() if "base_layer.weight" in name]
    for magnitude, weight in zip(magnitudes, weights, strict=True):
        torch.testing.assert_close(magnitude, weight.to(magnitude).norm(dim=1), rtol=1e-6, atol=0)


def test_adapters_that_peft_ties_or_has_merged_are_refused() -> None:
    tied = programs.llama(on_meta=False, layers=1, tied=True)
    config = adapters.LORA | {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    with pytest.raises(ModelError, match="ties the adapters"):
        plait.parallelize(attach(tied, config), "dp=1")
    merged = attach(programs.llama(on_meta=False, layers=1), adapters.LORA)
    merged.merge_adapter()
    with pytest.raises(ModelError, match="merged into the weights"):
        plait.parallelize(merged, "dp=1")


def _counted(plan: str) -> tuple[int, int]:
    model = hf_models.model_of("mixtral", on_meta=False, output_router_logits=True).double()
    engine = plait.parallelize(model, f"{plan} precision=fp64", loss=plait.Preference(loss="orpo"))
    batch = _batch(0)
    engine.step(engine.shard(batch))
    first = engine.pairs.take().pairs
    engine.backward(*engine.loss(engine.shard(batch)))
    engine.discard_step()
    engine.step(engine.shard(batch))
    return first, engine.pairs.take().pairs


def test_pairs_are_counted_once(pool: Pool) -> None:
    """Neither of a first pass for the counts of routers, nor of a step that was discarded."""
    assert pool.run(_counted, 2, "dp=2")[0] == (4, 4)
    ranked = pool.run(_routed, 2, "dp=2 micro=2 router_balance=step")[0]
    assert ranked == 4


def _routed(plan: str) -> int:
    model = hf_models.model_of("mixtral", on_meta=False, output_router_logits=True).double()
    engine = plait.parallelize(model, f"{plan} precision=fp64", loss=plait.Preference(loss="orpo"))
    engine.step(engine.shard(_batch(0)))
    found: int = engine.pairs.take().pairs
    return found
