"""Mistakes in the arguments of `parallelize`, found before ranks wait for each other."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from plait.comm import World
from plait.errors import ConfigError, ModelError, shown
from plait.fileio import to_path
from plait.models import Chain
from plait.plan.loss_scaling import LossScaling

_MAX_SEED = 2**64 - 1


def _names(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_batch(value: object) -> bool:
    return _names(value) and all(isinstance(each, Tensor) for each in value.values())  # type: ignore[attr-defined]


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SEED


def _are_blocks(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return isinstance(value, type)
    return all(isinstance(each, type | nn.Module) for each in value)


_LOSS = "lambda outputs, batch: (summed_loss, number_of_targets)"
# A check of each argument that is not None, and its valid values: in words, and one of them.
_TYPES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "optimizer_args": (_names, "a dict of the optimizer's arguments", "{'lr': 1e-3}"),
    "param_groups": (
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
        "an iterable of parameters, or of dicts",
        "model.parameters()",
    ),
    "loss": (callable, "a function of the model's outputs and a micro-batch", _LOSS),
    "loss_scaling": (lambda value: isinstance(value, LossScaling), "a LossScaling", "plait.LossScaling()"),
    "blocks": (_are_blocks, "a class of modules, or a list of classes or modules", "type(block)"),
    "offload_dir": (lambda value: isinstance(value, str | os.PathLike), "a path", "'/var/tmp'"),
    "tensor_plan": (
        lambda value: _names(value) and all(isinstance(style, str) for style in value.values()),
        "a dict of names and styles",
        "{'blocks.*.fc1': 'colwise'}",
    ),
    "layout": (lambda value: isinstance(value, str), "rules for names of dims", "'heads:col ffn:col'"),
    "probe": (
        lambda value: isinstance(value, bool) or _is_batch(value),
        "True, False, or a dict of tensors",
        "False",
    ),
    "example_batch": (_is_batch, "a dict of tensors", "{'input_ids': ids}"),
    "seed": (_is_seed, "an integer from 0 to 2**64 - 1", "0"),
    "weights": (lambda value: isinstance(value, str | os.PathLike), "a path", "'FOLDER'"),
    "world": (lambda value: isinstance(value, World), "a World", "plait.comm.connect()"),
}
_REQUIRED = ("probe", "seed")


def check_types(model: object, arguments: Mapping[str, object]) -> nn.Module:
    """Return the model. Raises ModelError or ConfigError for an argument of the wrong type; `arguments`: by
    name."""
    for name, (is_valid, expected, valid) in _TYPES.items():
        value = arguments[name]
        if (value is None and name in _REQUIRED) or (value is not None and not is_valid(value)):
            raise ConfigError(
                f"{name} is not valid",
                given=f"{name}={shown(value)}",
                expected=expected,
                hint=f"{name}={valid}",
            )
        if name in ("offload_dir", "weights") and value is not None:
            to_path(value, name)
    return _module(model)


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        is_list = isinstance(model, Iterable) and not isinstance(model, str | Mapping | type)
        modules = list(model) if is_list else []  # type: ignore[call-overload]
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise ModelError(
                "the model is not an nn.Module",
                given=f"{shown(model)}, a {type(model).__name__}",
                expected="an nn.Module, or a list of modules that receive each other's outputs",
                hint="nn.Sequential(*layers)",
            )
        model = Chain(modules)
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)]
    scripted = [name for name, each in model.named_modules() if isinstance(each, ScriptModule)]
    for name in (*lazy, *scripted):
        raise ModelError(
            "a parameter has no shape yet" if lazy else "a compiled module cannot be sharded",
            given=f"{name or 'the model'} of {type(model).__name__}",
            expected="modules and parameters as built",
            hint="a batch through the model before parallelize" if lazy else "the model before torch.jit",
        )
    return model
