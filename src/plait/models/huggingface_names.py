"""The names and the form of a model's tensors in Hugging Face files.

[Note: names in files]
Most files contain a model's state dict unchanged. transformers renames some tensors as it loads them, adds or
drops the prefix of the base model, and merges several into one (Mixtral's experts: one tensor per layer in
the model, one per expert in files). Its own functions do this; on saving they do the reverse. A tied weight
is in a file once, under any of its names. Writing takes one group of tensors at a time, at most one layer's.

Tensors that are renamed, stacked or concatenated (all experts of the hub's files) are read directly: each
tensor of the files is a box of one of the model, and a rank reads those of its own shard alone. Others
(transposed, permuted, split) are left to `from_pretrained`.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.models.adapters import plain_names
from plait.models.init_weights import RecordedConstruction
from plait.models.task import pretrained_base
from plait.models.transformers_types import is_pretrained_model
from plait.plan import Box

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEGACY_KEYS = r"rotary_emb\.inv_freq"  # in old files; computed since


@dataclass(frozen=True)
class StateNames:
    """The names of a model's state dict. `first`: maps each to the tensor's first name as a parameter or
    buffer, by which plait identifies it. `buffers`: the first names of buffers.

    Of a model in PEFT's wrapper: the plain names (see `adapters.py`), without the tensors of adapters.
    `copies`: the first names of further tensors that begin with a plain name's values, with its first name.
    """

    first: Mapping[str, str]
    tensors: Mapping[str, Tensor]  # by first name
    buffers: frozenset[str]
    copies: Mapping[str, str]

    @classmethod
    def from_model(cls, model: nn.Module) -> "StateNames":
        named = [*model.named_parameters(), *model.named_buffers()]
        first, plain = {id(tensor): name for name, tensor in named}, plain_names(model)
        state = model.state_dict(keep_vars=True)
        tensors, copies = dict[str, Tensor](), dict[str, str]()
        for name, tensor in state.items():
            plain_name = plain.get(name)
            if id(tensor) not in first or plain_name is None:
                continue
            if tensors.setdefault(plain_name, tensor) is not tensor:
                copies[first[id(tensor)]] = first[id(tensors[plain_name])]
        return cls(
            {name: first[id(tensor)] for name, tensor in tensors.items()},
            {first[id(tensor)]: tensor for tensor in tensors.values()},
            frozenset(name for name, _ in model.named_buffers()),
            copies,
        )

    def checkpoint_key(self, first: str) -> str:
        """The tensor's key in a checkpoint."""
        return f"{'buffers' if first in self.buffers else 'weights'}/{first}"


def buffers_like_weights(model: nn.Module) -> set[int]:
    """The ids of buffers that have the dtype of the weights: those that are saved with them. In a model of
    transformers, those that have it where the class is built for such weights: tables of angles have not."""
    found, seen = set(), set[nn.Module]()
    for module in model.modules():
        if is_pretrained_model(module) and module not in seen:
            seen.update(module.modules())
            dtypes = _built_for_bfloat16(module)
            found |= {id(b) for name, b in module.named_buffers() if dtypes.get(name) == torch.bfloat16}
        elif module not in seen:
            kept = module._non_persistent_buffers_set
            found |= {id(b) for key, b in module._buffers.items() if b is not None and key not in kept}
    return found


def _built_for_bfloat16(model: "PreTrainedModel") -> dict[str, torch.dtype]:
    """Dtypes of buffers of a model built for weights in bfloat16; none if it cannot be built again."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with RecordedConstruction(), torch.device("meta"):
            rebuilt = type(model)(copy.deepcopy(model.config))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return {}  # a class of the user's, with other arguments
    finally:
        torch.set_default_dtype(default)
    wide = set(model._keep_in_fp32_modules_strict or ())
    return {name: b.dtype for name, b in rebuilt.named_buffers() if wide.isdisjoint(name.split("."))}


@dataclass(frozen=True)
class FileKeys:
    """The keys of the files' tensors that one of the model consists of, in order. Those of a source are
    stacked in a new dim 0 (`stacks`) or concatenated along `dim`, and then the sources along `dim`."""

    by_source: Sequence[Sequence[str]]
    stacks: bool = False
    dim: int = 0

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Box]]:
        """Yield the place of each in the model's tensor, of the shapes in the files."""
        at = 0  # of the next tensor, along `dim`
        for keys in self.by_source:
            for index, key in enumerate(keys):
                shape = ((1,) if self.stacks else ()) + shapes[key]
                start = [at if dim == self.dim else 0 for dim in range(len(shape))]
                if self.stacks:
                    start[0] = index
                stop = tuple(low + size for low, size in zip(start, shape, strict=True))
                yield key, Box(tuple(start), stop)
                if self.dim < len(shape) and (not self.stacks or key == keys[-1]):
                    at = stop[self.dim]


class _Conversion(NamedTuple):
    """The operations of a converter of transformers on the tensors of its sources: see FileKeys."""

    sources: Sequence[str]
    stacks: bool
    dim: int


_RENAMED = _Conversion([""], stacks=False, dim=0)


def map_file_keys(model: nn.Module, keys: Iterable[str]) -> dict[str, FileKeys] | str:
    """Map the first name of each tensor to its keys in the files, or return why that is not possible."""
    names = StateNames.from_model(model)
    base = pretrained_base(model) or model
    name_of, ignored = _file_key_to_name(base, dict(names.first)), _ignored_keys(base)
    found: dict[str, tuple[_Conversion, list[list[str]]]] = {}
    for key in keys:
        name, source, conversion = name_of(key)
        if conversion is None:
            return f"{key} is converted as it is loaded"
        if name not in names.first:
            if ignored is not None and ignored.search(name):
                continue
            return f"the model has no {name}"
        new: tuple[_Conversion, list[list[str]]] = conversion, [[] for _ in conversion.sources]
        earlier, by_source = found.setdefault(names.first[name], new)
        if earlier != conversion or (conversion is _RENAMED and by_source[0]):
            first = next(key for keys in by_source for key in keys)
            return f"{first} and {key} are both in the files, but tied in the model"
        by_source[conversion.sources.index(source)].append(key)
    missing = [name for name in names.tensors if name not in found]
    if missing:
        return f"{missing[0]} is missing"
    return {
        name: FileKeys([sorted(keys, key=_in_order) for keys in by_source], conversion.stacks, conversion.dim)
        for name, (conversion, by_source) in found.items()
    }


def _in_order(key: str) -> list[Any]:
    """A key for sorting, with numbers by their values."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"([0-9]+)", key)]


def _file_key_to_name(
    model: nn.Module, state: dict[str, str]
) -> Callable[[str], tuple[str, str, _Conversion | None]]:
    """Return the function from a file's key to the name in the model (of those in `state`), the source of a
    conversion that it matches, and this conversion; None if the tensor is no box of the model's."""
    if not is_pretrained_model(model):
        return lambda key: (key, "", _RENAMED)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings: Any = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters: Any = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    conversions = {source: _conversion(each) for each in converters for source in each.source_patterns}
    prefix = model.base_model_prefix

    def name_of(key: str) -> tuple[str, str, _Conversion | None]:
        """Rename as transformers' convert_and_load_state_dict_in_model."""
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        return (name, "", _RENAMED) if pattern is None else (name, pattern, conversions[pattern])

    return name_of


def _conversion(converter: Any) -> _Conversion | None:
    """The conversion of a WeightConverter; None if it does more than stack and concatenate."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in converter.operations]
    dims = [operation.dim for operation in converter.operations if hasattr(operation, "dim")]
    stacks = kinds[:1] == [MergeModulelist] and dims[0] == 0
    joins, dim = kinds[stacks:] == [Concatenate], dims[-1] if dims else 0
    one_source = stacks and len(kinds) == 1 == len(converter.source_patterns)
    if len(converter.target_patterns) > 1 or not (one_source or joins) or dim < (stacks and joins):
        return None
    return _Conversion(converter.source_patterns, stacks, dim)


def _ignored_keys(model: nn.Module) -> re.Pattern[str] | None:
    """The pattern of keys in files that the model does not have."""
    if not is_pretrained_model(model):
        return None
    return re.compile("|".join([*sorted(model._keys_to_ignore_on_load_unexpected or ()), _LEGACY_KEYS]))


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of the model that are saved together, and the tensors that they become in the files."""

    names: Mapping[str, str]  # state dict name to first name
    tensors: Mapping[str, Tensor]  # on meta, by their names in the file


class SaveFormat:
    """The conversion of a model's tensors for saving, each once. See [Note: names in files]."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype) -> None:
        """`model`: on meta. `dtype`: of floating-point tensors but those that the model keeps in float32."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        self._model = model
        self._dtype = dtype
        plan = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
        self._float32_pattern = re.compile("|".join(plan)) if plan else None
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)]  # as for a new model
        self._model._weight_conversions = mapping  # type: ignore[assignment]  # transformers reverts these
        self._converters: Any = [
            entry.reverse_transform() for entry in mapping[::-1] if isinstance(entry, WeightConverter)
        ]
        self._is_plain = not mapping

    def groups(self) -> list[SavedGroup]:
        """All groups that are saved, in the model's order."""
        names, state = StateNames.from_model(self._model), self._model.state_dict()
        groups: dict[str, dict[str, str]] = {}
        for name in self._saved_names(names):
            groups.setdefault(self._converted(name), {})[name] = names.first[name]
        return [
            SavedGroup(group, self.convert({name: state[name] for name in group}))
            for group in groups.values()
        ]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of a group, by state dict name, to the form and dtype of the files."""
        from transformers.core_model_loading import revert_weight_conversion

        cast = {name: tensor.to(self._dtype_of(name, tensor)) for name, tensor in tensors.items()}
        return cast if self._is_plain else revert_weight_conversion(self._model, cast)

    def is_converted(self, name: str) -> bool:
        """Return whether more than the name of a tensor differs in the files."""
        return self._converted(name) != name

    def _converted(self, name: str) -> str:
        """The name that the first converter of a tensor gives it; its own if there is none."""
        for converter in self._converters:
            converted, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return str(converted)
        return name

    def _saved_names(self, names: StateNames) -> list[str]:
        """One name of each tensor: the one that its ties refer to."""
        tied, ignored = self._model.all_tied_weights_keys, self._model._keys_to_ignore_on_save or ()
        chosen: dict[str, str] = {}
        for name, first in names.first.items():
            if name not in ignored and (first not in chosen or chosen[first] in tied):
                chosen[first] = name
        saved = set(chosen.values())
        return [name for name in names.first if name in saved]

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        is_float32 = self._float32_pattern is not None and self._float32_pattern.search(name)
        return torch.float32 if is_float32 else self._dtype
