"""Adapters: properties of a model that PEFT has wrapped, and PEFT's wrapper around a model on meta.

PEFT defines the configurations, the names of parameters, and the keys of files; it is asked for all of these
here. It takes seconds to import and is an optional dependency, so it is imported where it is used.

[Note: names of a wrapped model]
PEFT renames what it wraps: `layers.0.q_proj.weight` becomes
`base_model.model.layers.0.q_proj.base_layer.weight`, and a module in `modules_to_save` has two copies, one
frozen (`original_module`) and one for each adapter (`modules_to_save.<name>`). The plain name is that of the
model without PEFT, as in its files. Several parameters can have the same plain name: copies start from the
same values.
"""

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError

ADAPTER = "default"  # PEFT's name of a single adapter
PREFIX = "base_model.model."  # of the keys in PEFT's files
_OF_USE = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")
_INSTALL = "pip install 'plait[adapters]'"


@dataclass(frozen=True)
class AdapterFacts:
    """The adapters of a PeftModel.

    configs  PEFT's configuration of each adapter, as JSON, by the adapter's name
    keys     by adapter: the keys in PEFT's files of its parameters, by their names in the model
    plain    parameters and buffers of the base and their copies: the names without PEFT, see
             [Note: names of a wrapped model]
    trained  the adapters that are trained: the active ones
    """

    configs: Mapping[str, dict[str, Any]]
    keys: Mapping[str, Mapping[str, str]]
    plain: Mapping[str, str]
    trained: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module) -> "AdapterFacts | None":
        """The facts of a PeftModel with layers of adapters, compiled or not; None for other models. Raises
        ModelError for adapters that are merged, or tied to each other."""
        inner: Any = getattr(model, "_orig_mod", model)
        if not is_peft_model(inner) or not any(True for _ in adapter_layers(inner)):
            return None
        _check_layers(inner)
        prefix = "" if inner is model else "_orig_mod."
        state = inner.state_dict(keep_vars=True)
        first = {id(tensor): f"{prefix}{name}" for name, tensor in _named_tensors(inner).items()}
        keys = {}
        for name in inner.peft_config:
            found = file_tensors(inner, state, name).items()
            keys[name] = {first[id(tensor)]: key for key, tensor in found}
        plain_of, named = plain_names(inner), _named_tensors(inner)
        plain = {f"{prefix}{name}": plain_of[name] for name in named if name in plain_of}
        configs = {name: _as_json(config) for name, config in inner.peft_config.items()}
        return cls(configs, keys, plain, tuple(inner.active_adapters))

    @property
    def base(self) -> frozenset[str]:
        """Names of the parameters and buffers that belong to no adapter."""
        return frozenset(self.plain) - {name for of in self.keys.values() for name in of}


def _check_layers(model: Any) -> None:
    """Raise ModelError for layers with adapters that cannot be trained as they are."""
    ties = any(getattr(config, "ensure_weight_tying", False) for config in model.peft_config.values())
    first: dict[int, str] = {}
    for name, layer in adapter_layers(model):
        if getattr(layer, "merged_adapters", None):
            raise ModelError(
                "adapters are merged into the weights",
                given=f"{name}: {', '.join(layer.merged_adapters)}",  # type: ignore[arg-type]
                expected="a base without its adapters, which are computed next to it",
                hint="model.unmerge_adapter() before parallelize",
            )
        if not ties or not hasattr(layer, "lora_A"):
            continue
        weight = layer.get_base_layer().weight  # type: ignore[operator]
        if (other := first.setdefault(id(weight), name)) != name:
            raise ModelError(
                "PEFT ties the adapters of two uses of a weight, and plait would train them apart",
                given=f"{other} and {name}, ensure_weight_tying=True",
                expected="adapters that are parameters of their own",
                hint="modules_to_save for the tied weight, or targets without it",
            )


def is_peft_model(model: nn.Module) -> bool:
    """Return whether the model is PEFT's wrapper. If PEFT is not imported, no model is."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield PEFT's layers, with their names: layers with adapters, and modules that are trained as copies."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            layer: Any = module
            yield name, layer


def plain_names(model: nn.Module) -> dict[str, str]:
    """The plain names of the parameters and buffers of a PeftModel that have one: see
    [Note: names of a wrapped model]. In any other model, all names as they are."""
    parameters = model.named_parameters(remove_duplicate=False)  # a tied one has several
    named = [name for name, _ in (*parameters, *model.named_buffers(remove_duplicate=False))]
    if not is_peft_model(model):
        return {name: name for name in named}
    layers = dict(adapter_layers(model))
    return {name: found for name in named if (found := _plain(name, layers)) is not None}


def _plain(name: str, layers: Mapping[str, nn.Module]) -> str | None:
    """The plain name of a tensor; None for an adapter's own."""
    kept: list[str] = []
    words = name.split(".")
    at = 0
    while at < len(words):
        layer = layers.get(".".join(words[:at]))
        if layer is not None and words[at] in ("base_layer", "original_module", "modules_to_save"):
            at += 2 if words[at] == "modules_to_save" else 1  # and the adapter's name
        elif layer is not None and words[at] in _own_names(layer):
            return None
        else:
            kept.append(words[at])
            at += 1
    return ".".join(kept).removeprefix(PREFIX)


def _own_names(layer: nn.Module) -> set[str]:
    """The submodules of a layer of PEFT that are not of the model that it wraps."""
    names = {name for name, _ in layer.named_children()} | set(layer._parameters) | set(layer._buffers)
    return names - {"base_layer", "original_module", "modules_to_save"}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def file_tensors(model: Any, tensors: Mapping[str, Tensor], adapter: str = ADAPTER) -> dict[str, Tensor]:
    """The tensors of one adapter of a PeftModel, by their keys in PEFT's files: PEFT's own function chooses
    and names them, among `tensors` by their names in the model. Without embeddings of the base, which it
    would save with their adapters."""
    import peft

    chosen: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
    )
    return chosen


def attach(model: nn.Module, config: Mapping[str, Any], *, adapter: str = ADAPTER) -> Any:
    """Return PEFT's wrapper around a model on meta, with a LoRA adapter on meta.

    `config`: keys of peft.LoraConfig. Raises ModelError if PEFT is missing or refuses the configuration.
    """
    peft = import_peft()
    names = [name for name, module in model.named_modules() if name and "weight" in module._parameters]
    _check_targets(config, names, [name for name, _ in model.named_parameters()])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers and PEFT, about patterns and tied weights
            lora = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **config})
            return peft.get_peft_model(model, lora, adapter_name=adapter, low_cpu_mem_usage=True)
    except (ValueError, TypeError, KeyError, NotImplementedError, AttributeError) as error:
        raise ModelError(
            "PEFT refuses the adapter",
            given=f"{dict(config)}: {' '.join(str(error).split())[:300]}",
            expected="a configuration that peft.LoraConfig and get_peft_model accept for this model",
            hint="r and target_modules alone, then one key more at a time",
        ) from error


def import_peft() -> Any:
    """Return the package. Raises ModelError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "adapters need the package peft",
            given=f"{error}",
            expected="peft in this environment",
            hint=_INSTALL,
        ) from error
    return peft


def with_adapters_inside(model: nn.Module) -> set[nn.Module]:
    """The modules in which there is a layer of PEFT, and these layers: no files of the base have all of their
    weights."""
    names = {name for name, _ in adapter_layers(model)}
    names |= {".".join(name.split(".")[:n]) for name in names for n in range(name.count(".") + 1)}
    inside = {module for _, layer in adapter_layers(model) for module in _own_modules(layer)}
    return {model.get_submodule(name) for name in names} | inside


def _own_modules(layer: nn.Module) -> Iterator[nn.Module]:
    for name in _own_names(layer) & dict(layer.named_children()).keys():
        yield from layer.get_submodule(name).modules()


def _check_targets(config: Mapping[str, Any], modules: list[str], parameters: list[str]) -> None:
    """Raise ModelError for a name that matches no module or parameter: PEFT ignores such a name if
    others match."""
    for key, names in (
        ("target_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", parameters),
    ):
        given = config.get(key) or ()
        for target in () if isinstance(given, str) else given:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                endings = sorted({".".join(name.split(".")[-1 - target.count(".") :]) for name in names})
                endings = [ending for ending in endings if not ending.rpartition(".")[2].isdigit()]
                near = get_close_matches(target, endings, n=4, cutoff=0.3) or endings[:6]
                raise ModelError(
                    f"the model has no {'parameter' if key == 'target_parameters' else 'module'} {target!r}",
                    given=f"{key} = {list(given)}",
                    expected=f"names, or their last parts, such as {', '.join(near)}",
                    hint=f"{key} = {[near[0] if one == target else one for one in given]}",
                )


def _as_json(config: Any) -> dict[str, Any]:
    """A configuration as PEFT writes it to adapter_config.json, without what it says of its base and use."""
    values = {key: of for key, of in config.to_dict().items() if of is not None and key not in _OF_USE}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


@contextmanager
def disabled(layers: Iterator[tuple[str, nn.Module]]) -> Iterator[None]:
    """Compute without adapters in the context. PEFT's own context also changes which parameters require a
    gradient, which the engine's units are built by."""
    changed = [(layer, layer._disable_adapters) for _, layer in layers]
    for layer, _ in changed:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, was in changed:
            layer._disable_adapters = was


@contextmanager
def all_active(model: nn.Module) -> Iterator[None]:
    """Compute with the sum of all LoRA adapters of each layer in the context: also those that are switched on
    later have to be sharded."""
    layers: list[Any] = [layer for _, layer in adapter_layers(model) if hasattr(layer, "lora_A")]
    active = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [*layer.lora_A, *layer.lora_embedding_A]
    try:
        yield
    finally:
        for layer, was in zip(layers, active, strict=True):
            layer._active_adapter = was


def merged_weights(layer: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the module that a layer of PEFT on meta wraps, by their names in it, with its active
    adapters merged: by PEFT, in float32, on the CPU. `tensors`: the layer's, by their names in it."""
    real = copy.deepcopy(layer).to_empty(device="cpu").float()
    with torch.no_grad():
        for name, tensor in _named_tensors(real).items():
            tensor.copy_(tensors[name])
    inner = real
    while callable(getattr(inner, "merge", None)):  # layers of parameters of one module are nested
        inner.merge()
        inner = inner.base_layer
    return {name: tensor.detach() for name, tensor in _named_tensors(inner).items()}
