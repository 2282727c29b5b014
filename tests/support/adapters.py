"""Programs of tests of adapters: a base in files, LoRA on it under a plan, and PEFT's own model."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plait
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach
from support import silent_error_models

VOCABULARY = 61
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
SGD = {"optimizer": torch.optim.AdamW, "optimizer_args": {"lr": 1e-2, "weight_decay": 0.0}}


def save_base(folder: Path, family: str, **options: Any) -> None:
    """Write a small model with random weights in float64."""
    silent_error_models.with_random_weights(family, **options).save_pretrained(folder)
    use_eager_experts(folder)


def use_eager_experts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["experts_implementation"] = "eager"  # others have no float64
    (folder / "config.json").write_text(json.dumps(config))


def batch_of(seed: int = 0, samples: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def engine_of(base: Path, config: dict[str, Any] | None, plan: str, **options: Any) -> Any:
    """An engine with an adapter on a base in files; None: the base alone."""
    model = causal_lm_on_meta(base)
    adapted = model if config is None else attach(model, config)
    return plait.parallelize(adapted, f"{plan} precision=fp64", weights=base, **SGD, **options)


def step(engine: Any, seed: int) -> float:
    return float(engine.step(engine.shard(batch_of(seed))).loss)


def logits(engine: Any) -> Tensor:
    """The logits of the same two rows on every rank."""
    found: Tensor = engine.outputs(batch_of(99, 2), pick=lambda outputs: outputs.logits)
    return found.detach().cpu()


@contextmanager
def without_warnings_of_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def of_peft(base: Path, adapter: Path, **options: Any) -> Any:
    """PEFT's model with an adapter in files, in float64."""
    import peft  # noqa: PLC0415 - takes seconds, and ranks import this file
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with without_warnings_of_peft():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        return peft.PeftModel.from_pretrained(
            plain, adapter, autocast_adapter_dtype=False, **options
        ).double()


# --- on ranks


def trained(base: Path, config: dict[str, Any], plan: str, out: Path, steps: int = 3) -> Any:
    """Train and save an adapter. Returns losses, logits, and those without the adapter before and after."""
    engine = engine_of(base, config, plan)
    with engine.adapters_off():
        before = logits(engine)
    losses = [step(engine, seed) for seed in range(steps)]
    with engine.adapters_off():
        after = logits(engine)
    engine.save_adapter(out / "adapter")
    engine.save(out / "checkpoints")
    return losses, logits(engine), before, after


def base_logits(base: Path, plan: str) -> Any:
    return logits(engine_of(base, None, plan))


def resumed(base: Path, config: dict[str, Any], plan: str, checkpoint: Path) -> Any:
    """Load a checkpoint of the third step, take the fourth; its loss, and the state after it."""
    engine = engine_of(base, config, plan)
    step(engine, 50)  # what it held is replaced
    engine.load(checkpoint)
    return step(engine, 3), engine.state()


def never_stopped(base: Path, config: dict[str, Any], plan: str) -> Any:
    engine = engine_of(base, config, plan)
    losses = [step(engine, seed) for seed in range(4)]
    return losses[-1], engine.state()
