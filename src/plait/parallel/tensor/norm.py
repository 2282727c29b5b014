"""Norms over sharded features: statistics are taken over the features of all ranks.

# F features;  f = this rank's

[Note: interception of reductions]
The module's own forward runs, on this rank's features and its shard of the weight. Calls to torch that reduce
over the features (a mean, a variance, a norm, a complete layer norm) are intercepted and computed over all
ranks of the axis; everything else is elementwise. So norm classes need not be known to be computed correctly.
A reduction over the features that is not implemented here is an error: on a shard it would compute another
function.

A statistic's gradient is a sum over the ranks too, since each used it for its features. Layer and RMS norm
take one collective in forward and one in backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.comm import all_gather
from plait.errors import ModelError
from plait.parallel.tensor.functional import all_reduce_in_place, differentiable_all_reduce
from plait.parallel.tensor.shards import ShardedDim

# Reduce over features without changing the shape: not detectable from the output.
_KEEP_SHAPE = {
    *(
        "softmax",
        "log_softmax",
        "softmin",
        "normalize",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
    ),
    *("sort", "argsort", "flip", "roll", "group_norm", "batch_norm", "instance_norm", "local_response_norm"),
}


@dataclass(frozen=True)
class ParallelNorm:
    """Forward of a norm over sharded features. See [Note: interception of reductions]."""

    name: str
    forward: Callable[..., Any]
    features: ShardedDim

    @torch.compiler.disable(reason="a norm over sharded features")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _ReduceOverRanks(self.name, self.features):
            return self.forward(module, *args, **kwargs)


class _ReduceOverRanks(TorchFunctionMode):
    """Mode in which reductions over the features cover all ranks that hold some of them."""

    def __init__(self, name: str, features: ShardedDim) -> None:
        super().__init__()
        self._name = name
        self._features = features
        self._local_size = features.sharding.sizes[features.coord]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not x.dim() or x.shape[-1] != self._local_size:
            return func(*args, **kwargs)
        op_name = getattr(func, "__name__", "").removeprefix("linalg_")
        implementation = _IMPLEMENTATIONS.get(op_name)
        if implementation is not None:
            call = _parse_call(op_name, x, args[1:], {k: v for k, v in kwargs.items() if k != "input"})
            if call is None:
                return func(*args, **kwargs)
            if call.is_supported(x):
                return implementation(x, call, self._features)
            raise self._unsupported(op_name)
        if op_name in _KEEP_SHAPE:
            raise self._unsupported(op_name)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and self._local_size > 1 and _reduced_features(x, result):
            raise self._unsupported(op_name)
        return result

    def _unsupported(self, op_name: str) -> ModelError:
        return ModelError(
            f"cannot shard the norm {self._name} over {self._features.sharding.axis}",
            given=f"it calls {op_name} over the features, of which each rank holds a shard",
            expected="means, sums, variances, 2-norms over the last dim; layer_norm; rms_norm",
            hint=f"a tensor_plan that replicates {self._name}, or tp=C with one row",
        )


def _reduced_features(x: Tensor, result: Tensor) -> bool:
    """Return whether `result` has one number per token, where `x` has features."""
    is_kept_dim = result.shape[:-1] == x.shape[:-1] and result.shape[-1] == 1 if result.dim() else True
    return is_kept_dim or result.shape == x.shape[:-1]


# --- intercepted calls


@dataclass(frozen=True)
class _NormCall:
    """Arguments of a reduction or norm. `dims` from the left; None: all."""

    dims: tuple[int, ...] | None = None
    keepdim: bool = False
    correction: float = 1
    order: float | str | None = 2
    dtype: torch.dtype | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None

    def is_supported(self, x: Tensor) -> bool:
        return self.dims == (x.dim() - 1,) and self.order in (None, 2, 2.0, "fro")


_SIGNATURES = {
    "mean": ("dim", "keepdim"),
    "sum": ("dim", "keepdim"),
    "var": ("dim", "unbiased", "keepdim"),
    "std": ("dim", "unbiased", "keepdim"),
    "var_mean": ("dim", "unbiased", "keepdim"),
    "norm": ("p", "dim", "keepdim"),
    "vector_norm": ("p", "dim", "keepdim"),
    "layer_norm": ("normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "rms_norm": ("normalized_shape", "weight", "eps"),
}


def _parse_call(op_name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _NormCall | None:
    """Return the call's arguments; None if it does not reduce over the last dim."""
    arguments = {**dict(zip(_SIGNATURES[op_name], args, strict=False)), **kwargs}
    if "normalized_shape" in arguments:
        dims: tuple[int, ...] | None = tuple(range(x.dim() - len(arguments["normalized_shape"]), x.dim()))
    else:
        dim = arguments.get("dim", arguments.get("axis"))
        if isinstance(dim, bool):  # var(unbiased)
            arguments["unbiased"], dim = dim, None
        signed_dims = (dim,) if isinstance(dim, int) else None if dim is None else tuple(dim)
        dims = None if not signed_dims else tuple(d % x.dim() for d in signed_dims)
    if dims is not None and x.dim() - 1 not in dims:
        return None
    correction = arguments.get("correction")
    if correction is None:
        correction = 1 if arguments.get("unbiased", True) else 0
    order = arguments.get("p", arguments.get("ord", 2))
    others = {name: arguments.get(name) for name in ("dtype", "weight", "bias", "eps")}
    return _NormCall(dims, bool(arguments.get("keepdim", False)), correction, order, **others)


# --- their implementation over all ranks


def _sum(x: Tensor, call: _NormCall, features: ShardedDim) -> Tensor:
    partial = x.sum(-1, keepdim=call.keepdim, dtype=call.dtype)
    if not features.is_first:  # see [Note: shared shards count once] in functional.py
        partial = partial * 0  # in the graph: all ranks take part in backward's all-reduce
    return differentiable_all_reduce(partial, features.group)


def _mean(x: Tensor, call: _NormCall, features: ShardedDim) -> Tensor:
    return _sum(x, call, features) / features.full_size


def _var_mean(x: Tensor, call: _NormCall, features: ShardedDim) -> tuple[Tensor, Tensor]:
    mean, var = _Moments.apply(x, features)
    if call.correction:
        var = var * (features.full_size / (features.full_size - call.correction))
    return (var, mean) if call.keepdim else (var.squeeze(-1), mean.squeeze(-1))


def _norm(x: Tensor, call: _NormCall, features: ShardedDim) -> Tensor:
    wide = x if call.dtype is None else x.to(call.dtype)
    tiny = torch.finfo(wide.dtype).tiny  # the gradient of sqrt at 0 is NaN
    return _sum(wide * wide, call, features).clamp_min(tiny).sqrt()


def _layer_norm(x: Tensor, call: _NormCall, features: ShardedDim) -> Tensor:
    wide = _wide(x)
    mean, var = _Moments.apply(wide, features)
    return _scaled((wide - mean) * torch.rsqrt(var + (1e-5 if call.eps is None else call.eps)), x, call)


def _rms_norm(x: Tensor, call: _NormCall, features: ShardedDim) -> Tensor:
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if call.eps is None else call.eps
    return _scaled(wide * torch.rsqrt(_mean(wide * wide, _NormCall(keepdim=True), features) + eps), x, call)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scaled(normed: Tensor, x: Tensor, call: _NormCall) -> Tensor:
    if call.weight is not None:
        normed = normed * call.weight
    if call.bias is not None:
        normed = normed + call.bias
    return normed.to(x.dtype)


_IMPLEMENTATIONS: dict[str, Callable[[Tensor, _NormCall, ShardedDim], Any]] = {
    "mean": _mean,
    "sum": _sum,
    "var": lambda *call: _var_mean(*call)[0],
    "std": lambda *call: _var_mean(*call)[0].sqrt(),
    "var_mean": _var_mean,
    "norm": _norm,
    "vector_norm": _norm,
    F.layer_norm.__name__: _layer_norm,
    F.rms_norm.__name__: _rms_norm,
}
assert _IMPLEMENTATIONS.keys() == _SIGNATURES.keys()


class _Moments(Function):
    """Mean and (biased) variance of all features, (..., 1) each, from those of the ranks' features, by Chan's
    formula, which avoids cancellation."""

    @staticmethod
    def forward(ctx: Any, x_f: Tensor, features: ShardedDim) -> tuple[Tensor, Tensor]:
        sharding, group = features.sharding, features.group
        counts = [size if sharding.sharers(c)[0] == c else 0 for c, size in enumerate(sharding.sizes)]
        # Of each rank: mean, sum of squared deviations.
        moments = x_f.new_zeros(group.size, 2, *x_f.shape[:-1])
        own = moments[group.rank]
        if x_f.shape[-1]:
            own[0] = x_f.mean(-1)
            own[1] = (x_f - own[0].unsqueeze(-1)).square_().sum(-1)
        if group.size > 1:
            all_gather(moments.view(-1), own.view(-1), group, label="moments of features")
        mean, squares = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        for count, rank_moments in zip(counts, moments, strict=True):
            mean += rank_moments[0] * (count / features.full_size)
        for count, rank_moments in zip(counts, moments, strict=True):
            if count:
                squares += rank_moments[1] + count * (rank_moments[0] - mean) ** 2
        mean, var = mean.unsqueeze(-1), squares.unsqueeze(-1) / features.full_size
        ctx.features = features
        ctx.save_for_backward(x_f, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmean: Tensor, dvar: Tensor) -> tuple[Tensor | None, ...]:
        x_f, mean = ctx.saved_tensors
        grads = all_reduce_in_place(torch.stack((dmean, dvar)), ctx.features.group, "gradient of moments")
        dx_f = (grads[0] + 2 * grads[1] * (x_f - mean)) / ctx.features.full_size
        return dx_f if ctx.features.is_first else torch.zeros_like(dx_f), None
