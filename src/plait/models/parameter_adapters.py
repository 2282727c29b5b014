"""Adapters of peft for parameters of experts (`target_parameters`): where their factors have each expert.

# E experts  O out_features  I in_features  r rank of the adapter

[Note: factors of experts]
peft's `ParamWrapper` around a module adapts one parameter of it, (E, O, I) or, if the module's weights are
transposed, (E, I, O). Several are nested. A is (E r, I): the rows of an expert follow each other. B is
(O, r E): columns e, E + e, 2 E + e, ... are of expert e, so each r-th of the columns has all experts in order.
The rest follows from the parameter: where it is sharded over O or I, so is the factor with that dim, and the
other one is the same on all columns, with a gradient that is a sum over them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.plan.layout import ExpertDim


@dataclass(frozen=True)
class ParameterAdapter:
    """An adapter of one parameter. `module`: the module that has it; names are the model's, and `rank` is r.
    `transposed`: as (E, I, O)."""

    module: str
    parameter: str
    factor_A: str
    factor_B: str
    rank: int
    transposed: bool

    @property
    def parts(self) -> dict[str, ExpertDim]:
        """Where the factors have their experts: [Note: factors of experts]."""
        return {self.factor_A: ExpertDim(), self.factor_B: ExpertDim(dim=1, repeats=self.rank)}


def is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def parameter_adapters(model: nn.Module) -> Iterator[ParameterAdapter]:
    """Yield the adapters of parameters of three dims."""
    for name, wrapper in model.named_modules():
        if is_wrapper(wrapper):
            yield from _adapters_of(name, wrapper)


def _adapters_of(name: str, wrapper: Any) -> Iterator[ParameterAdapter]:
    module, base = name, wrapper
    while is_wrapper(base):
        module, base = f"{module}.base_layer", base.base_layer
    if wrapper.get_param().ndim != 3:
        return
    for key, rank in wrapper.r.items():
        yield ParameterAdapter(
            module,
            f"{module}.{wrapper.parameter_name}",
            f"{name}.lora_A.{key}.weight",
            f"{name}.lora_B.{key}.weight",
            rank,
            bool(getattr(base, "is_transposed", False)),
        )
