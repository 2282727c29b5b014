"""Magnitudes of DoRA next to sharded layers: what they multiply, and peft's forward with a norm of our own.

# O out_features  I in_features  r rank of the adapter

[Note: norms of adapted weights]
DoRA (Liu et al. 2402.09353, section 4) multiplies each output of W + s B A with a magnitude, divided by the
norm of that row of O over I. The norm has no gradient (section 4.3). peft's forward computes it by reading
the weight of the layer, and calls the adapter's layers with an identity. On a column both would be another
function: a norm over the inputs that the column has, and sums over columns of an identity. So a module of
magnitudes has a forward of ours, which calls layers with the input alone, and gets norms from
`parallel/tensor/weight_norms.py`. A magnitude is sharded like the outputs of its layer: over columns next to
a COLUMN layer, unless that gathers its output, and replicated next to others. Its gradient is what the run on
meta shows. An embedding's norm is over the vocabulary, for each of its features.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.plan.axes import FEATURES
from plait.plan.sharding import LayerSharding, Style

_PEFT = ("peft.tuners.lora.dora", ("DoraLinearLayer", "DoraEmbeddingLayer"))
_MAGNITUDES = ".lora_magnitude_vector."


def base_of(name: str) -> str:
    """The path of the layer that a module of magnitudes belongs to."""
    return f"{name.partition(_MAGNITUDES)[0]}.base_layer"


def factors_of(name: str, *, is_embedding: bool) -> tuple[str, str]:
    """The names of A and B of the adapter that a module of magnitudes belongs to."""
    layer, _, adapter = name.partition(_MAGNITUDES)
    if is_embedding:
        return f"{layer}.lora_embedding_A.{adapter}", f"{layer}.lora_embedding_B.{adapter}"
    return f"{layer}.lora_A.{adapter}.weight", f"{layer}.lora_B.{adapter}.weight"


def magnitudes(builder: TPPlanBuilder) -> Iterator[str]:
    """Yield the modules of magnitudes of a model of peft."""
    for name, module in builder.modules.items():
        kind = type(module)
        if kind.__module__ == _PEFT[0] and kind.__name__ in _PEFT[1] and _MAGNITUDES in name:
            yield name


def add_weight_norms(builder: TPPlanBuilder) -> None:
    """Add the modules of magnitudes, sharded like their layers: [Note: norms of adapted weights]."""
    for name in magnitudes(builder):
        base = builder.layers.get(base_of(name), LayerSharding(base_of(name), Style.REPLICATE))
        out = base.out if base.style is Style.COLUMN and not base.gathers else None
        if out is not None and out.axis == FEATURES and base.uses is None:
            builder.shard_parameter(f"{name}.weight", (out,))
        features = linear_features(builder.modules[base.module])
        transposed = features is None or features[2]
        builder.layers[name] = LayerSharding(
            name, Style.WEIGHT_NORM, base.out, base.inp, transposed, base.gathers
        )


class Norms(Protocol):
    """Norms and biases for a module of magnitudes: `WeightNorms`, or `NormsOnMeta` in a run there."""

    def norm(self, base_layer: nn.Module, factors: tuple[Any, Any], scaling: float) -> Tensor: ...

    def bias(self, base_layer: nn.Module) -> Tensor | None: ...


class NormsOnMeta:
    """Norms without values or a size: of the same state on all columns, and without a gradient."""

    def norm(self, base_layer: nn.Module, *_: Any) -> Tensor:
        weight = base_layer.weight
        assert isinstance(weight, Tensor), "a layer with a weight"
        return weight.new_empty(())

    def bias(self, base_layer: nn.Module) -> Tensor | None:
        return getattr(base_layer, "bias", None)


class GatheredNormsOnMeta(NormsOnMeta):
    """The same next to a layer that gathers its output: the bias, which is sharded, has no state here."""

    def bias(self, base_layer: nn.Module) -> Tensor | None:
        bias = getattr(base_layer, "bias", None)
        return None if bias is None else torch.empty_like(bias)


def magnified(
    module: Any,
    norms: Norms,
    x: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: Tensor | None = None,
    embed_fn: Any = None,
    **_: Any,
) -> Any:
    """The forward of a module of magnitudes, with peft's arguments and results. Without `base_result` the
    adapter drops out inputs, which the layer then gets, too."""
    scale = module.weight / norms.norm(base_layer, (lora_A, lora_B), scaling)
    if embed_fn is not None:
        return scale, scale * (embed_fn(x, lora_A) @ lora_B) * scaling
    base = base_layer(x) if base_result is None else base_result
    if (bias := norms.bias(base_layer)) is not None:
        base = base - bias
    return (scale - 1) * base + scale * lora_B(lora_A(x)) * scaling
