"""Checkpoints become Hugging Face directories and back, bit by bit; files that are not right are refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.api import parallelize
from plait.checkpoint import Checkpoint, HuggingFaceFiles, Reader, Saver, find_checkpoints, open_checkpoint
from plait.checkpoint.compress import Compression, Sparsity
from plait.comm import World, connect
from plait.errors import CheckpointError, ModelError, RunError
from plait.models import (
    StateNames,
    causal_lm_on_meta,
    initialize_weights,
    parameter_only_modules,
    read_config,
)
from plait.parallel.zero.state_io import StateShard
from plait.train.export import convert, export_folder
from plait.train.model import initial_model
from plait.train.sections import ModelConfig
from plait.verify import parse_source

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | {
    f"{word}_token_id": 0 for word in ("bos", "eos")
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "tied llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "qwen3_moe": dict(parse_source("qwen3_moe", layers=2).config),
    "hrm_text": dict(parse_source("hrm_text", layers=2).config),
    "opt": {"model_type": "opt", **SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
}
CONVERTED = ("hrm_text",)  # tensors of the files are divided


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    alone = connect()
    yield alone
    alone.close()


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> Callable[[str], tuple[Checkpoint, dict[str, Any]]]:
    """A checkpoint of a model, and the model's state dict."""
    made: dict[str, tuple[Checkpoint, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Checkpoint, dict[str, Any]]:
        if name not in made:
            engine = parallelize(causal_lm_on_meta(MODELS[name]), "dp=1", seed=5, world=world)
            facts = {"model": {"config": MODELS[name], "path": None}}
            path = engine.save(tmp_path_factory.mktemp("saved"), facts)
            made[name] = open_checkpoint(path), engine.model.state_dict()
        return made[name]

    return of


Checkpoints = Callable[[str], tuple[Checkpoint, dict[str, Any]]]


def loaded(folder: Path, **options: Any) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_what_was_saved_without_a_missing_key(
    checkpoints: Checkpoints, tmp_path: Path, name: str, shard_bytes: int
) -> None:
    found, expected = checkpoints(name)
    out = tmp_path / "out"
    convert(found, out, shard_bytes=shard_bytes)
    assert (out / "model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    state = loaded(out).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in state.items())


@pytest.mark.parametrize("name", ["tied llama", "mixtral"])
def test_a_checkpoint_is_compressed_as_its_folder_is(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    found, _ = checkpoints(name)
    convert(found, tmp_path / "plain")
    compression = Compression("int8", Sparsity.parse("2:4"))
    convert(found, tmp_path / "small", compression=compression, shard_bytes=20_000)
    export_folder(tmp_path / "plain", tmp_path / "other", compression=compression)
    theirs = load_file(tmp_path / "other" / "model.safetensors")
    files = HuggingFaceFiles.open(tmp_path / "small")
    ours = {key: value for path in files.headers for key, value in load_file(path).items()}
    assert len(files.headers) > 1
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    configs = [read_config(tmp_path / each)["quantization_config"] for each in ("small", "other")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_that_save_pretrained_writes(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    found, _ = checkpoints(name)
    convert(found, tmp_path / "ours")
    on_meta: Any = causal_lm_on_meta(MODELS[name])
    type(on_meta)(on_meta.config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert {key: (t.shape, t.dtype) for key, t in ours.items()} == {
        key: (t.shape, t.dtype) for key, t in theirs.items()
    }
    written = {path.name for path in (tmp_path / "ours").iterdir()}
    assert written == {path.name for path in (tmp_path / "theirs").iterdir()}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # families' own
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_is_written_as_save_pretrained_writes_it(
    kind: str, tmp_path: Path, world: World
) -> None:
    try:
        config = dict(parse_source(kind, layers=2).config)
        on_meta: Any = causal_lm_on_meta(config)
        model = type(on_meta)(on_meta.config)
    except Exception as error:
        pytest.skip(f"does not build small: {error}")
    names = StateNames.from_model(model)
    whole = [
        StateShard.from_tensor(names.checkpoint_key(name), t)
        for name, t in names.tensors.items()
        if t.numel()
    ]
    Saver(tmp_path / "saved", world).save(1, whole, {"model": {"config": config}, "plan": "dp=1"})
    convert(open_checkpoint(find_checkpoints(tmp_path / "saved")[-1]), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key].nan_to_num(), tensor.nan_to_num()), key
    loaded(tmp_path / "ours")
    HuggingFaceFiles.open(tmp_path / "ours").direct_read_problem(causal_lm_on_meta(tmp_path / "ours"))


def test_infinity_in_a_configuration_is_read_as_transformers_writes_it(tmp_path: Path, world: World) -> None:
    config: Any = causal_lm_on_meta(MODELS["llama"]).config
    config.limits = (0.0, float("inf"))
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    model: Any = causal_lm_on_meta(tmp_path)
    assert model.config.limits == [0.0, float("inf")]
    engine = parallelize(model, "dp=1", world=world)
    found = open_checkpoint(engine.save(tmp_path, {"model": {"config": read_config(tmp_path)}}))
    found.check_same("model", {"config": read_config(tmp_path)})
    again: Any = causal_lm_on_meta(found.facts["model"]["config"])
    assert again.config.limits == [0.0, float("inf")]


def test_weights_are_rounded_to_the_dtype_that_is_asked_for(checkpoints: Checkpoints, tmp_path: Path) -> None:
    found, expected = checkpoints("llama")
    convert(found, tmp_path / "out", "bf16")
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key].bfloat16()), key


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_tensor_is_in_memory_at_a_time(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    found, expected = checkpoints("llama")
    whole, read = Reader.read_full, []

    def watched(reader: Reader, key: str) -> torch.Tensor:
        assert all(storage.expired() for storage in read), f"{key} while another one is in memory"
        tensor = whole(reader, key)
        read.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(Reader, "read_full", watched)
    convert(found, tmp_path / "out", dtype)
    assert len(read) == len(expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CONVERTED])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_an_engine_begins_with_the_weights_of_a_directory(
    checkpoints: Checkpoints, tmp_path: Path, world: World, name: str, shard_bytes: int
) -> None:
    found, expected = checkpoints(name)
    convert(found, tmp_path / "out", shard_bytes=shard_bytes)
    model = causal_lm_on_meta(tmp_path / "out")
    engine = parallelize(model, "dp=1", seed=6, weights=tmp_path / "out", world=world)
    ours = engine.model.state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    engine.model.eval()
    with torch.no_grad():
        assert torch.equal(
            engine.model(input_ids=ids).logits, loaded(tmp_path / "out").eval()(input_ids=ids).logits
        )


def test_nothing_is_drawn_that_files_have() -> None:
    model, drawn = causal_lm_on_meta(MODELS["llama"]), []
    initialize_weights(
        model, 0, torch.device("cpu"), lambda name, _: drawn.append(name), skip=parameter_only_modules(model)
    )
    assert drawn == []
    assert all(not buffer.is_meta for buffer in model.buffers())


def test_weights_converted_on_loading_are_left_to_transformers(
    checkpoints: Checkpoints, tmp_path: Path, world: World
) -> None:
    found, expected = checkpoints("hrm_text")
    convert(found, tmp_path / "out")
    with pytest.raises(CheckpointError, match="cannot be read in shards") as caught:
        parallelize(causal_lm_on_meta(tmp_path / "out"), "dp=1", weights=tmp_path / "out", world=world)
    assert "converted as it is loaded" in str(caught.value.given)
    model, weights = initial_model(ModelConfig(path=tmp_path / "out", pretrained=True))
    assert weights is None
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


def test_a_base_models_files_and_a_hubs_links_are_read(
    checkpoints: Checkpoints, tmp_path: Path, world: World
) -> None:
    """gpt2's own files have no `transformer.` before the names, and masks that models have no more."""
    found, expected = checkpoints("gpt2")
    convert(found, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "blob")
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / "model.safetensors").symlink_to(tmp_path / "blob")
    engine = parallelize(causal_lm_on_meta(tmp_path / "out"), "dp=1", weights=tmp_path / "out", world=world)
    ours = engine.model.state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())


def test_a_model_with_weights_of_its_own_is_given_no_others(
    checkpoints: Checkpoints, tmp_path: Path, world: World
) -> None:
    found, _ = checkpoints("llama")
    convert(found, tmp_path / "out")
    with pytest.raises(ModelError, match="already has weights"):
        parallelize(loaded(tmp_path / "out"), "dp=1", weights=tmp_path / "out", world=world)


# --- errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(surplus=torch.ones(2)), "the model has no surplus"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"model\.norm\.weight has the shape \(31,\), in the model \(32,\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "is of dtype I8",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(61, 32)}),
            r"lm_head\.weight and model\.embed_tokens\.weight are both in the files, but tied in the model",
        ),
    ],
)
def test_files_that_do_not_fit_the_model_are_errors_that_name_the_place(
    checkpoints: Checkpoints, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    found, _ = checkpoints("tied llama")
    convert(found, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        HuggingFaceFiles.open(tmp_path / "out").reader(causal_lm_on_meta(tmp_path / "out"))


def a_file(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any = (2,), start: Any = 0, stop: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        a_file({}, length=2**63),
        a_file({}, length=3),
        a_file(b"[1, 2]"),
        a_file(b"{" * 100_000),
        a_file(b'{"a": 1}'),
        a_file({"a": entry()}, b"1234567"),  # too short
        a_file({"a": entry()}, b"123456789"),  # bytes of no tensor
        a_file({"a": entry(start=1, stop=9)}, b"123456789"),  # a gap
        a_file({"a": entry(), "b": entry(start=4, stop=12)}, b"1" * 12),  # an overlap
        a_file({"a": entry(shape=[3])}, b"1" * 8),
        a_file({"a": entry(shape=[-2])}, b"1" * 8),
        a_file({"a": entry(shape=[2**40, 2**40], stop=2**82)}, b"1" * 8),
        a_file({"a": entry(shape="22")}, b"1" * 8),
        a_file({"a": entry(shape=[True] * 2)}, b"1" * 8),
        a_file({"a": entry(dtype="F4")}, b"1" * 8),
        a_file({"a": entry(dtype=["F32"])}, b"1" * 8),
        a_file({"a": entry(start=-8, stop=0)}, b"1" * 8),
        a_file({"a": entry(stop=8.0)}, b"1" * 8),
        a_file(b'{"a": ' + json.dumps(entry()).encode() + b', "a": ' + json.dumps(entry()).encode() + b"}"),
    ],
)
def test_a_header_that_contradicts_itself_or_its_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        HuggingFaceFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "is not the name of a file in this directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is not the name of a file in this directory"),
        ('{"weight_map": {"a": 3}}', "cannot be read"),
        ('{"weight_map": {"a": "x.safetensors"}}', "not a complete safetensors file"),
        ('{"weight_map": {"a": "y.safetensors"}}', "not in the file that the index lists"),
    ],
)
def test_an_index_that_names_missing_files_is_an_error(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceFiles.open(tmp_path)
    assert words in str(caught.value)


def test_a_directory_without_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no safetensors to start from"):
        HuggingFaceFiles.open(tmp_path)


def test_a_failed_conversion_leaves_no_files(checkpoints: Checkpoints, tmp_path: Path) -> None:
    found, _ = checkpoints("llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match="directory exists"):
        convert(found, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        convert(found, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_a_damaged_checkpoint_is_not_exported(checkpoints: Checkpoints, tmp_path: Path, world: World) -> None:
    engine = parallelize(causal_lm_on_meta(MODELS["llama"]), "dp=1", world=world)
    path = engine.save(tmp_path / "saved", {"model": {"config": MODELS["llama"], "path": None}})
    with (path / "rank-00000.0.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"X")
    with pytest.raises(CheckpointError, match="damaged"):
        convert(open_checkpoint(path), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_without_a_model_name_takes_the_given_one(tmp_path: Path, world: World) -> None:
    engine = parallelize(causal_lm_on_meta(MODELS["llama"]), "dp=1", world=world)
    found = open_checkpoint(engine.save(tmp_path / "other", {"model": {"path": 5}}))
    with pytest.raises(CheckpointError, match="does not record its model"):
        convert(found, tmp_path / "out")
    found = open_checkpoint(engine.save(tmp_path / "saved", {"model": None}))
    with pytest.raises(CheckpointError, match="does not record its model"):
        convert(found, tmp_path / "out")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS["llama"]))
    convert(found, tmp_path / "out", config=config)
    assert loaded(tmp_path / "out").config.model_type == "llama"


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TASKS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {"model_type": "bert", "vocab_size": 61, **TINY},
    "ViTForImageClassification": {"model_type": "vit", "image_size": 8, "patch_size": 4, **TINY},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    },
}


@pytest.mark.parametrize("name", TASKS)
def test_a_checkpoint_of_a_script_is_converted_to_the_class_of_its_model(
    name: str, tmp_path: Path, world: World
) -> None:
    kind = getattr(transformers, name)
    config = transformers.AutoConfig.for_model(**TASKS[name])
    model = kind(config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    engine = parallelize(model, "dp=1", world=world)
    convert(open_checkpoint(engine.save(tmp_path / "saved")), tmp_path / "out")
    assert read_config(tmp_path / "out")["architectures"] == [name]
    again = kind.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, before[key]) for key, tensor in again.state_dict().items())
