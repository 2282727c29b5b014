"""An export with compressed weights holds what its format can: the nearest codes, the largest weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.checkpoint import HuggingFaceFiles
from plait.checkpoint.compress import Compression, Quantization, Sparsity
from plait.errors import CheckpointError, ConfigError, ModelError, RunError
from plait.models import causal_lm_on_meta
from plait.models.linear_weights import block_linears, expert_weights
from plait.train.export import export_folder
from plait.train.model import initial_model
from plait.train.sections import ModelConfig
from support.compressed_models import MODELS, saved

FORMS = {
    "int8": Quantization(8, False, None),
    "int4": Quantization(4, False, 16),
    "fp8": Quantization(8, True, None),
}


def nearest(weight: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """The nearest of the levels times the scale, for each element."""
    grouped = weight.view(*scale.shape, -1, 1)
    choices = levels * scale[..., None, None]
    at = (grouped - choices).abs().argmin(-1, keepdim=True)
    return choices.expand(*grouped.shape[:-1], -1).gather(-1, at).view_as(weight)


FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
LEVELS = {
    "int8": torch.arange(-128.0, 128),
    "int4": torch.arange(-8.0, 8),
    "fp8": FP8[FP8.isfinite()].sort().values,
}


@pytest.mark.quick
@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_folder_has_the_nearest_codes_of_linear_weights_and_the_others_as_they_are(
    tmp_path: Path, name: str, weights: Any
) -> None:
    original, config = saved(tmp_path / "in", MODELS[name]), MODELS[name]
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression(weights))
    export_folder(tmp_path / "out", tmp_path / "back")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    linears = {*block_linears(causal_lm_on_meta(config))} | {key for key in original if ".experts." in key}
    assert back.keys() == original.keys() >= linears
    for key, weight in original.items():
        if key not in linears:
            assert torch.equal(weight, back[key])
            assert torch.equal(weight, stored[key])
            continue
        scale = stored[f"{key}_scale"]
        largest = weight.view(*scale.shape, -1).abs().amax(-1)
        torch.testing.assert_close(scale, largest / {"int8": 127.5, "int4": 7.5, "fp8": 448}[weights])
        # Of two levels that are equally near, either.
        error = (back[key] - weight).abs() - (nearest(weight, scale, LEVELS[weights]) - weight).abs()
        assert error.abs().max() < 1e-6
        if weights != "fp8":
            step = scale[..., None].expand(*scale.shape, weight.shape[1] // scale.shape[1])
            assert ((back[key] - weight).abs() <= step.reshape(weight.shape) * 0.5001).all()
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert not {f"{layer}.weight" for layer in ignored} & linears
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    bits = {"int8": 8, "int4": 4, "fp8": 8}[weights]
    codes = sum(tensor.nbytes for key, tensor in stored.items() if key.removesuffix("_packed") in linears)
    assert codes == sum(original[key].numel() for key in linears) * bits // 8


def test_routers_and_tied_heads_stay_as_they_are() -> None:
    routed = causal_lm_on_meta(MODELS["qwen3_moe"])
    assert {name.split(".")[-2] for name in block_linears(routed)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[-1] for name in expert_weights(routed)} == {"gate_up_proj", "down_proj"}
    tied = block_linears(causal_lm_on_meta(MODELS["llama"]))
    assert len(tied) == 2 * 7
    assert all(name.startswith("model.layers.") for name in tied)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from(["int8", "int4"]), st.integers(0, 2**31))
def test_packed_codes_are_restored(outputs: int, inputs: int, weights: str, seed: int) -> None:
    form = Quantization(FORMS[weights].bits, False, None)
    generator, half = torch.Generator().manual_seed(seed), 2 ** (form.bits - 1)
    codes = torch.randint(-half, half, (outputs, inputs), generator=generator, dtype=torch.int8)
    stored = form.stored("x.weight", codes, torch.ones(outputs, 1))
    assert stored["x.weight_packed"].shape == (outputs, form.packed_width(inputs))
    assert torch.equal(form.unpacked(stored["x.weight_packed"], inputs), codes)
    for at in range(inputs):  # the first code in the lowest bits
        word = int(stored["x.weight_packed"][0, at * form.bits // 32]) & 0xFFFFFFFF
        assert (word >> at * form.bits % 32 & (2 * half - 1)) - half == int(codes[0, at])


@pytest.mark.parametrize(
    ("text", "row", "kept"), [("2:4", 4, 2), ("1:4", 4, 1), ("0.5", 1024, 512), (".3", 1024, 717)]
)
def test_pruning_keeps_the_largest_weights(text: str, row: int, kept: int) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    pruned = Sparsity.parse(text).pruned(weight)
    for values, left in zip(weight.view(-1, row), pruned.view(-1, row), strict=True):
        assert torch.equal(left, torch.where(values.abs() >= values.abs().sort().values[-kept], values, 0))
    equal = Sparsity.parse("2:4").pruned(torch.ones(1, 8))
    assert equal.tolist() == [[1, 1, 0, 0] * 2]


@pytest.mark.parametrize("weights", [None, "int8", "int4", "fp8"])
def test_a_pruned_folder_has_zeros_also_in_codes(tmp_path: Path, weights: Any) -> None:
    original = saved(tmp_path / "in", MODELS["llama"])
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression(weights, Sparsity.parse("2:4")))
    export_folder(tmp_path / "out", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    linears = block_linears(causal_lm_on_meta(MODELS["llama"]))
    for key, weight in original.items():
        if key in linears:
            zeros = (back[key].view(-1, 4) == 0).sum(1)
            assert (zeros == 2).all() if weights in (None, "fp8") else (zeros >= 2).all()
        else:
            assert torch.equal(back[key], weight)


def test_the_dtype_of_the_other_weights_and_of_scales_is_that_of_the_export(tmp_path: Path) -> None:
    saved(tmp_path / "in", MODELS["llama"], torch.bfloat16)
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression("int4"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.int32, torch.int64}


def test_a_run_starts_from_quantized_weights_as_they_are_dequantized(tmp_path: Path) -> None:
    saved(tmp_path / "in", MODELS["llama"])
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression("int8"))
    model, weights = initial_model(ModelConfig(path=tmp_path / "out", pretrained=True))
    assert weights == tmp_path / "out"
    with HuggingFaceFiles.open(weights).reader(model) as reader:
        assert set(reader.dtypes.values()) == {torch.float32}
        assert reader.shapes["weights/model.layers.0.mlp.up_proj.weight"] == (80, 32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_an_error_and_leaves_no_export(tmp_path: Path, bad: float) -> None:
    """A scale of NaN would be 1, and with it the row's codes 0."""
    tensors = saved(tmp_path / "in", MODELS["llama"])
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    for compression in (*map(Compression, FORMS), Compression(None, Sparsity.parse("2:4"))):
        with pytest.raises(ModelError, match="not finite") as caught:
            export_folder(tmp_path / "in", tmp_path / "out", None, compression)
        assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_models_that_cannot_be_compressed_and_other_formats_are_errors(tmp_path: Path) -> None:
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    }
    saved(tmp_path / "gpt2", gpt2)
    with pytest.raises(ModelError, match="no weights that are compressed"):
        export_folder(tmp_path / "gpt2", tmp_path / "out", None, Compression("int8"))
    saved(tmp_path / "odd", {**MODELS["llama"], "intermediate_size": 42})
    with pytest.raises(ModelError, match="groups"):
        export_folder(tmp_path / "odd", tmp_path / "out", None, Compression("int4"))
    with pytest.raises(ModelError, match="multiple of 4"):
        export_folder(tmp_path / "odd", tmp_path / "out", None, Compression(None, Sparsity.parse("2:4")))
    for text in ("1", "0", "4:2", "0:4", "half", "-0.5"):
        with pytest.raises(ConfigError, match="not a sparsity"):
            Sparsity.parse(text)
    assert not (tmp_path / "out").exists()
    export_folder(tmp_path / "odd", tmp_path / "out", None, Compression("int8"))
    with pytest.raises(RunError, match="exists"):
        export_folder(tmp_path / "odd", tmp_path / "out", None, Compression("int8"))
    _assert_other_formats_are_refused(tmp_path / "out")


def _assert_other_formats_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]
    model = causal_lm_on_meta(folder)
    for change, words in (
        ({"weights": {**scheme["weights"], "symmetric": False}}, "compressed-tensors, in a format"),
        ({"weights": {**scheme["weights"], "strategy": "group", "group_size": "2"}}, "in a format"),
        ({"weights": {**scheme["weights"], "actorder": "group"}}, "in a format"),
        ({"weights": {**scheme["weights"], "num_bits": 4}}, "codes of shape"),
        ({"weights": {**scheme["weights"], "strategy": "group", "group_size": 2}}, "scales of shape"),
    ):
        quantization = {**config["quantization_config"], "config_groups": {"group_0": {**scheme, **change}}}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        with pytest.raises(CheckpointError, match=words):
            HuggingFaceFiles.open(folder).reader(model)
    other = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": other}))
    with pytest.raises(CheckpointError, match="quantized by gptq"):
        HuggingFaceFiles.open(folder).reader(model)
    with pytest.raises(ModelError, match="in this format are not read"):
        initial_model(ModelConfig(path=folder, pretrained=True))
