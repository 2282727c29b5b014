"""What is verified: a model that can be built anew, and what it is trained on."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.engine.loss import Loss
from plait.errors import ModelError, PlaitError, nearest
from plait.models import Blocks, Chain, blocks_of, causal_lm_on_meta, initialise, read_config
from plait.verify.float64 import default_dtype, compute_in_float64
from plait.verify.tiny_config import shrink_config

# (number of the step, samples in it) -> the step's whole batch
BatchFn = Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelSpec:
    """A model to be verified. A user's own function may return one, where a model alone does not say enough.

    model    builds it, anew at each call; the same weights, or none yet (on meta)
    batch    (step, samples) -> a dict of that many samples along dim 0; None: random tokens, for a model with
             a vocabulary
    loss, blocks, tensor_plan    as `plait.parallelize` takes them
    whole    builds it with values, for one process; None: as `model`
    """

    model: Callable[[], nn.Module | Sequence[nn.Module]]
    batch: BatchFn | None = None
    loss: Loss | None = None
    blocks: Blocks | None = None
    tensor_plan: Mapping[str, str] | None = None
    whole: Callable[[], nn.Module] | None = None

    def build(self, dtype: torch.dtype) -> nn.Module:
        """For ranks: without dropout, with which numbers would depend on the plan; for float64, wide."""
        with default_dtype(dtype if dtype == torch.float64 else torch.float32):
            return self._made(self.model, dtype)

    def _made(self, build: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
        model = _quiet(_module(_told(build)))
        if dtype == torch.float64:
            compute_in_float64(model, (block for _, block in blocks_of(model, self.blocks)))
        return model

    def build_reference(self, dtype: torch.dtype) -> nn.Module:
        """For one process: with values, its weights yet to be set."""
        with default_dtype(dtype if dtype == torch.float64 else torch.float32):
            return self._with_values(self._made(self.whole or self.model, dtype))

    def _with_values(self, model: nn.Module) -> nn.Module:
        if any(parameter.is_meta for parameter in model.parameters()):
            values: dict[str, Tensor] = {}
            initialise(model, 0, torch.device("cpu"), lambda name, value: values.update({name: value}))
            made = {
                id(p): nn.Parameter(values[name], p.requires_grad) for name, p in model.named_parameters()
            }
            for module in model.modules():  # under every name that a parameter has: it may be tied
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[key] = made[id(parameter)]
        return model


@dataclass(frozen=True)
class ModelSource:
    """Where a subject comes from, as ranks are told it.

    config   of a Hugging Face model, with its model_type; or
    build    `module:function` of the user's, which is looked for in `folder` too
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    build: str = ""
    folder: str = ""

    def subject(self) -> ModelSpec:
        """Raises ModelError."""
        if self.build:
            return _users(self.build, self.folder)
        config = dict(self.config)
        return ModelSpec(lambda: causal_lm_on_meta(config), whole=lambda: _with_values(config))

    def __str__(self) -> str:
        return self.build or str(self.config["model_type"])


def parse_source(model: str, *, layers: int, length: int = 16, full: bool = False) -> ModelSource:
    """`model`: a config.json, a folder with one, a model_type of transformers, or `module:function`. Hugging
    Face models are made small, with so many layers, for sequences of this length, unless `full`. Raises
    ModelError."""
    if ":" in model and not Path(model).exists():
        return ModelSource(build=model, folder=str(Path.cwd()))
    if Path(model).exists():
        values = read_config(Path(model))
        if not isinstance(values.get("model_type"), str):
            raise ModelError("the configuration names no model_type", given=model)
    elif model in CONFIG_MAPPING:
        values = {"model_type": model}
    else:
        raise ModelError(
            "there is no such model",
            given=model,
            expected="a config.json, a folder with one, a model_type of transformers, or module:function",
            hint=nearest(model, CONFIG_MAPPING.keys()) or "a path that exists",
        )
    return ModelSource(config=values if full else shrink_config(values, layers, length))


def random_tokens(vocabulary: int, seed: int, step: int, samples: int, length: int) -> dict[str, Tensor]:
    """Sequences, and labels of which from none to all of a sequence are no targets."""
    generator = torch.Generator().manual_seed(1009 * seed + step)
    ids = torch.randint(0, vocabulary, (samples, length), generator=generator)
    share = torch.linspace(0.0, 0.9, samples)[torch.randperm(samples, generator=generator), None]
    masked = torch.rand(samples, length, generator=generator) < share
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100)}


def _with_values(config: Mapping[str, Any]) -> nn.Module:
    model: Any = causal_lm_on_meta(config)
    made: nn.Module = type(model)(model.config)
    return made


def _module(built: object) -> nn.Module:
    if isinstance(built, nn.Module):
        return built
    if isinstance(built, Sequence) and all(isinstance(part, nn.Module) for part in built):
        return Chain(built)
    raise ModelError(
        "what was built is no model",
        given=f"a {type(built).__name__}",
        expected="an nn.Module, or a list of modules",
    )


def _quiet(model: nn.Module) -> nn.Module:
    """Without dropout and jitter, of which ranks draw their own: in modules, in what they hand to functions,
    in what they read from a configuration."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for holder in (*model.modules(), *configs.values()):
        for key, value in [*vars(holder).items()]:
            is_p = key == "p" and isinstance(holder, nn.modules.dropout._DropoutNd)
            if isinstance(value, float) and (is_p or "drop" in key or "jitter" in key):
                setattr(holder, key, 0.0)
    return model


def _users(name: str, folder: str) -> ModelSpec:
    module, _, function = name.partition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        build: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a user's module raises
        raise ModelError(
            "the function that builds the model cannot be imported",
            given=f"{name}: {type(error).__name__}: {error}",
            expected="module:function, of a module in this folder or one that is installed",
        ) from error
    made = _told(build)
    return made if isinstance(made, ModelSpec) else ModelSpec(build)


def _told(build: Callable[[], Any]) -> Any:
    """What a user's function builds. Raises ModelError for what it raises."""
    try:
        return build()
    except PlaitError:
        raise
    except Exception as error:
        name = getattr(build, "__name__", repr(build))
        raise ModelError(
            "the function that builds the model fails", given=f"{name}: {type(error).__name__}: {error}"
        ) from error
