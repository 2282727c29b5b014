"""Adapters of peft for parameters of experts (`target_parameters`): where their factors have each expert.

# E experts  O out_features  I in_features  r rank of the adapter

[Note: factors of experts]
peft's `ParamWrapper` around a module adapts one parameter of it, (E, O, I) or, if the module's weights are
transposed, (E, I, O). Several are nested. A is (E r, I): the rows of an expert follow each other. B is
(O, r E): columns e, E + e, 2 E + e, ... are of expert e, so each r-th part has all experts in order.
The rest follows from the parameter: where it is sharded over O or I, so is the factor with that dim, and the
other one is the same on all columns, with a gradient that is a sum over them.

[Note: forward of wrappers]
While the wrapped module runs, peft replaces its parameter by a parametrization, which moves the parameter out
of the module and back, and reads the full number of experts. Here the module has an attribute with the
adapted weights meanwhile, in place of its parameter, of the experts and features that the rank has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.plan.sharding import ExpertDim


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
        """The dims of the factors that have experts: [Note: factors of experts]."""
        return {self.factor_A: ExpertDim(), self.factor_B: ExpertDim(dim=1, repeats=self.rank)}


def is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def parameter_adapters(model: nn.Module) -> Iterator[ParameterAdapter]:
    """Yield the adapters of parameters of three dims."""
    for name, wrapper in model.named_modules():
        if is_wrapper(wrapper):
            yield from _adapters_of(name, wrapper)


def unwrapped_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names of modules and parameters as the model without wrappers has them, and their names in it."""
    found = {name: name for name in names}
    for module in {adapter.module for adapter in parameter_adapters(model)}:
        inside = [name for name in found.values() if name == module or name.startswith(f"{module}.")]
        found |= {name.replace(".base_layer", ""): name for name in inside}
    return found


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


def adapted_output(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapper: [Note: forward of wrappers]."""
    active = [key for key in module.active_adapters if key in module.lora_A]
    if module.disable_adapters or module.merged or not active:
        return module.base_layer(*args, **kwargs)
    base, weight = module.get_base_layer(), module.get_param()
    for key in active:
        weight = _adapted(weight, module, key)
    vars(base)[module.parameter_name] = weight
    try:
        return module.base_layer(*args, **kwargs)
    finally:
        del vars(base)[module.parameter_name]


def _adapted(weight: Tensor, module: Any, key: str) -> Tensor:
    """W + s B A of each expert, or of a matrix."""
    a, b = (factors[key].weight.to(weight.dtype) for factors in (module.lora_A, module.lora_B))
    if weight.ndim == 2:
        return torch.addmm(weight, b, a, alpha=module.scaling[key])
    rank = module.r[key]
    a_ErI = a.unflatten(0, (-1, rank))
    b_EOr = b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    if getattr(module.get_base_layer(), "is_transposed", False):
        return torch.baddbmm(weight, a_ErI.mT, b_EOr.mT, alpha=module.scaling[key])
    return torch.baddbmm(weight, b_EOr, a_ErI, alpha=module.scaling[key])
