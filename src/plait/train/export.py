"""The trained model outside of plait: a Hugging Face directory, or text that it writes."""

import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from plait import checkpoint
from plait.errors import CheckpointError, RunError
from plait.models import causal_lm_on_meta
from plait.plan import Plan
from plait.train.config import Recipe
from plait.train.data import load_tokenizer
from plait.train.run import RunDir

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    weights = {name.removeprefix("weights/"): tensor for name, tensor in last.read("weights/").items()}
    on_meta = causal_lm_on_meta(_config(recipe))
    transformers_logging.disable_progress_bar()  # it has nothing to say
    build: Any = type(on_meta).from_pretrained
    model, report = build(
        None,
        config=on_meta.config,
        state_dict=weights,
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
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if prompt else _document_start(tokenizer)
    ids = ids.to(device)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None:
        tokens = min(tokens, longest - ids.shape[1])
        if tokens < 1:
            raise RunError(
                "the prompt leaves no room for more", given=f"{ids.shape[1]} tokens", expected=f"< {longest}"
            )
    how = {"do_sample": False} if temperature == 0 else {"temperature": temperature, "top_k": top_k}
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(seed)
        written = write(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id,
            **({"do_sample": True} | how),
        )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def _document_start(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Documents follow on the mark that ends the one before."""
    return torch.tensor([[tokenizer.eos_token_id]])


def _config(recipe: Recipe) -> dict[str, object]:
    if recipe.model.config is not None:
        return recipe.model.config
    values: dict[str, object] = AutoConfig.from_pretrained(str(recipe.model.path)).to_dict()
    return values
