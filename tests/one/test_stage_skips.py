"""Stages pass on outputs of earlier blocks: skip connections, encoders and their decoders, towers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import plait
from plait.errors import ModelError
from plait.models import blocks_of
from plait.verify import parse_source
from plait.verify.model_spec import compute_in_float64
from support import stages_by_hand
from support.stages_by_hand import max_difference

WIDTH = 8


pytestmark = pytest.mark.usefixtures("in_float64")


class Towers(nn.Module):
    """Its second tower, of another width and registered first, reads the first one's output in every block;
    between the two is a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3))
        self.image = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.is_in_place = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.image:
            x = torch.tanh(block(x))
        y = seen = self.up(self.norm(x)).mean(1)
        for block in self.text:
            out = block(y + seen)
            y = y + torch.tanh(out)  # a residual sum outside of blocks
            if self.is_in_place:
                out.add_(1.0)
        return y


def squares(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().sum()


def assert_stages_compute_the_same(
    model: nn.Module, stages: Any, batch: dict[str, Tensor], loss: Any
) -> None:
    expected, gradients = stages_by_hand.whole(model, [batch], loss)
    found, in_stages = stages_by_hand.in_stages(model, stages, [batch], loss)
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    assert max_difference(in_stages, gradients) < 1e-9


@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_stages_through_two_towers_of_different_widths_compute_the_same(num_stages: int) -> None:
    model, batch = Towers(), {"x": torch.randn(4, 5, WIDTH)}
    _, stages = stages_by_hand.stages_of(model, num_stages, batch=batch)
    names = [name for stage in stages for name, _ in stage.blocks]
    assert names == [f"{tower}.{number}" for tower in ("image", "text") for number in range(3)]
    assert_stages_compute_the_same(model, stages, batch, squares)


def test_an_output_that_is_changed_in_place_before_a_later_stage_reads_it_is_refused() -> None:
    model, batch = Towers(), {"x": torch.randn(4, 5, WIDTH)}
    model.is_in_place = True
    plan = "schedule=interleaved chunks=6 micro=1 precision=fp64"
    engine = plait.parallelize(model, plan, loss=lambda y, _: (squares(y, _), 1), example_batch=batch)
    with pytest.raises(ModelError, match="output of block 3 is changed in place"):
        engine.step(batch)


def test_a_list_whose_modules_are_not_all_called_has_no_blocks() -> None:
    class Choices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.heads[0](x)

    batch = {"x": torch.randn(2, WIDTH)}
    assert [name for name, _ in blocks_of(Choices(), None, batch)] == [f"layers.{n}" for n in range(3)]


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 1, 1), (0, 4, 0), (0, 1, 3)])
def test_stages_go_through_both_halves_of_an_encoder_decoder(counts: tuple[int, ...]) -> None:
    """T5, with a shared embedding, and position biases that the first block of each half computes."""
    sizes: dict[str, Any] = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}
    sizes |= {"num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**sizes)).double().train()
    compute_in_float64(model, [])
    ids, labels = torch.randint(1, 61, (3, 7)), torch.randint(1, 61, (3, 5))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    _, stages = stages_by_hand.stages_of(model, len(counts), batch=batch, given=counts)
    halves = [name.partition(".")[0] for stage in stages for name, _ in stage.blocks]
    assert halves == ["encoder", "encoder", "decoder", "decoder"]
    assert_stages_compute_the_same(model, stages, batch, lambda outputs, _: outputs.logits.square().sum())


def test_values_of_a_batch_decide_what_a_model_computes_while_it_is_split() -> None:
    """Sizes of images, read on the host, as in Qwen2-VL."""

    class Sized(Towers):
        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
            parts = x.flatten(0, 1).split(sizes.prod(1).tolist())
            return super().forward(torch.stack([part.mean(0, keepdim=True) for part in parts]))

    model = Sized()
    batch = {"x": torch.randn(2, 6, WIDTH), "sizes": torch.tensor([[2, 3], [1, 6]])}
    _, stages = stages_by_hand.stages_of(model, 3, batch=batch)
    assert_stages_compute_the_same(model, stages, batch, squares)


def test_values_that_a_model_computes_do_not_keep_it_from_being_split() -> None:
    """Numbers of tokens of experts, read on the host, as in JetMoE."""

    class Counted(Towers):
        def forward(self, x: Tensor) -> Tensor:
            experts = x.sum(-1).argsort().flatten() % 2
            sizes = [int(size) for size in torch.stack([1 - experts, experts]).sum(1).tolist()]
            parts = x.flatten(0, 1)[experts.argsort()].split(sizes)
            return super().forward(torch.cat([parts[0] * 2, parts[1]]).view_as(x))

    model, batch = Counted(), {"x": torch.randn(2, 6, WIDTH)}
    _, stages = stages_by_hand.stages_of(model, 3, batch=batch)
    assert_stages_compute_the_same(model, stages, batch, squares)


@pytest.mark.filterwarnings("ignore")  # families' own
@pytest.mark.parametrize("family", ["jetmoe", "blt"])
def test_stages_of_families_that_read_computed_values_compute_the_same(family: str) -> None:
    model = parse_source(family, layers=2).spec().build_reference(torch.float64).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    ids = torch.randint(3, 64, (2, 12), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    _, stages = stages_by_hand.stages_of(model, 2, batch=batch)
    assert_stages_compute_the_same(model, stages, batch, lambda outputs, _: outputs.logits.square().sum())


def test_an_evaluation_calls_the_modules_of_torchs_transformer_encoder_whose_weights_are_shards() -> None:
    """Its fused kernel would read the weights of stages that another rank has."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square()[~batch["padding"]].sum(), 1

    batch = {"x": torch.randn(4, 5, WIDTH), "padding": torch.arange(5) > torch.tensor([[4], [3], [2], [4]])}
    model = Encoder()
    expected = loss(model(**batch), batch)[0]
    engine = plait.parallelize(
        model, "schedule=interleaved chunks=2 micro=2 precision=fp64", loss=loss, example_batch=batch
    )
    assert engine.evaluate(batch).loss_sum == pytest.approx(expected.item(), rel=1e-9)
