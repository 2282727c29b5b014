"""Stages refuse by name what they cannot pass on: values that blocks leave in attributes, lists and hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from plait.models import causal_lm_on_meta
from plait.models.trace.modes import Operators as OperatorsOnMeta

WIDTH, VOCABULARY = 8, 16
PLAN = "schedule=interleaved chunks=2 micro=2 precision=fp64"  # two stages on one rank
BYPASSING = "the model's result uses a result of block 0, bypassing the blocks between them"


pytestmark = pytest.mark.usefixtures("in_float64")


class Block(nn.Module):
    def __init__(self, leave: Callable[["Block", Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = 0.0
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.leave(self, y)
        return y


class Net(nn.Module):
    """Returns its blocks' auxiliary losses with its result."""

    def __init__(
        self, leave: Callable[[Block, Tensor], object], collect: Callable[["Net"], Any], *, tokens: bool
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))  # of the result
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if tokens else nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(leave) for _ in range(4))
        self.collect = collect

    def run(self, x: Tensor) -> tuple[Tensor, Any]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale, self.collect(self)


class OfTokens(Net):
    def forward(self, input_ids: Tensor) -> tuple[Tensor, Any]:
        return self.run(input_ids)


class OfNumbers(Net):
    def forward(self, values: Tensor) -> tuple[Tensor, Any]:
        return self.run(values)


def summed(outputs: Any, _: Any) -> tuple[Tensor, int]:
    return outputs[0].square().sum() + outputs[1], len(outputs[0])


def batch_of(tokens: bool) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (4, 5))} if tokens else {"values": torch.randn(4, 3)}


def net(
    leave: Callable[[Block, Tensor], object], collect: Callable[[Net], Any], *, tokens: bool = True
) -> Net:
    return (OfTokens if tokens else OfNumbers)(leave, collect, tokens=tokens)


def leave_a_tensor(block: Block, y: Tensor) -> None:
    block.aux = y.square().mean()


def sum_of_aux(model: Net) -> Any:
    return sum(block.aux for block in model.blocks)


def test_tensors_that_blocks_leave_in_attributes_are_refused_before_the_first_step() -> None:
    model = net(leave_a_tensor, sum_of_aux)
    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(model, PLAN, loss=summed)
    assert [block.aux for block in model.blocks] == [0.0] * 4  # the trace has left nothing


def test_tensors_in_attributes_of_a_model_with_unknown_inputs_are_refused_in_the_first_step() -> None:
    model = net(leave_a_tensor, sum_of_aux, tokens=False)
    engine = plait.parallelize(model, PLAN, loss=summed)
    with pytest.raises(ModelError, match=BYPASSING):
        engine.step(batch_of(tokens=False))
    model = net(leave_a_tensor, sum_of_aux, tokens=False)
    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(model, PLAN, loss=summed, example_batch=batch_of(tokens=False))


def test_numbers_that_blocks_leave_in_attributes_cannot_be_read_in_another_stage() -> None:
    def leave_a_number(block: Block, y: Tensor) -> None:
        block.aux = float(y.detach().square().mean())

    engine = plait.parallelize(net(leave_a_number, sum_of_aux), PLAN, loss=summed)
    with pytest.raises(ModelError, match=r"aux of blocks\.0 is set in another stage"):
        engine.step(batch_of(tokens=True))


def test_attributes_that_no_code_reads_are_accepted() -> None:
    plait.parallelize(net(leave_a_tensor, lambda _: 0.0), PLAN, loss=summed).step(batch_of(tokens=True))


def test_a_list_that_blocks_fill_is_refused() -> None:
    found: list[Tensor] = []

    def collect(_: Net) -> Any:
        total = sum(found)
        found.clear()
        return total

    model = net(lambda _, y: found.append(y.square().mean()), collect)
    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(model, PLAN, loss=summed)


@pytest.mark.parametrize("where", ["model", "loss"])
def test_values_that_hooks_on_the_blocks_layers_collect_are_refused(where: str) -> None:
    found: list[Tensor] = []

    def collect(_: Any) -> Any:
        total = sum(value.square().mean() for value in found)
        found.clear()
        return total

    model = net(lambda *_: None, collect if where == "model" else lambda _: 0.0)
    for block in model.blocks:
        block.linear.register_forward_hook(lambda _module, _args, y: found.append(y))

    def with_collected(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = summed(outputs, batch)
        return total + (collect(None) if where == "loss" else 0.0), count

    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(model, PLAN, loss=with_collected)


def test_a_loss_that_reads_what_the_original_models_blocks_hold_is_refused() -> None:
    model = net(leave_a_tensor, lambda _: 0.0)

    def with_aux(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = summed(outputs, batch)
        return total + sum_of_aux(model), count

    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(model, PLAN, loss=with_aux)


def test_hooks_of_a_model_with_unknown_inputs_need_an_example() -> None:
    model = net(lambda *_: None, lambda _: 0.0, tokens=False)
    model.blocks[0].register_forward_hook(lambda *_: None)
    engine = plait.parallelize(model, PLAN, loss=summed)
    with pytest.raises(ModelError, match="cannot trace the values that the hooks"):
        engine.step(batch_of(tokens=False))


def test_an_example_shows_where_a_parameter_outside_the_blocks_is_used() -> None:
    batch = batch_of(tokens=False)
    model = net(lambda *_: None, lambda _: 0.0, tokens=False)
    engine = plait.parallelize(model, PLAN, loss=summed)
    with pytest.raises(
        ModelError, match="stage 1 computes with scale, which was assigned to another"
    ) as error:
        engine.step(batch)
    assert "parallelize(..., example_batch=batch)" in str(error.value)
    model = net(lambda *_: None, lambda _: 0.0, tokens=False)
    expected = sum(summed(model(**batch), batch)[0].detach() for _ in range(1)) / 4
    result = plait.parallelize(model, PLAN, loss=summed, example_batch=batch).step(batch)
    assert result.loss == pytest.approx(float(expected), rel=1e-12)


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    def read_values(_: Block, y: Tensor) -> None:
        assert y.detach().numpy().any(), "weights of zeros"

    engine = plait.parallelize(net(read_values, lambda _: 0.0), PLAN, loss=summed)
    with pytest.raises(ModelError, match="cannot trace which values the stages need") as error:
        engine.step(batch_of(tokens=True))
    assert "cannot run on meta tensors" in str(error.value)


def test_tables_in_plain_attributes_do_not_stop_the_trace() -> None:
    table = torch.randn(WIDTH)

    def with_table(block: Block, y: Tensor) -> None:
        block.aux = (y * table).mean()

    with pytest.raises(ModelError, match=BYPASSING):
        plait.parallelize(net(with_table, sum_of_aux), PLAN, loss=summed)


@dataclass
class Result:
    value: Tensor


class Residual(nn.Module):
    """Its residual sum is outside of its blocks, so stages cannot compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, values: Tensor) -> Result:
        for block in self.blocks:
            values = values + torch.tanh(block(values))
        return Result(values)


def test_a_residual_sum_outside_of_blocks_is_refused_also_in_a_dataclass() -> None:
    def loss(outputs: Result, _: Any) -> tuple[Tensor, int]:
        return outputs.value.square().sum(), len(outputs.value)

    with pytest.raises(ModelError, match="bypassing the blocks between them"):
        plait.parallelize(Residual(), PLAN, loss=loss).step(batch_of(tokens=False))


_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "head_dim": 8,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
}


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "gpt_oss",
        "phimoe",
        "granitemoe",
        "jamba",
        "minimax",
        "flex_olmo",
        "ernie4_5_moe",
        "granitemoeshared",
        "qwen3_next",
        "minimax_m2",
    ],
)
def test_a_router_loss_of_all_layers_is_refused(family: str, experts: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    config = {"model_type": family, **sizes, "output_router_logits": True}
    model = causal_lm_on_meta(config | _EXPERTS)
    model.set_experts_implementation(experts)
    with pytest.raises(ModelError, match="bypassing the blocks between them"):
        plait.parallelize(model, PLAN, loss=lambda outputs, _: (outputs.aux_loss, 1))


def test_equal_operators_on_meta_run_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.empty(3, 5, dtype=torch.long, device="meta")
    with OperatorsOnMeta():
        assert (numbers / 2).dtype == torch.float64
    monkeypatch.setattr(OperatorsOnMeta, "_results", known := dict(OperatorsOnMeta._results))
    with OperatorsOnMeta():
        assert (numbers / 2).shape == (3, 5)
        assert known == OperatorsOnMeta._results
        torch.set_default_dtype(torch.float32)  # on which the result depends
        assert (numbers / 2).dtype == torch.float32
    config: Any = torch.fx.experimental._config
    with config.patch(meta_nonzero_assume_all_nonzero=True), OperatorsOnMeta():
        assert len(numbers.nonzero()) == 15
    with OperatorsOnMeta(), pytest.raises(NotImplementedError):
        numbers.nonzero()


class WritesWeight(nn.Module):
    """Changes a weight of its head before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.1, 0.1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def test_a_forward_that_changes_a_weight_is_refused_before_any_stage_runs() -> None:
    with pytest.raises(ModelError, match="changes a parameter outside of the blocks") as caught:
        plait.parallelize(WritesWeight(), PLAN, loss=lambda *_: None, example_batch={"x": torch.randn(2, 4)})
    assert caught.value.given == "head.weight"
    assert "weight.clamp(min=0)" in str(caught.value)


def test_a_model_that_cannot_run_is_said_to_fail_itself() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), {"input": torch.randn(2, 4)}
    with pytest.raises(ModelError, match="the model's own forward fails") as caught:
        plait.parallelize(model, PLAN, loss=lambda *_: None, example_batch=batch)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 5x4)" in caught.value.given
    assert "model(**batch) in plain torch" in str(caught.value)
