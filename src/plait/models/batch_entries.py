"""The entries of a batch that the model's forward takes, and those that only the loss reads.

[Note: entries of a batch]
Entries that forward names are its arguments. The others, and the labels, are for the loss: sample weights,
a teacher's logits. An entry that the loss does not read either is a mistake (a misspelled mask, or an entry
that only transformers' own loss would read), which a forward with `**kwargs` would ignore silently. So a
model of transformers receives only the keywords that it names or declares (`Unpack[TransformersKwargs]`), and
the entries that a loss reads are recorded in its first call with these keys. Any other forward with
`**kwargs` receives every entry but the labels.
"""

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from plait.errors import ModelError, nearest
from plait.models.blocks import Chain

# Read by transformers' own loss, which is not called: a step divides by its own number of targets.
_OF_MODELS_LOSS = ("num_items_in_batch",)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def forward_names(model: nn.Module) -> frozenset[str] | None:
    """The entries that forward takes; None: all but the labels."""
    return _arguments(model)[0]


def takes_keyword(model: nn.Module, name: str) -> bool:
    """Return whether forward can be called with this keyword: it names it, or has `**kwargs`."""
    names, _, has_kwargs = _arguments(model)
    return has_kwargs or names is None or name in names


def check_present(model: nn.Module, inputs: Collection[str], batch: Collection[str]) -> None:
    """Raise ModelError unless forward's arguments without defaults are among the inputs from the batch."""
    missing = [name for name in _arguments(model)[1] if name not in inputs]
    if missing:
        raise ModelError(
            "forward needs an argument that the batch does not have",
            given=f"{type(model).__name__} and a batch with {', '.join(batch)}",
            expected=", ".join(missing),
            hint="a batch with forward's arguments by name; labels are for the loss alone",
        )


class RecordedBatch(dict[str, Tensor]):
    """A micro-batch that records which entries are read."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()

    def check_used(self, model: nn.Module, labels: Collection[str]) -> None:
        """Raise ModelError for an entry that neither forward takes nor the loss has read."""
        names = forward_names(model)
        if names is None:
            return
        unused = [key for key in dict.keys(self) if key not in {*names, *labels, *self.read}]
        if unused:
            raise ModelError(
                "the batch has an entry that neither the model nor the loss uses",
                given=f"{unused[0]}; {type(model).__name__}.forward takes {', '.join(sorted(names))}",
                expected="forward's arguments by name, and what the loss reads from the batch",
                hint=nearest(unused[0], names) or f"a batch without {unused[0]}",
            )


# The names that forward takes (None: any), those of them without a default, and whether it has `**kwargs`.
_Arguments = tuple[frozenset[str] | None, tuple[str, ...], bool]


def _arguments(model: nn.Module) -> _Arguments:
    while isinstance(model, Chain):
        model = next(model.children())
    kind = type(model)
    if kind not in _ARGUMENTS:  # the class's forward: the instance's may be ours, with other names
        _ARGUMENTS[kind] = _arguments_of(kind.forward)
    return _ARGUMENTS[kind]


# Weak: a class keeps the globals of its module alive, and an engine may be among them.
_ARGUMENTS: WeakKeyDictionary[type[nn.Module], _Arguments] = WeakKeyDictionary()


def _arguments_of(forward: Callable[..., Any]) -> _Arguments:
    if forward is nn.Module.forward:
        return None, (), True
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in _NAMED]
    names = {parameter.name for parameter in named}
    required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    has_kwargs = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            has_kwargs = True
            declared = [vars(kind).get("__annotations__") for kind in typing.get_args(parameter.annotation)]
            if not declared or None in declared:
                return None, required, has_kwargs
            names = names.union(*declared)
    return frozenset(names - {*_OF_MODELS_LOSS}), required, has_kwargs
