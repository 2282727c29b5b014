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
from plait.parallel.zero.block_codes import rounded
from plait.train.export import convert
from support import adapters, programs
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
