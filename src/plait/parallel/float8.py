"""Choice of the linear layers that multiply in float8.

[Note: layers in float8]
The linear layers of the blocks; not the head, embeddings and other layers outside, as usual for float8. The
kernels need multiples of 16: a layer with a dim, or a rank's shard of a dim, that is no multiple stays in
bf16. A layer that multiplies a rank's tokens only, under sequence parallelism, stays in bf16 too: the scales
of its input are not known there. All ranks choose alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MethodType

import torch
from torch import nn

from plait.comm import Group
from plait.errors import PlanError
from plait.models import linear_forwards
from plait.parallel.linear_products import (
    FLOAT8_MULTIPLE,
    RECIPES,
    Float8Forward,
    Float8Input,
    Float8Products,
    PlainProducts,
    Products,
    ScalingRecipe,
)
from plait.plan import Plan
from plait.plan.sharding import LayerSharding, Style, TPPlan

MIN_CAPABILITY = (8, 9)  # of NVIDIA's GPUs with float8 products: Ada and Hopper


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of the blocks: the names of the layers in float8, and why others are not."""

    names: frozenset[str] = frozenset()
    others: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def select(cls, blocks: Sequence[tuple[str, nn.Module]], tensor: TPPlan, plan: Plan) -> "Float8Layers":
        """See [Note: layers in float8]. Raises PlanError if no layer is left."""
        reasons = {
            name: _reason_against(name, layer, transposed, tensor, plan)
            for name, (layer, transposed) in _linear_layers(blocks).items()
        }
        others = {name: reason for name, reason in reasons.items() if reason}
        if len(others) == len(reasons):
            raise PlanError(
                "no linear layer of the blocks can multiply in float8",
                given=f"precision={plan.precision}; "
                + next((f"{name}: {reason}" for name, reason in others.items()), "no block has one"),
                expected=f"nn.Linear in blocks, with multiples of {FLOAT8_MULTIPLE} features on every rank",
                hint="precision=bf16",
            )
        return cls(frozenset(reasons.keys() - others.keys()), others)


@dataclass(frozen=True)
class LayerProducts:
    """The products of each layer: in float8 for `layers`, by `recipe`."""

    layers: Float8Layers = field(default_factory=Float8Layers)
    recipe: ScalingRecipe | None = None

    @classmethod
    def build(cls, plan: Plan, layers: Float8Layers) -> "LayerProducts":
        return cls(layers, RECIPES.get(plan.precision))

    def of(self, name: str, transposed: bool, inp: Group, out: Group) -> Products:
        """Return the products of a layer whose weight is sharded over these groups."""
        if self.recipe is None or name not in self.layers.names:
            return PlainProducts(transposed)
        return Float8Products(self.recipe, transposed, inp, out)

    def input_cast(self, names: Sequence[str], inp: Group) -> Float8Input | None:
        """Return how these layers take one input, whose features are sharded over `inp`; None: as it is, at
        least one of them."""
        if self.recipe is None or not names or not self.layers.names.issuperset(names):
            return None
        return Float8Input.build(self.recipe, inp)

    def any_of(self, names: Sequence[str]) -> bool:
        """Return whether one of these layers multiplies in float8."""
        return self.recipe is not None and not self.layers.names.isdisjoint(names)

    def convert(self, model: nn.Module, tensor: TPPlan | None = None) -> None:
        """Change the forwards of the layers that `tensor` does not shard, before it is applied."""
        if self.recipe is None:
            return
        layers = () if tensor is None else tensor.layers
        sharded = {layer.module for layer in layers if _is_sharded(layer)}
        for name, (layer, transposed) in _linear_layers([("", model)]).items():
            if name in self.layers.names - sharded:
                layer.forward = MethodType(_unsharded_forward(self.recipe, transposed), layer)


PLAIN = LayerProducts()


@cache
def _unsharded_forward(recipe: ScalingRecipe, transposed: bool) -> Float8Forward:
    """One object for all layers: torch.compile takes two modules to be alike only if their forwards are."""
    return Float8Forward(Float8Products(recipe, transposed))


def check_device(plan: Plan, device: torch.device) -> None:
    """Raise PlanError for a GPU without products of NVIDIA's float8 formats."""
    if not plan.is_float8 or device.type != "cuda" or not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY or torch.version.hip:
        raise PlanError(
            "this GPU has no float8 products",
            given=f"precision={plan.precision} on {torch.cuda.get_device_name(device)}, "
            f"compute capability {major}.{minor}",
            expected="an NVIDIA GPU with compute capability {}.{} or higher".format(*MIN_CAPABILITY),
            hint="precision=bf16",
        )


def _linear_layers(blocks: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[nn.Module, bool]]:
    """Linear layers in the blocks by name, and whether their weights are transposed."""
    forwards = linear_forwards()
    return {
        name: (module, forwards[module.forward.__func__])
        for prefix, block in blocks
        for name, module in block.named_modules(prefix=prefix, remove_duplicate=False)
        if getattr(module.forward, "__func__", None) in forwards
    }


def _is_sharded(layer: LayerSharding) -> bool:
    return layer.style in (Style.COLUMN, Style.ROW)


def _reason_against(name: str, module: nn.Module, transposed: bool, tensor: TPPlan, plan: Plan) -> str:
    """Return why a layer stays in bf16, or an empty string."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    out, inp = weight.shape[::-1] if transposed else weight.shape
    if out % FLOAT8_MULTIPLE or inp % FLOAT8_MULTIPLE:
        return f"{inp} to {out} features, which are not multiples of {FLOAT8_MULTIPLE}"
    sharding = next((layer for layer in tensor.layers if layer.module == name and _is_sharded(layer)), None)
    if sharding is None:
        is_in_region = any(name == region or name.startswith(f"{region}.") for region in tensor.regions)
        return "its input is sharded over tokens" if plan.sp and not is_in_region else ""
    for dim in (sharding.inp, sharding.out):
        if dim is not None and any(size % FLOAT8_MULTIPLE or not size for size in dim.sizes):
            return f"shards of {' and '.join(map(str, sorted({*dim.sizes})))} features"
    return ""
