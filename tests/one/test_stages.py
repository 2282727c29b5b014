"""Cutting plain models into stages: what travels, what is refused, what hooks see."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import ModelError
from plait.models import (
    Chain,
    blocks_of,
)
from support import programs, stages_by_hand

WIDTH = 8
LLAMA_LAYERS = 4


pytestmark = pytest.mark.usefixtures("in_float64")


def llama(**more: Any) -> Any:
    model: Any = programs.llama(on_meta=False, **more)
    config = model.config
    config.num_hidden_layers = LLAMA_LAYERS
    config.layer_types = None
    return programs.with_exact_norms(type(model)(config)).double()


def tokens(*shapes: tuple[int, int]) -> list[dict[str, Tensor]]:
    found = [torch.randint(0, programs.VOCABULARY, shape) for shape in shapes]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def summed_loss(outputs: Any, batch: Any) -> Tensor:
    return programs.summed_loss(outputs, batch)[0]


def squares(outputs: Tensor, _: Any) -> Tensor:
    return (outputs * torch.linspace(-1.0, 1.0, outputs.numel()).view_as(outputs)).square().sum()


def assert_same(model: nn.Module, stages: Any, batches: Any, loss: Any) -> None:
    expected, gradients = stages_by_hand.whole(model, batches, loss)
    found, in_stages = stages_by_hand.in_stages(model, stages, batches, loss)
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    assert stages_by_hand.max_difference(in_stages, gradients) < 1e-9
    assert any(gradient is not None for gradient in gradients.values())


class TwoStreams(nn.Module):
    """A block that takes and returns two tensors and a number, the second one of another shape each time."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.across = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH + number, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + number + 1)

    def forward(self, x: Tensor, y: Tensor, depth: int) -> tuple[Tensor, Tensor, int, None]:
        y = torch.tanh(self.down(y))
        return self.across(x) + y, self.up(y * x), depth + 1, None


class Streams(nn.Module):
    """Its own code takes apart what blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(TwoStreams(number) for number in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        x = self.enter(values)
        y, depth = x, 0
        for block in self.blocks:
            x, y, depth, nothing = block(x, y, depth)
            assert nothing is None
        return self.norm(x) * depth + y.mean()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_all_that_a_block_returns_travels(num_stages: int) -> None:
    model = Streams()
    _, stages = stages_by_hand.stages_of(model, num_stages)
    assert_same(model, stages, [{"values": torch.randn(rows, 3)} for rows in (5, 2)], squares)


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(programs.VOCABULARY, WIDTH)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"x": self.table(input_ids), "steps": torch.ones(input_ids.shape)}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, *, x: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.wide(x)) * steps[..., None], x.sum(-1)


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, programs.VOCABULARY)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.head(x) + bias[..., None]


@pytest.mark.parametrize("given", [(1, 3), (2, 2), (1, 1, 1, 1), (2, 1, 1)])
def test_a_chain_is_cut_between_any_of_its_modules(given: tuple[int, ...]) -> None:
    model = Chain([Enter(), Middle(), Leave(), nn.Tanh()])
    assert [name for name, _ in blocks_of(model)] == ["0", "1", "2", "3"]
    _, stages = stages_by_hand.stages_of(model, len(given), given=given)
    assert_same(model, stages, tokens((2, 5), (3, 4)), summed_loss)


def test_a_sequential_is_cut_between_its_children() -> None:
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    _, stages = stages_by_hand.stages_of(model, 3)
    assert_same(model, stages, [{"input": torch.randn(4, 3)}], squares)


class Sides(nn.Module):
    """Blocks that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.middle, self.top = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.middle(self.bottom(x).relu())))


def test_blocks_may_be_named_one_by_one() -> None:
    model = Sides()
    _, stages = stages_by_hand.stages_of(model, 3, blocks=[model.bottom, model.middle, model.top])
    assert [name for stage in stages for name, _ in stage.blocks] == ["bottom", "middle", "top"]
    assert_same(model, stages, [{"x": torch.randn(4, WIDTH)}], squares)


class PerBlock(nn.Module):
    """Every block gets something that is computed before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.each = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) if x is None else x
        each = self.each(x)
        for block in self.blocks:
            x = torch.tanh(block(x + each))
        return self.head(x)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("counts", "users"), [((2, 1, 1), (0, 1, 2)), ((0, 2, 2), (0, 1, 2)), ((2, 2, 0), (0, 1))]
)
def test_inputs_of_all_blocks_are_computed_on_their_stages(
    counts: tuple[int, ...], users: tuple[int, ...]
) -> None:
    model = PerBlock()
    cut, stages = stages_by_hand.stages_of(model, 3, given=counts)
    everywhere = ("embed.weight", "each.weight", "each.bias")
    assert dict(cut.shared) == dict.fromkeys(everywhere, users)
    assert_same(model, stages, tokens((2, 5)), summed_loss)


class OnFloats(PerBlock):
    """The same, of inputs of which nothing is known before."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x=x)


def test_a_leak_past_the_blocks_is_reported_in_the_first_run() -> None:
    model = OnFloats()
    cut, stages = stages_by_hand.stages_of(model, 2)
    assert not cut.shared
    batch = {"x": torch.randn(2, 5, WIDTH)}
    with pytest.raises(ModelError, match="stage 1 needs values that only other stages have") as message:
        stages_by_hand.forward(model, stages, batch)
    assert "each.weight, each.bias" in str(message.value)
    assert "embed.weight" not in str(message.value)  # it did not run
    assert "\n  try     : blocks that return" in str(message.value)


class LateStem(nn.Module):
    """Its first layer is registered last, and what it takes is not known before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.stem = nn.Linear(3, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def in_two_chunks(model: nn.Module, **options: Any) -> plait.Engine:
    return plait.parallelize(
        model,
        "schedule=interleaved chunks=2 micro=2 precision=fp64",
        loss=lambda outputs, _: (squares(outputs, None), len(outputs)),
        **options,
    )


def test_a_first_layer_that_is_registered_last_needs_an_example_batch() -> None:
    batch = {"pixels": torch.randn(4, 3)}
    with pytest.raises(ModelError, match=r"stage 0 computes with stem\.weight"):
        in_two_chunks(LateStem()).step(batch)
    assert not in_two_chunks(LateStem(), example_batch=batch).step(batch).skipped


def test_nan_in_a_first_batch_is_no_leak_into_the_first_stage() -> None:
    engine = in_two_chunks(Streams())
    assert engine.step({"values": torch.full((4, 3), torch.nan)}).skipped
    assert not engine.step({"values": torch.randn(4, 3)}).skipped


class Skips(nn.Module):
    """The last block takes what the second one returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) if x is None else x
        outputs = [x]
        for block in self.blocks[:-1]:
            outputs.append(torch.tanh(block(outputs[-1])))
        return self.blocks[3](outputs[-1] + outputs[2])


@pytest.mark.parametrize("given", [(3, 1), (2, 2), (1, 3), (2, 1, 1), (1, 1, 1, 1)])
def test_the_output_of_a_block_is_passed_on_to_the_later_block_that_reads_it(given: tuple[int, ...]) -> None:
    model = Skips()
    _, stages = stages_by_hand.stages_of(model, len(given), given=given)
    batches = tokens((2, 5))
    assert_same(model, stages, batches, lambda outputs, _: squares(outputs, None))


def test_a_connection_over_blocks_found_late_is_reported_too() -> None:
    class Floats(Skips):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x=x)

    model = Floats()
    _, stages = stages_by_hand.stages_of(model, 2, given=(3, 1))
    with pytest.raises(ModelError, match="stage 1 needs values") as message:
        stages_by_hand.forward(model, stages, {"x": torch.randn(2, WIDTH)})
    assert "without the values of earlier blocks" in str(message.value)


class Ways(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize(
    ("order", "met"),
    [
        ([0, 1, 2, 0], "stage 2 called blocks.0 out of order"),
        ([1, 0, 2], "stage 0 called blocks.1 out of order"),
        ([0, 2], "stage 1 called blocks.2 out of order"),
        ([0], "stage 1 did not call all of its blocks"),
    ],
)
def test_blocks_that_are_not_called_in_order_are_refused(order: list[int], met: str) -> None:
    model = Ways(order)
    _, stages = stages_by_hand.stages_of(model, 3)
    with pytest.raises(ModelError, match="does not call each of its blocks once, in order") as message:
        stages_by_hand.forward(model, stages, {"x": torch.randn(2, WIDTH)})
    assert met in str(message.value)


class Reads(Ways):
    """Reads the dtype of its first block outside of the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        assert not hasattr(self.blocks[0], "gate")
        return x.to(self.blocks[0].weight.dtype)


def test_an_attribute_of_another_stages_block_is_named() -> None:
    model = Reads([0, 1, 2])
    _, stages = stages_by_hand.stages_of(model, 2)
    with pytest.raises(ModelError, match="read outside of the block") as message:
        stages_by_hand.forward(model, stages, {"x": torch.randn(2, WIDTH)})
    assert "blocks.0.weight, on stage 1" in str(message.value)


class OfKind(nn.Linear):
    """A block with an attribute of its class, and with adapters by language."""

    kind = "full"

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.tail = nn.Module()
        self.tail.adapters = nn.ModuleDict({"de": nn.Linear(WIDTH, WIDTH), "en": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor, language: str) -> Tensor:
        return self.tail.adapters[language](super().forward(x))


class ReadsConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfKind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        last = list(self.blocks[0].tail.adapters.keys())[-1]
        for block in self.blocks:
            x = block(x * {"full": 2}[block.kind], last)
        return x


def test_constants_of_another_stages_block_may_be_read() -> None:
    model = ReadsConstants()
    _, stages = stages_by_hand.stages_of(model, 2)
    assert_same(model, stages, [{"x": torch.randn(2, WIDTH)}], squares)


class Checkpointed(Ways):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_over_stages_is_named_as_a_cause() -> None:
    model = Checkpointed([0, 1, 2])
    _, stages = stages_by_hand.stages_of(model, 2)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        stages_by_hand.in_stages(
            model, stages, [{"x": torch.randn(2, WIDTH, requires_grad=True)}], lambda out, _: out.sum()
        )


def test_frozen_parts_need_no_gradient_of_activations() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    _, stages = stages_by_hand.stages_of(model, 2, given=(2, 2))
    batches = tokens((2, 5))
    sent, _ = stages_by_hand.forward(model, stages, batches[0])
    assert not sent[0].requires_grad
    assert_same(model, stages, batches, summed_loss)


def test_parameters_that_stages_share_get_all_their_gradient() -> None:
    model = llama(tied=True)
    model.model.layers[3].mlp = model.model.layers[0].mlp  # and a layer's, over the same stages
    cut, stages = stages_by_hand.stages_of(model, 2)
    assert cut.stages_with("model.embed_tokens.weight") == (0, 1)
    assert cut.stages_with("model.layers.0.mlp.up_proj.weight") == (0, 1)
    assert_same(model, stages, tokens((2, 5), (1, 7)), summed_loss)


def test_a_stage_holds_its_own_and_of_the_others_nothing() -> None:
    model = llama()
    cut, stages = stages_by_hand.stages_of(model, 2)
    mine = [dict(stage.module.named_parameters()) for stage in stages]
    assert mine[0].keys().isdisjoint(mine[1])
    whole = dict(model.named_parameters())
    assert {**mine[0], **mine[1]}.keys() == whole.keys()
    for name, parameter in whole.items():
        assert mine[cut.owner[name]][name] is parameter
    head = stages[0].module.lm_head.weight
    assert (head.shape, head.untyped_storage().nbytes()) == (model.lm_head.weight.shape, 8)
    assert bool(head.isnan().all())
    assert stages[1].module.lm_head is model.lm_head
    assert stages[0].module.config is model.config
    assert len(stages[0].module.model.layers) == LLAMA_LAYERS
    assert dict(model.named_parameters()).keys() == whole.keys()  # the model is as it was


def test_one_stage_is_the_model() -> None:
    model = llama()
    cut, (stage,) = stages_by_hand.stages_of(model, 1)
    assert stage.module is model
    assert stage.blocks == blocks_of(model)
    assert set(cut.owner.values()) == {0}
    assert not cut.shared


def test_a_module_that_is_twice_in_a_list_is_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ModelError, match="twice") as caught:
        Chain([layer, nn.ReLU(), layer])
    assert "Linear, ReLU, Linear" in str(caught.value)
