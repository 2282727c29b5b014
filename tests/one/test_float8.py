"""Products in float8: their numbers, which layers have them, and what is refused."""

import argparse
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import plait
from plait.engine.spec import Arguments, validate
from plait.errors import PlanError
from plait.estimate.explain import explain
from plait.models import causal_lm_on_meta
from plait.parallel import linear_products
from plait.parallel.linear_products import RECIPES, Float8Forward, Float8Products
from plait.parallel.pipeline.split_backward import BackwardSplitter, SplitLinear
from plait.plan import Plan
from plait.train.explain_recipe import plan_table, to_json
from support import float8, programs
from support.compilers import compiles
from support.float8 import outcome


def with_forward(layer: nn.Module, forward: Any) -> nn.Module:
    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def forwards(precision: str, transposed: bool = False) -> list[Any]:
    """Both forwards of an unsharded layer: with and without a backward that can be split."""
    forward = Float8Forward(Float8Products(RECIPES[precision], transposed))
    return [forward, SplitLinear(BackwardSplitter(), forward, forward.products)]


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [24, 21])
def test_a_layer_has_the_bits_of_the_recipes_formulas(precision: str, bias: bool, tokens: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias).bfloat16()
    x, dy = torch.randn(2, tokens, 64).bfloat16(), torch.randn(2, tokens, 48).bfloat16()
    plain = outcome(layer, x, dy)
    float8.convert(layer, precision)
    expected = outcome(layer, x, dy)
    assert not torch.equal(expected[0], plain[0])
    for forward in forwards(precision):
        assert all(map(torch.equal, outcome(with_forward(layer, forward), x, dy), expected))


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")
@pytest.mark.parametrize("precision", RECIPES)
def test_a_traced_layer_is_one_graph_with_the_same_bits(precision: str) -> None:
    torch.manual_seed(0)
    layer = with_forward(nn.Linear(64, 48).bfloat16(), forwards(precision)[0])
    x, dy = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 8, 48).bfloat16()
    traced: Any = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, outcome(traced, x, dy), outcome(layer, x, dy)))


@pytest.mark.parametrize("precision", RECIPES)
def test_a_transposed_layer_has_the_bits_of_the_plain_one(precision: str) -> None:
    torch.manual_seed(0)
    conv, layer = Conv1D(48, 64).bfloat16(), nn.Linear(64, 48).bfloat16()
    layer.weight.data, layer.bias.data = conv.weight.data.t(), conv.bias.data
    float8.convert(layer, precision)
    x, dy = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 8, 48).bfloat16()
    y, dx, dw, db = outcome(layer, x, dy)
    for forward in forwards(precision, transposed=True):
        assert all(map(torch.equal, outcome(with_forward(conv, forward), x, dy), (y, dx, dw.t(), db)))


@pytest.mark.parametrize("precision", RECIPES)
def test_no_tokens_have_no_output_and_zero_gradients(precision: str) -> None:
    layer = nn.Linear(32, 16).bfloat16()
    x, dy = torch.empty(0, 32).bfloat16(), torch.empty(0, 16).bfloat16()
    for forward in forwards(precision):
        y, dx, dw, db = outcome(with_forward(layer, forward), x, dy)
        assert (y.shape, dx.shape) == ((0, 16), (0, 32))
        assert not dw.any()
        assert not db.any()


@pytest.mark.parametrize("precision", RECIPES)
def test_values_that_are_not_finite_stay_so(precision: str) -> None:
    """So that a step with a gradient that overflowed is skipped."""
    layer = with_forward(nn.Linear(32, 16).bfloat16(), forwards(precision)[0])
    for value in (float("inf"), float("nan")):
        dy = torch.randn(16, 16).bfloat16()
        dy[3, 3] = value
        _, dx, dw, _ = outcome(layer, torch.randn(16, 32).bfloat16(), dy)
        assert not dx[3].isfinite().any()
        assert not dw[3].isfinite().any()


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("tokens", [32, 21, 0])
def test_products_by_torchs_kernels_are_the_emulated_ones(precision: str, tokens: int) -> None:
    """By those for CPUs, with operands as the ones for GPUs need them."""
    torch.manual_seed(0)
    layer = with_forward(nn.Linear(64, 48).bfloat16(), forwards(precision)[0])
    x, dy = torch.randn(1, tokens, 64).bfloat16(), torch.randn(1, tokens, 48).bfloat16()
    expected = outcome(layer, x, dy)

    def scaled_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert a.stride() == (a.shape[1], 1), "row-major"
        assert b.stride() == (1, b.shape[0]), "column-major"
        assert b.shape[0] % 16 == b.shape[1] % 16 == 0
        return original(a, b, *args, **kwargs)

    original = torch._scaled_mm
    kernels = mock.patch.object(linear_products, "_emulated_product", linear_products._kernel_product)
    with kernels, mock.patch.object(torch, "_scaled_mm", scaled_mm):
        found = outcome(layer, x, dy)
    rtol = 2**-6 if precision == "fp8-rowwise" else 2**-7  # bf16 is rounded once more for each of two factors
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-4)


# --- which layers


def llama(hidden: int = 64, ffn: int = 104) -> nn.Module:
    """104 is no multiple of 16; 96 is, and so is its half, but no quarter of it."""
    return programs.llama(hidden=hidden, ffn=ffn)


def test_layers_whose_features_are_no_multiples_of_16_stay_in_bf16_and_explain_names_them() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    found = explain(Arguments(llama(), "dp=1 precision=fp8"), {"input_ids": ids, "labels": ids})
    assert len(found.float8.names) == 2 * 4
    assert {name.rpartition(".")[2] for name in found.float8.others} == {"gate_proj", "up_proj", "down_proj"}
    assert not any("lm_head" in name or "embed" in name for name in found.float8.names)
    cells = [*plan_table(found, None).columns[1].cells]
    [text] = [str(cell) for cell in cells if "linear layers" in str(cell)]
    assert text.startswith("8 of 14 linear layers in the blocks\nin bf16: model.layers.0")
    assert "64 to 104 features, which are not multiples of 16" in text
    assert len(to_json(found, None)["float8"]["others"]) == 6


def test_a_shard_that_is_no_multiple_of_16_keeps_its_layer_in_bf16_on_all_ranks() -> None:
    names = validate(Arguments(llama(ffn=96), "tp=2 precision=fp8")).float8.names
    assert len(names) == 14
    spec = validate(Arguments(llama(ffn=96), "tp=4 precision=fp8"))
    assert spec.float8.others["model.layers.0.mlp.up_proj"] == "shards of 24 features"


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        validate(Arguments(llama(hidden=40, ffn=56), "precision=fp8"))
    assert "no linear layer of the blocks can multiply in float8" in str(caught.value)
    assert "40 to 40 features" in str(caught.value)
    with pytest.raises(PlanError, match="precision=fp8 needs repeated blocks"):
        validate(Arguments(nn.Linear(16, 16), "precision=fp8"))


def test_under_sp_gradients_and_inputs_of_weight_gradients_are_gathered_in_float8() -> None:
    """In each block: two inputs in bf16 in forward, then both again and two gradients."""
    ids = torch.zeros(2, 16, dtype=torch.long)

    def gathered(precision: str) -> int:
        plan = f"tp=2 sp=true precision={precision}"
        found = explain(Arguments(llama(ffn=96), plan), {"input_ids": ids, "labels": ids})
        traffic = found.rank_classes[0].traffic["layers"]
        return sum(count.num_bytes for key, count in traffic.items() if key.op == "all-gather")

    one = ids.numel() * 64  # elements of a full activation
    assert gathered("bf16") - gathered("fp8") == 2 * 4 * one
    assert gathered("bf16") == gathered("fp8-rowwise")


# --- where


def test_a_gpu_without_float8_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    device = torch.device("cuda", 0)
    with pytest.raises(PlanError) as caught:
        validate(Arguments(llama(), "precision=fp8"), device=device)
    error = caught.value
    assert error.fact == "this GPU has no float8 products"
    assert error.given == "precision=fp8 on NVIDIA A100-SXM4-80GB, compute capability 8.0"
    assert error.expected == "an NVIDIA GPU with compute capability 8.9 or higher"
    assert error.hint == "precision=bf16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert validate(Arguments(llama(), "precision=fp8"), device=device).float8.names


def test_on_a_cpu_a_notice_says_that_products_are_emulated() -> None:
    with pytest.warns(UserWarning, match="precision=fp8: CPUs have no float8 products") as caught:
        plait.parallelize(llama(), "precision=fp8")
    assert len(caught) == 1


# --- training


def losses(plan: str, steps: int = 40) -> list[float]:
    """Losses of a Llama that reads Python, smaller than the demo's."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = causal_lm_on_meta({"model_type": "llama", "vocab_size": 128, **sizes})
    adamw = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    engine = plait.parallelize(model, plan, optimizer_args=adamw, clip_norm=1.0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (8, 1), generator=generator)
        ids = text[starts + torch.arange(64)]
        found.append(engine.step({"input_ids": ids, "labels": ids}).loss)
    return found


@pytest.mark.quick
def test_losses_in_float8_end_within_a_percent_of_those_in_bf16() -> None:
    expected = losses("precision=bf16")
    assert expected[-1] < 0.7 * expected[0], "it learns"
    for precision in ("fp8", "fp8-rowwise"):
        found = losses(f"precision={precision}")
        assert found != expected
        assert sum(found[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.01)


@pytest.mark.parametrize("words", ["recompute=full", "recompute=selective", "zero=3"])
def test_options_of_one_process_do_not_change_a_bit(words: str) -> None:
    assert losses(f"precision=fp8 {words}", 3) == losses("precision=fp8", 3)


@pytest.mark.parametrize("in_cpp", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_compiled_model_in_float8_is_the_uncompiled_one(in_cpp: bool) -> None:
    """In float64 around the products: bf16 is rounded less often in compiled code."""
    ids = torch.randint(0, programs.VOCABULARY, (4, 16))

    def run(plan: str) -> tuple[float, dict[str, Tensor]]:
        with mock.patch.object(Plan, "dtype", "fp64"), compiles(in_cpp=in_cpp):
            engine = plait.parallelize(llama(ffn=96), plan, optimizer_args=programs.ADAMW, seed=3)
            return engine.step({"input_ids": ids, "labels": ids}).loss, engine.full_gradients()

    (loss, gradients), (found_loss, found) = run("precision=fp8"), run("precision=fp8 compile=true")
    assert found_loss == pytest.approx(loss, rel=1e-12)
    assert programs.largest_difference(found, gradients)[0] < 1e-9


def test_weights_are_saved_in_high_precision() -> None:
    engine = plait.parallelize(llama(), "precision=fp8")
    other = plait.parallelize(llama(), "precision=bf16")
    saved: dict[str, Any] = engine.state()
    assert {(k, t.dtype, t.shape) for k, t in saved.items()} == {
        (k, t.dtype, t.shape) for k, t in other.state().items()
    }
    dtypes = {tensor.dtype for name, tensor in saved.items() if name.startswith("weights/")}
    assert dtypes == {torch.float32}
