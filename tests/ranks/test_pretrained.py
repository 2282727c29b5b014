"""Weights to start from come out of Hugging Face files, each rank its part, as from_pretrained has them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import plait
from plait.checkpoint import HuggingFaceFiles, Reader, open_checkpoint
from plait.checkpoint.manifest import Chunk
from plait.errors import CheckpointError
from plait.models import causal_lm_on_meta, read_config
from plait.plan import Plan
from plait.train.export import convert
from plait.verify import parse_source
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


EXPERT = re.compile(r"layers\.(\d+)\..*\.experts\.(\d+)\.")


def _read_and_saved(folder: Path, plan: str) -> Any:
    """The keys and number of bytes that this rank reads, the rank of ep, and a checkpoint of the weights."""
    model, files = causal_lm_on_meta(folder), HuggingFaceFiles.open(folder)
    keys = {(path.name, files.headers[path].num_bytes + e.start): k for k, (path, e) in files.entries.items()}
    read, begun = [], Reader._read

    def noted(reader: Reader, key: str, chunk: Chunk, *rest: Any) -> None:
        read.append(keys[Path(reader._names[chunk.file]).name, chunk.offset])
        begun(reader, key, chunk, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_read", noted)
        engine = plait.parallelize(model, plan)
        with files.reader(causal_lm_on_meta(folder)) as reader:
            engine.load_from(reader, weights_only=True)
    headers = [header.num_bytes for header in files.headers.values()]
    num_bytes = reader.bytes_read - sum(headers[number] for number in reader._valid_headers)
    path = engine.save(folder / "saved", {"model": {"config": read_config(folder)}})
    return read, num_bytes, engine.data_rank, path


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("mixtral", "dp=2 ep=2"),
        ("qwen3_moe", "dp=4 ep=4 zero=1"),
        ("deepseek_v3", "dp=4 ep=2 zero=3"),
        ("phimoe", "dp=2 ep=2 pp=2 micro=2"),
    ],
)
def test_a_rank_reads_its_own_experts_of_hub_files_which_an_export_makes_again(
    pool: Pool, tmp_path: Path, family: str, plan: str
) -> None:
    config = dict(parse_source(family, layers=2).config)
    torch.manual_seed(7)
    model: Any = type(causal_lm_on_meta(config))(causal_lm_on_meta(config).config)
    for tensor in [*model.parameters(), *model.buffers()]:  # those of routers, too
        if tensor.is_floating_point():
            tensor.data.normal_()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = HuggingFaceFiles.open(tmp_path).entries
    parsed = Plan.parse(plan)
    experts = {key: int(found[2]) for key in files if (found := EXPERT.search(key))}
    each = (1 + max(experts.values())) // parsed.ep
    assert len(experts) >= each * parsed.ep * 3
    ranks = pool.run(_read_and_saved, parsed.num_ranks, tmp_path, plan)
    assert {key for read, *_ in ranks for key in read} == files.keys()
    for read, num_bytes, rank, _ in ranks:
        assert {experts[key] // each for key in read if key in experts} == {rank % parsed.ep}
        all_of_it = sum(files[key][1].stop - files[key][1].start for key in {*read})
        assert num_bytes == all_of_it if parsed.zero == 0 else num_bytes <= all_of_it
    convert(open_checkpoint(ranks[0][3]), tmp_path / "out")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert HuggingFaceFiles.open(tmp_path / "out").entries.keys() == files.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


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
