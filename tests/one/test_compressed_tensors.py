"""Quantized folders are those of the library compressed-tensors. `make test` runs this with the library in
PYTHONPATH; in any other run it is skipped, because a user needs it only to load such a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plait.checkpoint.compress import Compression, Sparsity
from plait.train.export import export_folder
from support.compressed_models import MODELS, SMALL, saved

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


@pytest.fixture(scope="module", autouse=True)
def library() -> Any:
    return pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("name", "dequantize"), [*((name, False) for name in MODELS), ("llama", True), ("qwen2", True)]
)
def test_from_pretrained_loads_the_model_that_plait_dequantizes(
    tmp_path: Path, name: str, weights: Any, dtype: str, dequantize: bool
) -> None:
    saved(tmp_path / "in", MODELS[name])
    compression = Compression(weights, Sparsity.parse("2:4") if name == "qwen2" else None)
    export_folder(tmp_path / "in", tmp_path / "out", dtype, compression)
    export_folder(tmp_path / "out", tmp_path / "back")
    from transformers import CompressedTensorsConfig  # noqa: PLC0415

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    ours: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(ids).logits
        assert torch.equal(theirs(ids).logits, expected)
    assert expected.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for key, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], tensor), key


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_the_library_stores_the_same_codes_for_the_same_scales(
    tmp_path: Path, weights: Any, library: Any
) -> None:
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415

    from plait.models import read_config  # noqa: PLC0415

    original = saved(tmp_path / "in", {"model_type": "llama", **SMALL})
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression(weights))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = read_config(tmp_path / "out")["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    scales = [key for key in stored if key.endswith("_scale")]
    assert len(scales) == 2 * 7
    for key in scales:
        name = key.removesuffix("_scale")
        theirs = compressor.compress({"weight": original[name], "weight_scale": stored[key]}, scheme)
        for kind, tensor in theirs.items():
            mine = stored[name.removesuffix("weight") + kind]
            assert mine.dtype == tensor.dtype
            assert torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8)), name + kind
