"""The state of a tensor plan while it is built: the shardings of layers and parameters decided so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait.errors import ModelError, PlanError
from plait.models.sharding.styles import StyleSpec, replicate_hint
from plait.models.task import pretrained_base
from plait.models.transformers_types import is_conv1d
from plait.plan.axes import HIDDEN
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
    """See `TPPlan` for what is collected. `specs`: declared styles, by name; `blocks`: the blocks' names;
    `needs_all_features`: layers of a derived plan whose outputs the model's code may use in full; `wrappers`:
    modules that have given their style to a layer in them; `heads`: layers that output the logits, if these
    are sharded."""

    model: nn.Module
    rows: int
    cols: int
    blocks: tuple[str, ...]
    specs: dict[str, StyleSpec]
    layers: dict[str, LayerSharding] = field(default_factory=dict)
    parameters: dict[str, ParamSharding] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    arguments: list[ArgumentSharding] = field(default_factory=list)
    needs_all_features: set[str] = field(default_factory=set)
    wrappers: set[str] = field(default_factory=set)
    heads: set[str] = field(default_factory=set)
    modules: dict[str, nn.Module] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    pretrained: Any = field(init=False)  # the model of transformers, which may be wrapped; None for another
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self.pretrained = pretrained_base(self.model)
        self.modules = dict(self.model.named_modules())
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self._names = {id(p): name for name, p in self.model.named_parameters()}

    @property
    def config(self) -> Any:
        """The text configuration of a transformers model; None for another model."""
        return None if self.pretrained is None else self.pretrained.config.get_text_config()

    def own_parameters(self, module: str) -> dict[str, str]:
        """Map the module's direct parameters, by their name in it, to their full names in the model."""
        own = self.model.get_submodule(module).named_parameters(recurse=False)  # also by a second name
        return {key: self._names[id(parameter)] for key, parameter in own}

    def shard_parameter(
        self, name: str, dims: Sequence[DimSharding | None], *, partial: bool = False
    ) -> None:
        sharding = ParamSharding(name, tuple(dims), partial)
        if self.parameters.setdefault(name, sharding) != sharding:
            raise ModelError(
                f"two layers share the parameter {name}, which the tensor plan shards in two ways",
                given=f"shape {self.shapes[name]}",
                expected="one sharding of a shared parameter",
                hint="tensor_plan= with one style for both, or 'replicate', or tp=1",
            )

    def shard_over_row(self, size: int, of: str) -> DimSharding:
        """Shard the residual stream's features, or a like width, over `row`."""
        return one_range_each(HIDDEN, split_width(size, self.rows, of=f"the features of {of}"))

    def ancestors(self, name: str) -> list[str]:
        """The modules that contain this one, nearest first, without the model."""
        parts = name.split(".")
        return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]

    def block_of(self, name: str) -> str | None:
        return next((block for block in self.blocks if name == block or name.startswith(f"{block}.")), None)

    def region_of(self, name: str) -> str | None:
        """The child of a block that is, or contains, this module or parameter; None outside of blocks."""
        block = self.block_of(name)
        if block is None:
            return None
        inner = [path for path in (*self.ancestors(name)[::-1], name) if path.startswith(f"{block}.")]
        modules = (path for path in inner if path in self.modules)
        return next((path for path in modules if not isinstance(self.modules[path], CONTAINERS)), None)

    def inside(self, region: str) -> list[str]:
        return [name for name in self.modules if name == region or name.startswith(f"{region}.")]

    def spec_of(self, name: str) -> StyleSpec:
        return self.specs.get(name, StyleSpec())

    def style_of(self, name: str) -> Style | None:
        return self.layers[name].style if name in self.layers else None

    def unsharded(self, module: str) -> list[str]:
        """The module's direct parameters, by their name in it, that are not sharded."""
        return [key for key, name in self.own_parameters(module).items() if name not in self.parameters]

    def is_norm(self, name: str) -> bool:
        """Return whether the module is a norm, by its class name."""
        return "norm" in type(self.modules[name]).__name__.lower()


def one_range_each(axis: str, ranges: Sequence[Range]) -> DimSharding:
    """Return a sharding with one range for each coordinate."""
    return DimSharding(axis, tuple((coord_range,) for coord_range in ranges))


def concatenated(parts: Sequence[tuple[DimSharding, int]]) -> DimSharding:
    """Return the sharding of a dim that concatenates parts, each with its own sharding and width."""
    ranges: list[tuple[Range, ...]] = []
    first = 0
    for sharding, width in parts:
        moved = [tuple((first + start, first + stop) for start, stop in own) for own in sharding.ranges]
        ranges = [before + own for before, own in zip(ranges, moved, strict=True)] if ranges else moved
        first += width
    return DimSharding(parts[0][0].axis, tuple(ranges))


def linear_features(module: nn.Module) -> tuple[int, int, bool] | None:
    """(output features, input features, whether its weight is transposed); None if it is not linear,
    or if its weight is computed from other parameters (weight_norm)."""
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        sizes = module.out_features, module.in_features
        shape = tuple(module.weight.shape)
        return (*(shape if shape == sizes[::-1] else sizes), False)  # peft swaps those of a tied head
    if is_conv1d(module):
        inp, out = module.weight.shape
        return out, inp, True
    return None


def add_linear(
    builder: TPPlanBuilder, name: str, spec: StyleSpec, over_col: Callable[[int], DimSharding]
) -> None:
    """Add a COLUMN or a ROW layer; `over_col` shards the features of heads or of the feed-forward."""
    features = linear_features(builder.modules[name])
    if features is None:
        raise ModelError(
            f"{name} is not a linear layer, and cannot be sharded like one",
            given=f"{type(builder.modules[name]).__name__}, style {spec.style.value if spec.style else None}",
            expected="nn.Linear or transformers' Conv1D",
            hint=replicate_hint(name),
        )
    out_features, in_features, transposed = features
    assert spec.style in (Style.COLUMN, Style.ROW)
    is_column = spec.style is Style.COLUMN
    out = over_col(out_features) if is_column else builder.shard_over_row(out_features, name)
    inp = builder.shard_over_row(in_features, name) if is_column else over_col(in_features)
    summed = ((0, out_features),) if spec.is_inner and builder.cols > 1 else ()
    builder.layers[name] = LayerSharding(
        name, spec.style, out, inp, transposed, spec.gathers, spec.splits, spec.head, summed
    )
    for key, full_name in builder.own_parameters(name).items():
        if key == "weight":
            builder.shard_parameter(full_name, (inp, out) if transposed else (out, inp))
        elif key == "bias":
            builder.shard_parameter(full_name, (out,))
        else:
            raise ModelError(
                f"{name} has a parameter that linear layers do not have",
                given=key,
                expected="weight and bias",
                hint=replicate_hint(name),
            )


def part_width(size: int, parts: int, name: str) -> int:
    """The width of each part of a packed dim. Raises PlanError if the parts are not equal."""
    if size % parts:
        raise PlanError(
            f"{name} does not pack {parts} parts of equal width",
            given=f"{size} features",
            expected=f"a multiple of {parts}",
            hint="another number of parts",
        )
    return size // parts
