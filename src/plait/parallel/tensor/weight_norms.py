"""Norms of adapted weights of which a rank has a shard: see [Note: norms of adapted weights] in
`models/sharding/weight_norms.py`.

# O out_features  I in_features  r rank of the adapter;  lower case o, i = this column's
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.sharding.weight_norms import magnified
from plait.parallel.tensor.functional import all_reduce_in_place, gather
from plait.parallel.tensor.shards import ShardedDim

Dims = tuple[ShardedDim | None, ShardedDim | None]


@dataclass(frozen=True)
class WeightNorms:
    """Forward of a module of magnitudes.

    out, inp      how the layer's weight is sharded; None: full
    of_A, of_B    how the factors are, as (r, I) and (O, r)
    transposed    the weight is stored as (i, o)
    gathers       the layer's output is gathered
    """

    out: ShardedDim | None
    inp: ShardedDim | None
    of_A: Dims
    of_B: Dims
    transposed: bool
    gathers: bool

    @torch.compiler.disable(reason="norms over the inputs of all columns")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return magnified(module, self, *args, **kwargs)

    @torch.no_grad()
    def norm(self, base_layer: nn.Module, factors: tuple[Any, Any], scaling: float) -> Tensor:
        """The norms of W + s B A over all of I: (o,), or (O,) if the output is gathered."""
        weight = base_layer.weight
        assert isinstance(weight, Tensor), "a layer with a weight"
        weight_oi = weight.T if self.transposed else weight
        if isinstance(factors[0], Tensor):  # an embedding's: (V, r) and (r, H)
            a_rI, b_Or = (factor.T for factor in factors)
        else:
            a_rI, b_Or = (factor.weight for factor in factors)
        a_ri = _sharded_like(a_rI.T, self.of_A[::-1], self.inp).T
        b_or = _sharded_like(b_Or, self.of_B, self.out)
        adapted_oi = weight_oi + (scaling * b_or @ a_ri).to(weight.dtype)
        norm_o = torch.linalg.vector_norm(adapted_oi, dim=1, dtype=_summed_dtype(weight.dtype))
        if self.inp is not None and self.inp.group.size > 1:
            norm_o = all_reduce_in_place(norm_o.square_(), self.inp.group, "norms of weights").sqrt_()
        norm_o = norm_o.to(weight.dtype)
        return gather(norm_o, self.out) if self.gathers and self.out is not None else norm_o

    def bias(self, base_layer: nn.Module) -> Tensor | None:
        bias = getattr(base_layer, "bias", None)
        return gather(bias, self.out) if bias is not None and self.gathers and self.out is not None else bias


def _summed_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _sharded_like(factor: Tensor, dims: Dims, wanted: ShardedDim | None) -> Tensor:
    """The factor with its first dim sharded as `wanted`, and the rank's full."""
    first, rank = dims
    factor = factor if rank is None else rank.all_gather(factor)
    if _sharding(first) == _sharding(wanted):
        return factor
    transposed = factor.T if first is None else first.all_gather(factor.T.contiguous())
    return (transposed if wanted is None else wanted.shard(transposed)).T


def _sharding(dim: ShardedDim | None) -> Any:
    return None if dim is None or dim.group.size == 1 else dim.sharding
