"""Entries of a batch: what forward receives, what only the loss reads, and what is refused by name."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from support import programs

BATCH = programs.batches(1)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x if gain is None else x * gain


def weighted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return ((outputs - batch["labels"]).square() * batch["weights"]).sum(), outputs.numel()


def unweighted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch["labels"]).square().sum(), outputs.numel()


def engine_of(plan: str = "dp=1 micro=2", **options: Any) -> plait.Engine:
    torch.manual_seed(0)
    return plait.parallelize(Net(), plan, optimizer_args={"lr": 1e-2}, **options)


def batch_of(**more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, 4, generator=generator)
    return {"x": x, "labels": y, **more}


@pytest.mark.quick
def test_entries_that_forward_does_not_name_are_for_the_loss_alone() -> None:
    weights = torch.zeros(8, 1)
    weights[:3] = 1.0
    one = engine_of(loss=weighted).step(batch_of(weights=weights))
    three = engine_of(loss=unweighted).evaluate({k: v[:3] for k, v in batch_of().items()})
    assert one.loss * 32 == pytest.approx(three.loss_sum, rel=1e-6)


def test_the_losss_own_entries_keep_their_dtype() -> None:
    seen = []

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        seen.append((outputs.dtype, batch["x"].dtype, batch["weights"].dtype))
        return outputs.sum() * batch["weights"].sum(), 1

    engine_of("precision=bf16", loss=loss).step(batch_of(weights=torch.ones(8)))
    assert seen == [(torch.bfloat16, torch.bfloat16, torch.float32)]


def test_entries_that_forward_names_reach_it() -> None:
    engine = engine_of(loss=unweighted)
    assert engine.step(batch_of(gain=torch.zeros(8, 1))).grad_norm == 0.0


@pytest.mark.parametrize("name", ["gains", "idx"])
def test_an_entry_that_neither_the_model_nor_the_loss_uses_is_refused_by_name(name: str) -> None:
    engine = engine_of(loss=unweighted)
    with pytest.raises(ModelError, match="neither the model nor the loss uses") as caught:
        engine.step(batch_of(**{name: torch.zeros(8, 1)}))
    assert str(caught.value.given).startswith(f"{name};")
    assert caught.value.hint == ("gain" if name == "gains" else f"a batch without {name}")
    assert not engine.step(batch_of()).skipped


def test_an_argument_that_the_batch_lacks_is_named() -> None:
    batch = batch_of()
    batch["xs"] = batch.pop("x")
    with pytest.raises(ModelError, match="forward needs an argument that the batch does not have") as caught:
        engine_of(loss=unweighted).step(batch)
    assert str(caught.value.expected) == "x"
    assert "xs" in str(caught.value.given)


@pytest.mark.parametrize("name", ["shift_labels", "num_items_in_batch", "foo"])
def test_entries_that_transformers_would_swallow_are_refused_unless_the_loss_reads_them(name: str) -> None:
    options: dict[str, Any] = {"optimizer_args": programs.ADAMW}
    batch = {**BATCH, name: BATCH["labels"]}
    with pytest.raises(ModelError, match=re.escape(name)):
        plait.parallelize(programs.llama(), "dp=1", **options).step(batch)

    def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return outputs.logits.sum() * batch[name].float().mean(), 1

    assert not plait.parallelize(programs.llama(), "dp=1", loss=loss, **options).step(batch).skipped


def test_a_transformers_model_without_a_cache_is_called_without_it() -> None:
    config = transformers.EncodecConfig(
        target_bandwidths=[24.0], num_filters=4, hidden_size=8, upsampling_ratios=[4, 2], codebook_size=16
    )

    def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (outputs.audio_values - batch["labels"]).square().sum(), outputs.audio_values.numel()

    engine = plait.parallelize(transformers.EncodecModel(config), "dp=1", loss=loss)
    wave = torch.randn(2, 1, 64)
    assert not engine.step({"input_values": wave, "labels": wave}).skipped


def test_a_forward_that_takes_any_keyword_receives_every_entry() -> None:
    class Open(Net):
        def forward(self, **entries: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(entries["x"]) + entries["shift"]

    engine = plait.parallelize(Open(), "dp=1", loss=unweighted)
    assert not engine.step(batch_of(shift=torch.ones(8, 4))).skipped


def test_a_chains_entries_are_those_of_its_first_module() -> None:
    engine = plait.parallelize([Net(), nn.Linear(4, 4)], "dp=1", loss=weighted)
    assert not engine.step(batch_of(weights=torch.ones(8, 1))).skipped
    with pytest.raises(ModelError, match="idx"):
        engine.step(batch_of(weights=torch.ones(8, 1), idx=torch.ones(8)))


def test_a_loss_that_takes_the_whole_batch_uses_all_of_it() -> None:
    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return weighted(outputs, {**batch})

    assert not engine_of(loss=loss).step(batch_of(weights=torch.ones(8, 1))).skipped


def test_an_error_of_forward_names_the_entries_that_it_does_not_take() -> None:
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    engine = plait.parallelize(transformers.BertForMaskedLM(config), "dp=1")
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="input_ids") as error:
        engine.step({"input_id": ids, "labels": ids})
    assert any("does not take these entries of the batch: input_id" in note for note in error.value.__notes__)
