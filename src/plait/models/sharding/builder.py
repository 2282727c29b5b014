"""A tensor plan in the making: what has been decided of a model's layers and parameters so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from plait.errors import ModelError, PlanError
from plait.models.sharding.styles import StyleSpec, replicate_hint
from plait.plan.sharding import (
    ArgumentSharding,
    DimSharding,
    LayerSharding,
    ParamSharding,
    Range,
    Style,
    split_width,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)  # hold modules, and are never called


@dataclass
class TPPlanBuilder:
    """See `TensorPlan` for what is collected. `words`: what is said, by name; `blocks`: their names."""

    model: nn.Module
    rows: int
    cols: int
    blocks: tuple[str, ...]
    words: dict[str, StyleSpec]
    layers: dict[str, LayerSharding] = field(default_factory=dict)
    parameters: dict[str, ParamSharding] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    arguments: list[ArgumentSharding] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self._names = {id(p): name for name, p in self.model.named_parameters()}

    @property
    def config(self) -> Any:
        """Of a transformers model's text part; None for another model."""
        return self.model.config.get_text_config() if isinstance(self.model, PreTrainedModel) else None

    def own_parameters(self, module: str) -> dict[str, str]:
        """A module's own parameters: the name that the model gives to each, by the module's."""
        own = self.modules[module].named_parameters(recurse=False)
        return {key: self._names[id(parameter)] for key, parameter in own}

    def shard_parameter(
        self, name: str, dims: Sequence[DimSharding | None], *, partial: bool = False
    ) -> None:
        cut = ParamSharding(name, tuple(dims), partial)
        if self.parameters.setdefault(name, cut) != cut:
            raise ModelError(
                f"two layers share the parameter {name}, which the tensor plan cuts in two ways",
                given=f"shape {self.shapes[name]}",
                hint="tensor_plan= with one style for both, or 'replicate', or tp=1",
            )

    def over_row(self, size: int, of: str) -> DimSharding:
        """Of the residual stream's features, or of a width like it."""
        return one_range_each("row", split_width(size, self.rows, of=f"the features of {of}"))

    def ancestors(self, name: str) -> list[str]:
        """The modules around this one, nearest first, without the model."""
        parts = name.split(".")
        return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]

    def block_of(self, name: str) -> str | None:
        return next((block for block in self.blocks if name == block or name.startswith(f"{block}.")), None)

    def region_of(self, name: str) -> str | None:
        """The module right below the block that this module or parameter is, or is in; None outside."""
        block = self.block_of(name)
        if block is None:
            return None
        path = block
        for part in name[len(block) + 1 :].split("."):
            path = f"{path}.{part}"
            if path in self.modules and not isinstance(self.modules[path], CONTAINERS):
                return path
        return None

    def inside(self, region: str) -> list[str]:
        return [name for name in self.modules if name == region or name.startswith(f"{region}.")]

    def is_norm(self, name: str) -> bool:
        """By its class's name, as everywhere."""
        return "norm" in type(self.modules[name]).__name__.lower()


def one_range_each(axis: str, ranges: Sequence[Range]) -> DimSharding:
    """One range for each coordinate."""
    return DimSharding(axis, tuple((found,) for found in ranges))


def repeat_per_part(cut: DimSharding, width: int, parts: int) -> DimSharding:
    """The same cut of each of `parts` that lie one behind the other, `width` apart."""
    return DimSharding(
        cut.axis,
        tuple(
            tuple(
                (part * width + start, part * width + stop) for part in range(parts) for start, stop in ranges
            )
            for ranges in cut.ranges
        ),
    )


def linear_features(module: nn.Module) -> tuple[int, int, bool] | None:
    """(output features, input features, whether its weight is transposed); None if it is not linear."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features, False
    if isinstance(module, Conv1D):
        inp, out = module.weight.shape
        return out, inp, True
    return None


def add_linear(
    draft: TPPlanBuilder, name: str, word: StyleSpec, over_col: Callable[[int], DimSharding]
) -> None:
    """A COLUMN or a ROW layer; `over_col` cuts the features that heads or the feed-forward have."""
    features = linear_features(draft.modules[name])
    if features is None:
        kind = type(draft.modules[name]).__name__
        raise ModelError(
            f"{name} is not a linear layer, and cannot be cut like one",
            given=f"{kind}, style {word.style.value if word.style else None}",
            expected="nn.Linear or transformers' Conv1D",
        )
    out, inp, transposed = features
    assert word.style in (Style.COLUMN, Style.ROW)
    is_column = word.style is Style.COLUMN
    out_cut = over_col(out) if is_column else draft.over_row(out, name)
    inp_cut = draft.over_row(inp, name) if is_column else over_col(inp)
    draft.layers[name] = LayerSharding(
        name, word.style, out_cut, inp_cut, transposed, word.gathers, word.splits, word.head
    )
    own = draft.own_parameters(name)
    for key, full in own.items():
        if key == "weight":
            draft.shard_parameter(full, (inp_cut, out_cut) if transposed else (out_cut, inp_cut))
        elif key == "bias":
            draft.shard_parameter(full, (out_cut,))
        else:
            raise ModelError(
                f"{name} has a parameter that a linear layer has not",
                given=key,
                hint=replicate_hint(name),
            )


def part_width(size: int, parts: int, name: str) -> int:
    if size % parts:
        raise PlanError(
            f"{name} does not hold {parts} parts of equal width",
            given=f"{size} features",
            hint="another number of parts",
        )
    return size // parts
