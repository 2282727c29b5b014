"""Under which names, and in which form, a model's tensors stand in Hugging Face files.

[Note: names in files]
Most files hold a model's state dict as it is. transformers renames some tensors as it loads them, adds or
drops the prefix of the base model, and makes some of several (Mixtral's experts: one tensor of a layer's, in
files one of each). Its own functions say which; on saving they go the other way. A tied weight is in a file
once, under any of its names. What is only renamed can be read piece by piece where it lies. What is made of
several is not, and is left to `from_pretrained`; written it is piece by piece all the same, as what belongs
together is at most a layer's.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    rename_source_key,
    revert_weight_conversion,
)

_LEGACY_KEYS = r"rotary_emb\.inv_freq"  # in files of old; computed since


@dataclass(frozen=True)
class StateNames:
    """The names of a model's state dict. `first`: of each the one under which plait knows the tensor: the
    first of its names, of a parameter or of a buffer. `buffers`: those that are buffers'."""

    first: Mapping[str, str]
    tensors: Mapping[str, Tensor]  # by first name
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> "StateNames":
        named = [*model.named_parameters(), *model.named_buffers()]
        first = {id(tensor): name for name, tensor in named}
        tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) in first}
        return cls(
            {name: first[id(tensor)] for name, tensor in tensors.items()},
            {first[id(tensor)]: tensor for tensor in tensors.values()},
            frozenset(name for name, _ in model.named_buffers()),
        )

    def checkpoint_key(self, first: str) -> str:
        """In a checkpoint."""
        return f"{'buffers' if first in self.buffers else 'weights'}/{first}"


def map_file_keys(model: nn.Module, keys: Iterable[str]) -> dict[str, str] | str:
    """The key of a file for every one of the model's tensors, by its first name; or why it is not so simple.
    See [Note: names in files]."""
    names = StateNames.of(model)
    inside, ignored = _file_key_to_name(model), _ignored_keys(model)
    found: dict[str, str] = {}
    for key in keys:
        name = inside(key)
        if name is None:
            return f"{key} is converted as it is loaded"
        if name not in names.first:
            if ignored is not None and ignored.search(name):
                continue
            return f"the model has no {name}"
        if names.first[name] in found:
            return f"{found[names.first[name]]} and {key}, which the model ties, are both there"
        found[names.first[name]] = key
    missing = [name for name in names.tensors if name not in found]
    return f"{missing[0]} is not there" if missing else found


def _file_key_to_name(model: nn.Module) -> Callable[[str], str | None]:
    """The name in the model of a key in a file; None where more than the name is another."""
    if not isinstance(model, PreTrainedModel):
        return lambda key: key
    mapping = get_model_conversion_mapping(model)
    renamings: Any = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters: Any = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def name_of(key: str) -> str | None:
        """As transformers' convert_and_load_state_dict_in_model does it."""
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        return name if pattern is None else None

    return name_of


def _ignored_keys(model: nn.Module) -> re.Pattern[str] | None:
    """Of what files have in excess."""
    if not isinstance(model, PreTrainedModel):
        return None
    return re.compile("|".join([*sorted(model._keys_to_ignore_on_load_unexpected or ()), _LEGACY_KEYS]))


@dataclass(frozen=True)
class SavedGroup:
    """What is saved together: some of the model's tensors, by first name, and as what."""

    names: Mapping[str, str]  # of a state dict's: the first
    tensors: Mapping[str, Tensor]  # on meta, by the names that they have in the file


class SaveFormat:
    """How a model's tensors are saved, each once. See [Note: names in files]."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """`model`: on meta. `dtype`: of what is floating, but for what the model keeps in float32."""
        self._model = model
        self._dtype = dtype
        plan = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
        self._wide = re.compile("|".join(plan)) if plan else None
        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [entry for entry in found if not isinstance(entry, PrefixChange)]  # as if made from scratch
        self._model._weight_conversions = found  # type: ignore[assignment]  # what transformers will revert
        self._converters: Any = [
            entry.reverse_transform() for entry in found[::-1] if isinstance(entry, WeightConverter)
        ]
        self._is_plain = not found

    def groups(self) -> list[SavedGroup]:
        """Everything that is saved, in the model's order."""
        names, state = StateNames.of(self._model), self._model.state_dict()
        together: dict[str, dict[str, str]] = {}
        for name in self._kept(names):
            converted, pattern = apply_converters(name, self._converters)
            together.setdefault(name if pattern is None else converted, {})[name] = names.first[name]
        return [
            SavedGroup(group, self.convert({name: state[name] for name in group}))
            for group in together.values()
        ]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a group, by their names in the state dict, in the form and dtype in which they are
        saved."""
        cast = {name: tensor.to(self._dtype_of(name, tensor)) for name, tensor in tensors.items()}
        return cast if self._is_plain else revert_weight_conversion(self._model, cast)

    def _kept(self, names: StateNames) -> list[str]:
        """One name of each tensor: that from which others are tied."""
        tied, ignored = self._model.all_tied_weights_keys, self._model._keys_to_ignore_on_save or ()
        chosen: dict[str, str] = {}
        for name, first in names.first.items():
            if name not in ignored and (first not in chosen or chosen[first] in tied):
                chosen[first] = name
        kept = set(chosen.values())
        return [name for name in names.first if name in kept]

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        is_wide = self._wide is not None and self._wide.search(name)
        return torch.float32 if is_wide else self._dtype
