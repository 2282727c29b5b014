"""The trained model outside of plait: a Hugging Face directory, or text that it writes."""

import secrets
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from plait import checkpoint
from plait.errors import CheckpointError, RunError
from plait.plan import Plan
from plait.train.data import load_tokenizer
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
    last = checkpoint.newest(run.checkpoints)
    if last is None:
        raise CheckpointError("the run has no checkpoint yet", given=run.checkpoints)
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
    if out.exists():
        raise RunError("the export's directory exists", given=out, hint="another directory")
    model, tokenizer = load_trained(run, dtype)
    partial = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(str(partial))
        partial.rename(out)
    except Exception as error:  # safetensors and tokenizers report a full disk by classes of their own
        raise RunError("the export cannot be written", given=f"{out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
