"""Export the trained model to Hugging Face format, or its adapter to PEFT's."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait import checkpoint
from plait.checkpoint import Checkpoint, HuggingFaceFiles, checkpoint_weights, write_hugging_face
from plait.checkpoint.adapter_files import check_new_adapter, write_adapter
from plait.checkpoint.base import MergedWeights, adapter_configs, adapter_tensors, choose_adapter
from plait.checkpoint.compress import Compression
from plait.data.tokenizer import CHAT_TEMPLATE, FILES
from plait.errors import CheckpointError
from plait.fileio import copy_regular, writing
from plait.models import StateNames, causal_lm_on_meta, check_predicts_tokens, read_config
from plait.plan import Plan
from plait.train.model import generation_of, initial_model, model_on_meta
from plait.train.run_dir import RunDir
from plait.train.sections import ModelConfig

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = dict(
    zip(get_args(Dtype), (torch.float64, torch.float32, torch.bfloat16, torch.float16), strict=True)
)


def export(
    run: RunDir,
    out: Path,
    dtype: str | None = None,
    *,
    base: Path | None = None,
    exact: bool = False,
    compression: Compression | None = None,
) -> None:
    """Export the newest checkpoint for `from_pretrained` of `AutoModelForCausalLM` and `AutoTokenizer`; with
    an adapter merged into its base (`base` and `exact`: see `convert`).

    Atomic. Raises RunError if `out` exists or cannot be written.
    """
    run.read_recipe()  # raises unless it is a run directory
    convert(newest_checkpoint(run), out, dtype, run=run, base=base, exact=exact, compression=compression)


def export_folder(
    folder: Path, out: Path, dtype: str | None = None, compression: Compression | None = None
) -> None:
    """Export the model of a Hugging Face folder, in another dtype or compressed, with its tokenizer.

    dtype  a key of DTYPES; None for that of the folder

    Weights that are quantized in the folder are dequantized. Raises RunError, ModelError, CheckpointError.
    """
    check_predicts_tokens(folder)
    given = ModelConfig(path=folder, pretrained=True)
    trained, weights = initial_model(given)
    values, model = read_config(folder), model_on_meta(given)
    names = StateNames.from_model(model)
    read: AbstractContextManager[Callable[[str], Tensor]]
    if weights is None:  # transformers has converted them
        tensors = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
        read = nullcontext(tensors.__getitem__)
    else:
        read = _file_weights(weights, model, names)
    recorded = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    with tempfile.TemporaryDirectory() as tokenizer:
        for name in (*FILES, CHAT_TEMPLATE):
            if (folder / name).is_file():
                copy_regular(str(folder / name), str(Path(tokenizer) / name))
        write_hugging_face(
            read,
            model,
            out,
            dtype=DTYPES[dtype] if dtype is not None else getattr(torch, recorded),
            tokenizer=Path(tokenizer),
            generation=generation_of(given),
            compression=compression,
        )


@contextmanager
def _file_weights(
    folder: Path, model: PreTrainedModel, names: StateNames
) -> Iterator[Callable[[str], Tensor]]:
    with HuggingFaceFiles.open(folder).reader(model) as reader:
        yield lambda first: reader.read_full(names.checkpoint_key(first))


def export_adapter(run: RunDir, out: Path) -> None:
    """Export the adapter of the newest checkpoint for PeftModel.from_pretrained, with the tokenizer. Raises
    RunError, CheckpointError."""
    run.read_recipe()
    convert_adapter(newest_checkpoint(run), out, run=run)


def convert_adapter(
    saved: Checkpoint,
    out: Path,
    *,
    adapter: str | None = None,
    config: Path | None = None,
    run: RunDir | None = None,
) -> None:
    """Write an adapter of a checkpoint as PEFT's files, with its run's tokenizer if there is one. See
    `convert`."""
    name = choose_adapter(saved, adapter)
    on_meta = causal_lm_on_meta(
        config if config is not None else recorded_config(saved), of_architecture=True
    )
    tensors, base = adapter_tensors(saved, on_meta, name), saved.facts.get("base")
    check_new_adapter(out)
    path = base.get("path") if isinstance(base, dict) else None
    write_adapter(out, tensors, adapter_configs(saved)[name], path)
    if run is not None:
        with writing("cannot write the tokenizer", out):
            shutil.copytree(run.checked_tokenizer(), out, dirs_exist_ok=True, copy_function=copy_regular)


def convert(
    saved: Checkpoint,
    out: Path,
    dtype: str | None = None,
    *,
    shard_bytes: int = checkpoint.SHARD_BYTES,
    config: Path | None = None,
    run: RunDir | None = None,
    adapter: str | None = None,
    base: Path | None = None,
    exact: bool = False,
    compression: Compression | None = None,
) -> None:
    """Convert a checkpoint to a Hugging Face directory, with its run's tokenizer if there is one.

    dtype    a key of DTYPES; None for the precision of the run
    config   the model's config.json, for checkpoints that do not record it
    adapter  the one to merge, if the checkpoint has several
    base     the folder of the adapter's base, if it is not where it was in training
    exact    merge into a quantized base as its files have it, not as the adapter was trained on it
    compression  see `Compression`

    Raises RunError, ModelError, CheckpointError.
    """
    generation = saved.facts.get("generation")
    source = config if config is not None else recorded_config(saved)
    model = causal_lm_on_meta(source, of_architecture=True)
    write_hugging_face(
        _weights(saved, model, adapter, base, exact=exact),
        model,
        out,
        dtype=DTYPES[dtype or Plan.parse(str(saved.facts.get("plan", ""))).dtype],
        shard_bytes=shard_bytes,
        tokenizer=run.checked_tokenizer() if run is not None else None,
        generation=generation if isinstance(generation, dict) else None,
        compression=compression,
    )


def _weights(
    saved: Checkpoint,
    model: PreTrainedModel,
    adapter: str | None = None,
    base: Path | None = None,
    *,
    exact: bool = False,
) -> AbstractContextManager[Callable[[str], Tensor]]:
    """The weights of a checkpoint, with its adapter merged if it has one, by their names in the model."""
    if not adapter_configs(saved):
        return checkpoint_weights(saved, model)
    to_wrap = copy.deepcopy(model)  # on meta
    return MergedWeights(saved, to_wrap, choose_adapter(saved, adapter), base, exact=exact)


def recorded_config(saved: Checkpoint) -> dict[str, Any] | Path:
    """Return the Hugging Face configuration of a checkpoint's model, or its path. Raises CheckpointError."""
    model = saved.facts.get("model")
    if isinstance(model, dict) and (model.get("config") or isinstance(model.get("path"), str)):
        return model.get("config") or Path(model["path"])
    raise CheckpointError(
        "the checkpoint does not record its model configuration",
        given=saved.path,
        expected="model.config or model.path among the checkpoint's facts",
        hint=f"plait checkpoint convert {saved.path} DIRECTORY --config FILE, the model's config.json",
    )


def newest_checkpoint(run: RunDir) -> Checkpoint:
    """Return a run's newest checkpoint. Raises CheckpointError if there is none."""
    saved = checkpoint.newest(run.checkpoints)
    if saved is None:
        raise CheckpointError(
            "the run has no checkpoint yet",
            given=run.checkpoints,
            expected="a run that has saved one",
            hint=f"plait train {run.path} --resume",
        )
    return saved
