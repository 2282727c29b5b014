"""Weights to start from come out of Hugging Face files, each rank its part, as from_pretrained has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import plait
from plait.checkpoint import HuggingFaceFiles
from plait.errors import CheckpointError
from plait.models import causal_lm_on_meta
from support.pool import Pool, RankError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def saved(folder: Path, config: dict[str, Any], dtype: torch.dtype, shards: str) -> dict[str, Tensor]:
    """Writes a model with random weights as transformers does, and gives what it loads again, in float32."""
    torch.manual_seed(7)
    model: Any = type(causal_lm_on_meta(config))(causal_lm_on_meta(config).config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(found.named_parameters())


def _begun(folder: Path, plan: str) -> Any:
    """The whole weights, how many bytes of tensors this rank reads, and how many elements it owns."""
    engine = plait.parallelize(causal_lm_on_meta(folder), plan, weights=folder)
    with HuggingFaceFiles.open(folder).reader(causal_lm_on_meta(folder)) as reader:
        engine.load_from(reader, weights_only=True)
        files = [header.num_bytes for header in HuggingFaceFiles.open(folder).headers.values()]
        num_bytes = reader.bytes_read - sum(files[number] for number in reader._valid_headers)
    return engine.full_parameters(), num_bytes, engine.num_steps


@pytest.mark.parametrize(
    ("plan", "tied", "shards", "most"),  # of all bytes, read by any rank
    [
        ("dp=2 zero=3", True, "20KB", 0.55),
        ("dp=2 zero=1 precision=bf16", False, "1GB", 0.55),
        ("dp=2", False, "20KB", 1.0),
        ("tp=2", False, "1GB", 0.55),
        ("tp=2x1", True, "20KB", 0.55),
        ("pp=2 schedule=1f1b micro=2", False, "20KB", 0.55),
        ("pp=2 schedule=1f1b micro=2", True, "1GB", 0.55),
    ],
)
def test_each_rank_reads_its_part_of_the_weights_of_from_pretrained(
    pool: Pool, tmp_path: Path, plan: str, tied: bool, shards: str, most: float
) -> None:
    expected = saved(tmp_path, LLAMA | {"tie_word_embeddings": tied}, torch.bfloat16, shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "20KB")
    num_bytes = 2 * sum(tensor.numel() for tensor in expected.values())
    ranks = pool.run(_begun, 2, tmp_path, plan)
    weights = ranks[0][0]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    read = [each[1] for each in ranks]
    assert num_bytes <= sum(read)
    assert max(read) <= most * num_bytes + 2
    assert [each[2] for each in ranks] == [0, 0]


def _refused(folder: Path) -> None:
    plait.parallelize(causal_lm_on_meta(LLAMA), "dp=2", weights=folder)


def test_files_of_another_model_are_refused_on_all_ranks_alike(pool: Pool, tmp_path: Path) -> None:
    saved(tmp_path, LLAMA | {"num_hidden_layers": 3}, torch.float32, "1GB")
    with pytest.raises(RankError) as caught:
        pool.run(_refused, 2, tmp_path)
    failures = caught.value.failures
    assert [type(failure.exception) for failure in failures] == [CheckpointError] * 2
    assert "model.layers.3" in str(failures[0].exception)
    assert "from_pretrained" in str(failures[0].exception)
