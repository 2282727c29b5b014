"""The trained model outside of plait: a Hugging Face directory, or text that it writes."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from plait import checkpoint
from plait.checkpoint import Checkpoint, write_hugging_face
from plait.data import load_tokenizer
from plait.errors import CheckpointError
from plait.models import causal_lm_on_meta
from plait.plan import Plan
from plait.train.model import check_prompt, model_on_meta, prompt_ids
from plait.train.run import RunDir

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = dict(
    zip(get_args(Dtype), (torch.float64, torch.float32, torch.bfloat16, torch.float16), strict=True)
)


def load_trained(
    run: RunDir, dtype: str | None = None, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of the run's newest checkpoint, as plain Hugging Face objects, and its tokenizer.

    `dtype`: a key of DTYPES; None for the precision that the run computes in. Raises RunError,
    CheckpointError.
    """
    recipe = run.read_recipe()
    last = _newest(run)
    # `weights/` and the persistent buffers: what a state_dict holds, by its names
    tensors = {name.partition("/")[2]: tensor for name, tensor in last.read(("weights/", "buffers/")).items()}
    on_meta = model_on_meta(recipe.model)
    transformers_logging.disable_progress_bar()  # it has nothing to say
    build: Any = type(on_meta).from_pretrained
    model, report = build(
        None,
        config=on_meta.config,
        state_dict=tensors,
        dtype=DTYPES[dtype or Plan.parse(recipe.plan).precision],
        output_loading_info=True,
    )
    wrong = [*report["missing_keys"], *report["unexpected_keys"]]
    if wrong:
        raise CheckpointError("the checkpoint is of another model", given=f"{last.path}: {wrong[0]}")
    trained: PreTrainedModel = model.to(device).eval()
    return trained, load_tokenizer(run.tokenizer)


def export(run: RunDir, out: Path, dtype: str | None = None) -> None:
    """Writes what `AutoModelForCausalLM` and `AutoTokenizer` load with `from_pretrained`.

    All of it or nothing. Raises RunError when `out` exists or cannot be written.
    """
    run.read_recipe()  # it is a run's directory
    convert(_newest(run), out, dtype, run=run)


def convert(
    found: Checkpoint,
    out: Path,
    dtype: str | None = None,
    *,
    shard_bytes: int = checkpoint.SHARD_BYTES,
    config: Path | None = None,
    run: RunDir | None = None,
) -> None:
    """A checkpoint as a Hugging Face directory, with the tokenizer of its run where there is one.

    `dtype`: a key of DTYPES; None for the precision that the run computed in. `config`: the model's, of a
    checkpoint that does not say it. Raises RunError, ModelError, CheckpointError.
    """
    said = found.facts.get("model")
    if config is None and isinstance(said, dict):
        config = said.get("config") or (said.get("path") and Path(said["path"]))
    if config is None:
        raise CheckpointError(
            "the checkpoint does not say what model it is of",
            given=found.path,
            hint="--config with the model's config.json",
        )
    write_hugging_face(
        found,
        causal_lm_on_meta(config),
        out,
        dtype=DTYPES[dtype or Plan.parse(str(found.facts.get("plan", ""))).precision],
        shard_bytes=shard_bytes,
        tokenizer=run.tokenizer if run is not None and run.tokenizer.is_dir() else None,
    )


def generate(
    run: RunDir,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    device: str = "cpu",
) -> str:
    """The prompt and at most `tokens` tokens more, by the newest checkpoint; up to the end of a document.

    Temperature 0 takes the likeliest token each time; `top_k` is the number of likeliest it chooses among.
    """
    model, tokenizer = load_trained(run, device=device)
    write: Any = model.generate
    prompt_tokens = prompt_ids(tokenizer, prompt)
    room = check_prompt(prompt_tokens, model.config)
    ids = torch.tensor([prompt_tokens], device=device)
    how = {"do_sample": False} if temperature == 0 else {"temperature": temperature, "top_k": top_k}
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(seed)
        written = write(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens if room is None else min(tokens, room),
            pad_token_id=tokenizer.eos_token_id,
            **({"do_sample": True} | how),
        )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def _newest(run: RunDir) -> Checkpoint:
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise CheckpointError("the run has no checkpoint yet", given=run.checkpoints)
    return found
