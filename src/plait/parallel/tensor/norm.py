"""A norm over features that are cut: its statistics are taken over all of them.

[Note: whose code computes a norm]
The module's own forward runs, on this rank's features and its piece of the weight. What it asks torch for
on the way that looks along the features (a mean, a variance, a norm, a whole layer norm) is answered over
all ranks of the axis; everything else is between one feature and its like. So a class of norm need not be
known to be right. What looks along the features in a way that is not known here is refused: it would
compute another function.

A statistic's gradient is a sum over the ranks too, as each used it for its features. Layer and rms norm
take one message in forward and one in backward.
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
from plait.parallel.tensor.groups import ShardedDim

# Look along features and leave their number as it is: not to be told from the shape of what comes out.
_KEEP_SHAPE = frozenset(
    (
        "softmax",
        "log_softmax",
        "softmin",
        "normalize",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "sort",
        "argsort",
        "flip",
        "roll",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "local_response_norm",
    )
)


@dataclass(frozen=True)
class ParallelNorm:
    """The forward of a norm whose features are cut. See [Note: whose code computes a norm]."""

    name: str
    forward: Callable[..., Any]
    features: ShardedDim

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _ReduceOverRanks(self.name, self.features):
            return self.forward(module, *args, **kwargs)


class _ReduceOverRanks(TorchFunctionMode):
    """Answers what looks along the features over all ranks that have some of them."""

    def __init__(self, name: str, features: ShardedDim) -> None:
        super().__init__()
        self._name = name
        self._features = features
        self._local = features.dim.sizes[features.place]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        if not self._is_cut(x):
            return func(*args, **kwargs)
        asked = getattr(func, "__name__", "").removeprefix("linalg_")
        answer = _IMPLEMENTATIONS.get(asked)
        if answer is not None:
            call = _parse_call(asked, x, args[1:], {k: v for k, v in kwargs.items() if k != "input"})
            if call is None:
                return func(*args, **kwargs)
            if call.is_understood(x):
                return answer(x, call, self._features)
            raise self._refused(asked)
        if asked in _KEEP_SHAPE:
            raise self._refused(asked)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and self._local > 1 and _lost_features(x, result):
            raise self._refused(asked)
        return result

    def _is_cut(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] == self._local

    def _refused(self, asked: str) -> ModelError:
        return ModelError(
            f"the norm {self._name} cannot be cut over {self._features.dim.axis}",
            given=f"it calls {asked} along the features, of which a rank has a part",
            expected="means, sums, variances, 2-norms over the last dim; layer_norm; rms_norm",
            hint=f"a tensor_plan that leaves {self._name} whole, or tp=C with one row",
        )


def _lost_features(x: Tensor, result: Tensor) -> bool:
    """Whether one number of all features came out."""
    kept = result.shape[:-1] == x.shape[:-1] and result.shape[-1] == 1 if result.dim() else True
    return kept or result.shape == x.shape[:-1]


# --- what is asked


@dataclass(frozen=True)
class _Call:
    """A reduction, or a whole norm. `dims` from the left; None: all."""

    dims: tuple[int, ...] | None = None
    keepdim: bool = False
    correction: float = 1
    order: float | str | None = 2
    dtype: torch.dtype | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None

    def is_understood(self, x: Tensor) -> bool:
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


def _parse_call(asked: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """The call in one form; None if it does not look along the last dim."""
    given = {**dict(zip(_SIGNATURES[asked], args, strict=False)), **kwargs}
    last = x.dim() - 1
    if "normalized_shape" in given:
        dims: tuple[int, ...] | None = tuple(range(x.dim() - len(given["normalized_shape"]), x.dim()))
    else:
        dim = given.get("dim", given.get("axis"))
        if isinstance(dim, bool):  # var(unbiased)
            given["unbiased"], dim = dim, None
        found = (dim,) if isinstance(dim, int) else None if dim is None else tuple(dim)
        dims = None if not found else tuple(d % x.dim() for d in found)
    if dims is not None and last not in dims:
        return None
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    return _Call(
        dims,
        bool(given.get("keepdim", False)),
        correction,
        given.get("p", given.get("ord", 2)),
        given.get("dtype"),
        given.get("weight"),
        given.get("bias"),
        given.get("eps"),
    )


# --- what is answered


def _sum(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    part = x.sum(-1, keepdim=call.keepdim, dtype=call.dtype)
    if not features.is_first:  # see [Note: shared pieces count once] in ops.py
        part = part * 0  # in the graph: all ranks take part in backward's sum
    return differentiable_all_reduce(part, features.group)


def _mean(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    return _sum(x, call, features) / features.whole


def _var_mean(x: Tensor, call: _Call, features: ShardedDim) -> tuple[Tensor, Tensor]:
    mean, var = _Moments.apply(x, features)
    if call.correction:
        var = var * (features.whole / (features.whole - call.correction))
    return (var, mean) if call.keepdim else (var.squeeze(-1), mean.squeeze(-1))


def _var(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    return _var_mean(x, call, features)[0]


def _std(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    return _var_mean(x, call, features)[0].sqrt()


def _norm(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    wide = x if call.dtype is None else x.to(call.dtype)
    tiny = torch.finfo(wide.dtype).tiny  # the gradient of a zero's root is not a number
    return _sum(wide * wide, call, features).clamp_min(tiny).sqrt()


def _layer_norm(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    wide = _wide(x)
    mean, var = _Moments.apply(wide, features)
    return _scaled((wide - mean) * torch.rsqrt(var + (1e-5 if call.eps is None else call.eps)), x, call)


def _rms_norm(x: Tensor, call: _Call, features: ShardedDim) -> Tensor:
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if call.eps is None else call.eps
    return _scaled(wide * torch.rsqrt(_mean(wide * wide, _Call(keepdim=True), features) + eps), x, call)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scaled(normed: Tensor, x: Tensor, call: _Call) -> Tensor:
    if call.weight is not None:
        normed = normed * call.weight
    if call.bias is not None:
        normed = normed + call.bias
    return normed.to(x.dtype)


_IMPLEMENTATIONS: dict[str, Callable[[Tensor, _Call, ShardedDim], Any]] = {
    "mean": _mean,
    "sum": _sum,
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
    "norm": _norm,
    "vector_norm": _norm,
    F.layer_norm.__name__: _layer_norm,
    F.rms_norm.__name__: _rms_norm,
}
assert _IMPLEMENTATIONS.keys() == _SIGNATURES.keys()


class _Moments(Function):
    """Mean and (biased) variance of all features, (..., 1) each, from the ranks' own: Chan's formula, which
    does not subtract large numbers from each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: ShardedDim) -> tuple[Tensor, Tensor]:
        cut, group = features.dim, features.group
        counts = [size if cut.sharers(c)[0] == c else 0 for c, size in enumerate(cut.sizes)]
        ranks = x.new_zeros(group.size, 2, *x.shape[:-1])
        own = ranks[group.rank]
        if x.shape[-1]:
            own[0] = x.mean(-1)
            own[1] = (x - own[0].unsqueeze(-1)).square_().sum(-1)
        if group.size > 1:
            all_gather(ranks.view(-1), own.view(-1), group, label="moments of features")
        mean, squares = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        for count, rank in zip(counts, ranks, strict=True):
            mean += rank[0] * (count / features.whole)
        for count, rank in zip(counts, ranks, strict=True):
            if count:
                squares += rank[1] + count * (rank[0] - mean) ** 2
        mean, var = mean.unsqueeze(-1), squares.unsqueeze(-1) / features.whole
        ctx.features = features
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmean: Tensor, dvar: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        both = all_reduce_in_place(torch.stack((dmean, dvar)), ctx.features.group, "gradient of moments")
        dx = (both[0] + 2 * both[1] * (x - mean)) / ctx.features.whole
        return dx if ctx.features.is_first else torch.zeros_like(dx), None
