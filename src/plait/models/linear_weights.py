"""The weights of a model that are compressed: see docs/compress.md."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from plait.models.experts import expert_layers
from plait.models.stages.dataflow import blocks_of


def block_linears(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]] | None = None
) -> dict[str, nn.Linear]:
    """Return the linear layers in the model's blocks, by the names of their weights as parameters.

    Without routers, which have an output for each expert, and without weights that another module has too,
    such as a tied embedding. `blocks`: None for those of `blocks_of`.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    inside = {module for _, block in (blocks or blocks_of(model)) for module in block.modules()}
    numbers = set(expert_layers(model).values())
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module in inside
        and uses[id(module.weight)] == 1
        and module.out_features not in numbers
    }


def expert_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that are the weights of several experts: of three dims."""
    for name in expert_layers(model):
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield f"{name}.{key}"
