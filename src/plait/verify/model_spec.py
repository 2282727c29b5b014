"""The model to verify: how to build it, and its training batches; also in float64 throughout, where its own
code casts to float32.

[Note: float64 instead of float32]
The models of transformers compute norms, rotary tables and softmax in float32 whatever the model's dtype, and
the rounding hides errors smaller than 1e-7. Here these are computed in float64, in the reference and on
ranks, so that the two can be compared to 1e-9. Fused kernels of a model family are not affected.

The torch function mode is entered around forwards, not around a step: torch disables a mode while it handles
a function, and so during all of `torch.autograd.backward`, in which blocks may run again.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.engine.loss import Loss
from plait.engine.reference import copy_with_values
from plait.errors import ModelError, PlaitError, nearest
from plait.fileio import import_object, missing_hint
from plait.models import (
    IGNORED_LABEL,
    Blocks,
    Chain,
    blocks_of,
    causal_lm_on_meta,
    initialize_weights,
    is_pretrained_model,
    read_config,
    with_layout,
)
from plait.verify.tiny_config import left_out, shrink_config

# (step number, samples per step) -> the batch of all ranks
BatchFn = Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelSpec:
    """A model to verify. A user's function may return one if the model alone is not enough.

    model      builds a new model at each call, with the same weights (torch is seeded before), or on meta
    batch      (step, samples) -> a dict of tensors with that many samples along dim 0; None: random tokens,
               for models with a vocabulary
    loss, blocks, tensor_plan    as in `plait.parallelize`
    reference  builds the one-process model, with values; None: `model`
    """

    model: Callable[[], nn.Module | Sequence[nn.Module]]
    batch: BatchFn | None = None
    loss: Loss | None = None
    blocks: Blocks | None = None
    tensor_plan: Mapping[str, str] | None = None
    reference: Callable[[], nn.Module] | None = None

    def make_batch(self, step: int, samples: int) -> Mapping[str, Tensor]:
        """Return the user's batch. Raises ModelError unless it is a dict of tensors."""
        assert self.batch is not None, "a spec without batches"
        batch = self.batch(step, samples)
        entries = batch.items() if isinstance(batch, Mapping) else [("batch", batch)]
        for name, value in entries:
            if not isinstance(value, Tensor) or not isinstance(batch, Mapping):
                raise ModelError(
                    "a batch is not a dict of tensors",
                    given=f"{name}: a {type(value).__name__}",
                    expected="a dict of tensors with the samples along dim 0",
                    hint="a module around the model, whose forward takes tensors and builds the arguments",
                )
        return batch

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Build the model for ranks: without dropout, which would depend on the plan; all in `dtype`."""
        return self._build(self.model, dtype)

    def build_reference(self, dtype: torch.dtype) -> nn.Module:
        """Build the one-process model, with buffers; its weights are set later."""
        model = self._build(self.reference or self.model, dtype)
        if not any(parameter.is_meta for parameter in model.parameters()):
            return model
        cpu = torch.device("cpu")
        with default_dtype(torch.promote_types(dtype, torch.float32)):
            initialize_weights(model, 0, cpu, lambda *_: None)
        zeros = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        return copy_with_values(model, zeros, dict(model.named_buffers()), dtype, cpu)

    def _build(self, build: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
        with default_dtype(torch.promote_types(dtype, torch.float32)), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random weights and buffers of the user's are the same in each build
            model = _without_dropout(to_module(_call(build)))
            if dtype == torch.float64:
                for parameter in model.parameters():  # some constructors state float32
                    if parameter.is_floating_point():
                        parameter.data = parameter.data.double()
                compute_in_float64(model, (block for _, block in blocks_of(model, self.blocks)))
        return model


@dataclass(frozen=True)
class ModelSource:
    """The source of a model, as plain data that can be sent to ranks.

    config      of a Hugging Face model, with its model_type
    build       `module:function` of the user, instead of `config`; the module may be in `folder`
    left_out    keys of the given configuration, other than sizes, that the small model does not have
    layout      layout rules, as in `plait.parallelize`
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    build: str = ""
    folder: str = ""
    left_out: tuple[str, ...] = ()
    layout: str | None = None

    def spec(self) -> ModelSpec:
        """Return the model spec. Raises ModelError."""
        if self.build:
            spec = _user_spec(self.build, self.folder)
            return replace(spec, tensor_plan=with_layout(spec.tensor_plan, self.layout))
        config = dict(self.config)

        def reference() -> nn.Module:
            on_meta: Any = causal_lm_on_meta(config)
            model: nn.Module = type(on_meta)(on_meta.config)
            return model

        plan = with_layout(None, self.layout)
        return ModelSpec(lambda: causal_lm_on_meta(config), tensor_plan=plan, reference=reference)

    def __str__(self) -> str:
        return self.build or str(self.config["model_type"])


def parse_source(model: str, *, layers: int, length: int = 16, full: bool = False) -> ModelSource:
    """Parse a config.json, a folder with one, a model_type of transformers, or `module:function`.

    Hugging Face models are shrunk, to `layers` layers and for sequences of `length`, unless `full`. Raises
    ModelError.
    """
    if ":" in model and not Path(model).exists():
        return ModelSource(build=model, folder=str(Path.cwd()))
    if Path(model).exists():
        values = read_config(Path(model))
        if not isinstance(values.get("model_type"), str):
            raise ModelError(
                "the configuration has no model_type",
                given=model,
                expected="a Hugging Face configuration",
                hint='"model_type": "llama"',
            )
    elif model in CONFIG_MAPPING:
        values = {"model_type": model}
    else:
        raise ModelError(
            "unknown model",
            given=model,
            expected="a config.json, a folder with one, a model_type of transformers, or module:function",
            hint=nearest(model, CONFIG_MAPPING.keys()) or missing_hint(Path(model)),
        )
    if full:
        return ModelSource(config=values)
    small = shrink_config(values, layers, length)
    return ModelSource(config=small, left_out=left_out(values, small))


def random_tokens(vocabulary: int, seed: int, step: int, samples: int, length: int) -> dict[str, Tensor]:
    """Return random sequences, and labels with 0 to 90 % of a sequence masked."""
    generator = torch.Generator().manual_seed(1009 * seed + step)
    ids = torch.randint(0, vocabulary, (samples, length), generator=generator)
    share = torch.linspace(0.0, 0.9, samples)[torch.randperm(samples, generator=generator), None]
    masked = torch.rand(samples, length, generator=generator) < share
    return {"input_ids": ids, "labels": ids.masked_fill(masked, IGNORED_LABEL)}


def random_numbers(
    shapes: Mapping[str, tuple[int, ...]], seed: int, step: int, samples: int
) -> dict[str, Tensor]:
    """Return entries of normally distributed numbers, of these shapes in each sample."""
    generator = torch.Generator().manual_seed(1013 * seed + step)
    return {key: torch.randn(samples, *shape, generator=generator) for key, shape in shapes.items()}


def to_module(built: object) -> nn.Module:
    """Return what a user's function has returned. Raises ModelError if it is no model."""
    if isinstance(built, nn.Module):
        return built
    if isinstance(built, Sequence) and all(isinstance(part, nn.Module) for part in built):
        return Chain(built)
    raise ModelError(
        "the function did not return a model",
        given=f"a {type(built).__name__}",
        expected="an nn.Module, or a list of modules",
        hint="return model",
    )


def _without_dropout(model: nn.Module) -> nn.Module:
    """Disable dropout and jitter, which are random per rank, in modules, attributes and configurations."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for holder in (*model.modules(), *configs.values()):
        for key, value in [*vars(holder).items()]:
            is_p = key == "p" and isinstance(holder, nn.modules.dropout._DropoutNd)
            if isinstance(value, float) and (is_p or "drop" in key or "jitter" in key):
                setattr(holder, key, 0.0)
    return model


def compute_in_float64(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Make the model and its blocks compute in float64 throughout if their parameters are float64. In place.

    Blocks separately, as they may run again in backward. Those that are one layer of torch's state no dtype,
    and stay as they are: tensor parallelism knows a linear layer by its forward.
    """
    if is_pretrained_model(model):
        model.set_experts_implementation("eager")  # torch's grouped matmul does not support float64
    for module in (model, *blocks):
        cls = type(module)
        is_layer = cls.__module__.startswith("torch.nn.") and not list(module.children())
        if not is_layer and cls not in _FLOAT64_CLASSES.values():  # a builder may return a module twice
            module.__class__ = _FLOAT64_CLASSES[cls] = _FLOAT64_CLASSES.get(cls) or _float64_class(cls)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, for tensors that models create without one, such as tables in buffers."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


_FLOAT64_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # by original class


def _float64_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward computes in float64.

    Its methods and name are those of the class: sharding a model looks at both.
    """
    forward = cls.forward

    @functools.wraps(forward)  # models inspect the signature of forward
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
        if not is_float64:
            return forward(module, *args, **kwargs)
        with _Float64(), default_dtype(torch.float64):
            return forward(module, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "forward": run})


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of torch functions."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _user_spec(name: str, folder: str) -> ModelSpec:
    try:
        build: Callable[[], Any] = import_object(name, Path(folder))
    except Exception as error:  # whatever a user's module raises
        raise ModelError(
            "cannot import the function that builds the model",
            given=f"{name}: {type(error).__name__}: {error}",
            expected="module:function, in this folder or installed",
            hint=f'python -c "import {name.partition(":")[0]}"',
        ) from error
    result = _call(build)
    return result if isinstance(result, ModelSpec) else ModelSpec(build)


def _call(build: Callable[[], Any]) -> Any:
    """Call a user's function; its errors are raised as ModelError."""
    try:
        return build()
    except PlaitError:
        raise
    except Exception as error:
        name = getattr(build, "__name__", repr(build))
        raise ModelError(
            "the function that builds the model failed",
            given=f"{name}: {type(error).__name__}: {error}",
            expected="a function that can be called without arguments",
            hint="--debug, which shows its traceback",
        ) from error
