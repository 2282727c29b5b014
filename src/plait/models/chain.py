"""A model as a list of modules, one after the other: for stages that pass more than one tensor."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from plait.errors import ModelError


class Chain(nn.Module):
    """Calls modules one after the other; they are its children "0", "1", ... and its blocks.

    The first is called with the batch's entries by name, each next one with what the one before returned: a
    tuple or list is spread over its positional arguments, a dict over its keywords, all else is one argument.
    The last one's result is the chain's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = list(modules)
        if len({id(module) for module in modules}) < len(modules):
            raise ModelError(
                "a module stands twice in a list of modules",
                given=", ".join(type(module).__name__ for module in modules),
                expected="modules of their own, which may share parameters",
                hint="copy.copy(module): another module with the same parameters",
            )
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, *args: Any, **batch: Any) -> Any:
        first, *others = self.children()
        result = first(*args, **batch)
        for module in others:
            result = _call_with(module, result)
        return result


def _call_with(module: Any, result: Any) -> Any:
    """Calls a module with what another one returned."""
    if isinstance(result, Mapping):
        return module(**result)
    if isinstance(result, tuple | list):
        return module(*result)
    return module(result)
