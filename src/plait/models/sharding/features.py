"""Features of sharded layers in the tensors that are computed from them: rules of torch's operators.

[Note: units]
A dim that holds features is (outer, units, inner), flattened: the units may be distributed over columns, any
number of neighbours to each, and nothing else may. The output of a layer has one unit per feature. A view
(B, T, heads, width) has one per head, since a shard of fewer features would no longer fill the dims after it.
(B, heads, T, width) flattened to (B heads, T, width) has them in the middle: outer = B. Where two tensors
meet, such as keys of few heads that are repeated for many queries, their shards have to have the same
borders: the greatest common divisor of their units.

A rule returns the features of an operator's result if every column can compute its shard of the result from
its shards of the arguments, and with the same code. Otherwise it returns None: the code needs all features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.models.tensors import tensors_in

_ATEN = torch.ops.aten
BLANK = frozenset({_ATEN.new_empty, _ATEN.new_zeros, _ATEN.empty, _ATEN.zeros})  # memory without values

# A layer, and the number of equal parts that its output has been divided into (packed queries, keys, values).
Source = tuple[str, int]
FeaturesOf = Callable[[Tensor], "Features | None"]


@dataclass(frozen=True)
class Features:
    """The features in dim `dim` of a tensor; see [Note: units]. `sources`: the layers they were output by."""

    sources: frozenset[Source]
    dim: int
    units: int
    outer: int = 1

    def shard(self, shape: Sequence[int], cols: int) -> tuple[int, ...]:
        """The first column's shape of a tensor of this shape."""
        own = -(-self.units // cols)
        return (*shape[: self.dim], shape[self.dim] // self.units * own, *shape[self.dim + 1 :])


Placed = tuple[Sequence[int], "Features | None"]  # the shape of a tensor, and its features


def joined(placed: Sequence[Placed], shape: Sequence[int]) -> Features | None:
    """The features of a result of `shape` with which tensors are broadcast, and computed element by element.
    A tensor without features has to be the same for all of them."""
    moved = [replace(f, dim=f.dim + len(shape) - len(of)) for of, f in placed if f is not None]
    if not moved or len({(features.dim, features.outer) for features in moved}) > 1:
        return None
    from_last = moved[0].dim - len(shape)
    for of, features in placed:
        size = of[from_last] if len(of) >= -from_last else 1
        if size != (1 if features is None else shape[from_last]):
            return None
    return _union(moved)


def copied(base: Tensor, target: Tensor, source: Tensor, features_of: FeaturesOf) -> Features | None:
    """The features of memory without values, `base`, into a view of which a tensor is copied."""
    features, present = features_of(source), features_of(base)
    if base.ndim != target.ndim:
        return None
    placed: list[Placed] = [(expandable_shape(source) if features is None else source.shape, features)]
    placed += [] if present is None else [(target.shape, present)]
    found = joined(placed, target.shape)
    is_all = found is not None and all(
        of(base)[found.dim] == of(target)[found.dim] for of in (Tensor.size, Tensor.stride)
    )
    return found if is_all else None


def expandable_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that a tensor has before it is expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(size if stride else 1 for size, stride in sizes)


def _union(found: Sequence[Features]) -> Features:
    """Features in the same place, with borders where all of them may have one."""
    sources = frozenset[Source]().union(*(features.sources for features in found))
    return replace(found[0], sources=sources, units=math.gcd(*(features.units for features in found)))


def regrouped(features: Features, before: Sequence[int], after: Sequence[int]) -> Features | None:
    """The features of a view of another shape: of dims that are joined, or split into several."""
    dim = features.dim
    outside = math.prod(before[:dim]) * features.outer
    unit = math.prod(before[dim:]) // (features.outer * features.units)  # elements
    places = [math.prod(after[:index]) for index in range(len(after))]
    index = next((i for i, place in enumerate(places) if place <= outside < place * after[i]), None)
    if index is None or outside % places[index] or after[index] % (outside // places[index]):
        return None
    outer, length, element = outside // places[index], after[index], math.prod(after[index + 1 :])
    if unit % element and element % unit:
        return None
    units = features.units if unit % element == 0 else length // outer
    return replace(features, dim=index, outer=outer, units=units)


def split_into(features: Features, size: int, parts: int) -> Features | None:
    """The features of one of `parts` equal slices along their dim: of layers that pack as many layers."""
    is_undivided = features.outer == 1 and all(count == 1 for _, count in features.sources)
    if not is_undivided or size % parts or features.units % parts:
        return None
    sources = frozenset((name, parts) for name, _ in features.sources)
    return replace(features, sources=sources, units=features.units // parts)


# --- operators

Followed = list[tuple[Tensor, Features]]


def follow(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, features_of: FeaturesOf
) -> Followed | None:
    """Return the tensors of an operator's result that have features, and these; None if it needs all of
    them. `features_of` at least one argument is not None."""
    name = str(func).split(".")[1]
    is_pointwise = torch.Tag.pointwise in func.tags
    rule = _RULES.get(name) or (_pointwise if is_pointwise else None)
    followed = None if rule is None else rule(_OperatorCall(name, args, kwargs, result, features_of))
    given = [features for tensor in tensors_in((args, kwargs)) if (features := features_of(tensor))]
    sources = _names(*given)  # a rule may overlook what has others
    return None if followed is None or any(_names(f) != sources for _, f in followed) else followed


def _names(*found: Features) -> set[str]:
    return {name for features in found for name, _ in features.sources}


@dataclass(frozen=True)
class _OperatorCall:
    """A call of an operator."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    features_of: FeaturesOf

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def placed(self, tensors: Sequence[Tensor]) -> list[Placed]:
        """The tensors without features have size 1 where they are expanded."""
        found = [(tensor, self.features_of(tensor)) for tensor in tensors]
        return [(expandable_shape(t) if features is None else t.shape, features) for t, features in found]

    def results(self, features: Features | None) -> Followed | None:
        """All results, with these features."""
        if features is None:
            return None
        tensors = [self.result] if isinstance(self.result, Tensor) else self.result
        return [(tensor, features) for tensor in tensors]


def _pointwise(call: _OperatorCall) -> Followed | None:
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    if not isinstance(call.result, Tensor):
        return None
    return call.results(joined(call.placed(tensors), call.result.shape))


def _cat(call: _OperatorCall) -> Followed | None:
    tensors, ndim = call.args[0], call.result.ndim
    dim, placed = call.arg(1, "dim", 0) % ndim, call.placed(tensors)
    if call.name == "stack":
        found = joined(placed, tensors[0].shape)
        return call.results(None if found is None else replace(found, dim=found.dim + (dim <= found.dim)))
    if any(features is not None and features.dim == dim for _, features in placed):
        return None

    def of_any_length(shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:dim], 1, *shape[dim + 1 :])

    placed = [(of_any_length(shape), features) for shape, features in placed]
    return call.results(joined(placed, of_any_length(call.result.shape)))


def _bmm(call: _OperatorCall) -> Followed | None:
    """Products of the matrices of a batch, with the features in the batch's dim, or as in `_mm`."""
    first, second = call.args[:2]
    rows, columns = (call.features_of(each) for each in (first, second))
    if columns is None and rows is not None and rows.dim == 1:
        return call.results(rows)
    if rows is None and columns is not None and columns.dim == 2:
        return call.results(columns)
    placed = [(shape[:1], f) for shape, f in call.placed([first, second]) if f is not None and f.dim == 0]
    return call.results(joined(placed, first.shape[:1])) if len(placed) == 2 else None


def _gather(call: _OperatorCall) -> Followed | None:
    """Elements at the same places for all features, or at those that each feature has."""
    first, dim, index = call.args[0], call.args[1] % call.args[0].ndim, call.args[2]
    features, [(shape, of_index)] = call.features_of(first), call.placed([index])
    if of_index is not None and of_index.dim == dim:
        return call.results(of_index) if features is None else None
    if of_index is not None:
        size = first.shape[of_index.dim]
        is_of_each = features == of_index and size == index.shape[of_index.dim]
        is_of_all = features is None and expandable_shape(first)[of_index.dim] == 1
        return call.results(of_index) if is_of_each or is_of_all else None
    if features is None or features.dim == dim or of_index is not None or shape[features.dim] != 1:
        return None
    return call.results(features)


def _mm(call: _OperatorCall) -> Followed | None:
    """A product in which the features are rows of the first matrix, or columns of the second."""
    first, second = (call.features_of(each) for each in call.args[:2])
    if first is not None and second is None and first.dim == 0:
        return call.results(first)
    return call.results(second) if first is None and second is not None and second.dim == 1 else None


def _addmm(call: _OperatorCall) -> Followed | None:
    """A product as in `_mm`, and a bias."""
    bias, first, second = call.args[:3]
    product = _mm(replace(call, args=(first, second)))
    if product is None:
        return None
    [(_, features)] = product
    placed = [*call.placed([bias]), (call.result.shape, features)]
    return call.results(joined(placed, call.result.shape))


def _scatter(call: _OperatorCall) -> Followed | None:
    """Elements that are put at places along another dim."""
    first, dim, *others = call.args
    tensors = [first, *(other for other in others if isinstance(other, Tensor))]
    found = {call.features_of(tensor) for tensor in tensors}
    features = next(iter(found))
    if len(found) > 1 or features is None or features.dim == dim % first.ndim:
        return None
    same = {tensor.shape[features.dim] for tensor in tensors}
    return call.results(features) if len(same) == 1 else None


def _lookup(call: _OperatorCall) -> Followed | None:
    """Rows of a table, at places that have features."""
    table, index = call.args[:2]
    features = call.features_of(index)
    return call.results(features) if call.features_of(table) is None else None


def _index(call: _OperatorCall) -> Followed | None:
    """Elements of a table, at places with features in dims that are neighbours; or all features of some."""
    table, indices = call.args
    given = [index for index in indices if index is not None]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if dims != [*range(dims[0], dims[0] + len(dims))] or any(index.dtype == torch.bool for index in given):
        return None
    of_table, shape = call.features_of(table), torch.broadcast_shapes(*(index.shape for index in given))
    if of_table is None:
        found = joined(call.placed(given), shape)
        return call.results(None if found is None else replace(found, dim=found.dim + dims[0]))
    if of_table.dim in dims or any(call.features_of(index) is not None for index in given):
        return None
    moved = 0 if of_table.dim < dims[0] else len(shape) - len(dims)
    return call.results(replace(of_table, dim=of_table.dim + moved))


def _masked(call: _OperatorCall) -> Followed | None:
    """A number that is put where a mask is true."""
    first, indices, value = call.args[:3]
    mask = indices[0]
    is_mask = len(indices) == 1 and mask.dtype == torch.bool and mask.shape == first.shape
    is_same = is_mask and value.ndim == 0 and call.features_of(first) == call.features_of(mask)
    return call.results(call.features_of(first)) if is_same else None


def _depthwise(call: _OperatorCall) -> Followed | None:
    """The convolution of each channel of (B, channels, T) with weights of its own, and a bias."""
    given, groups = call.args[:3], call.arg(8, "groups")
    found = [f for _, f in call.placed([each for each in given if each is not None]) if f is not None]
    is_of_each = given[0].shape[1] == given[1].shape[0] == groups and given[0].ndim == given[1].ndim
    places = [(f.dim, f.outer) for f in found]
    if not is_of_each or len(found) < sum(each is not None for each in given) or places[0] != (1, 1):
        return None
    if any(place != (0, 1) for place in places[1:]):
        return None
    return call.results(_union(found))


def _attention(call: _OperatorCall) -> Followed | None:
    """torch's attention of (B, heads, T, width): a head of keys is used by its queries' heads alone."""
    tensors = call.args[:3]
    found = [f for _, f in call.placed(tensors) if f is not None and (f.dim, f.outer) == (1, 1)]
    queries, keys, values = (tensor.shape[1] for tensor in tensors)
    others = [value for value in (*call.args[3:], *call.kwargs.values()) if isinstance(value, Tensor)]
    if len(found) < 3 or queries % keys or keys != values:
        return None
    if any(other.ndim > 2 and other.shape[-3] != 1 for other in others):
        return None
    both = _union(found)
    return [(tensor, both) for tensor in call.result if tensor.ndim > 2]


def _norm(call: _OperatorCall) -> Followed | None:
    """Norms over the last dims, with weights as large as these."""
    first, shape = call.args[:2]
    features = call.features_of(first)
    if features is None or features.dim >= first.ndim - len(shape):
        return None
    return [(tensor, features) for tensor in call.result if tensor.ndim == first.ndim]


# Operators whose first argument alone has features: the features of the result.


def _view(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    return regrouped(features, tensor.shape, call.result.shape)


def _expand(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    return replace(features, dim=features.dim + call.result.ndim - tensor.ndim)


def _permute(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    order = [*range(tensor.ndim)]
    if call.name == "permute":
        order = [dim % tensor.ndim for dim in call.args[1]]
    else:
        one, other = (dim % tensor.ndim for dim in ((0, 1) if call.name == "t" else call.args[1:3]))
        order[one], order[other] = other, one
    return replace(features, dim=order.index(features.dim))


def _unsqueeze(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    dim = call.args[1] % (tensor.ndim + 1)
    return replace(features, dim=features.dim + (dim <= features.dim))


def _slice(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    dim, start, step = call.arg(1, "dim", 0) % tensor.ndim, call.arg(2, "start") or 0, call.arg(4, "step", 1)
    size, length = tensor.shape[dim], call.result.shape[dim]
    if dim != features.dim or length == size:
        return features
    if step != 1 or not length or size % length or start % length:
        return None
    return split_into(features, size, size // length)


def _split(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    if call.arg(2, "dim", 0) % tensor.ndim != features.dim:
        return features
    sizes = {part.shape[features.dim] for part in call.result}
    return split_into(features, tensor.shape[features.dim], len(call.result)) if len(sizes) == 1 else None


def _select(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Also `unbind`: removes a dim."""
    dim = call.arg(1, "dim", 0) % tensor.ndim
    return None if dim == features.dim else replace(features, dim=features.dim - (dim < features.dim))


def _along(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Functions of a dim or several, which are kept or removed."""
    dims = call.arg(2 if call.name == "linalg_vector_norm" else 1, "dim")
    if dims is None or dims == []:
        return None
    dims = {dim % tensor.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    if features.dim in dims:
        return None
    first = call.result if isinstance(call.result, Tensor) else call.result[0]
    removed = sum(dim < features.dim for dim in dims) if first.ndim < tensor.ndim else 0
    return replace(features, dim=features.dim - removed)


def _repeated(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Copies along any dim: of all features, one after the other, in theirs."""
    dim = features.dim + call.result.ndim - tensor.ndim
    return replace(features, dim=dim, outer=features.outer * call.args[1][dim])


def _padded(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Tensors with more elements along the last dims."""
    return features if features.dim < tensor.ndim - len(call.args[1]) // 2 else None


def _sorted(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Elements in another order along a dim, or some of them, or sums of those before."""
    places = {"topk": 2, "sort": 1, "argsort": 1, "roll": 2}
    dims = call.arg(places[call.name], "dim" if call.name != "roll" else "dims", -1)
    dims = [dims] if isinstance(dims, int) else dims
    return None if not dims or features.dim in {dim % tensor.ndim for dim in dims} else features


def _as_complex(call: _OperatorCall, tensor: Tensor, features: Features) -> Features | None:
    """Views of pairs in the last dim as complex numbers, and back."""
    return features if features.dim < max(tensor.ndim, call.result.ndim) - 1 else None


def _of_first(
    rule: Callable[[_OperatorCall, Tensor, Features], Features | None],
) -> Callable[[_OperatorCall], Followed | None]:
    def follow_first(call: _OperatorCall) -> Followed | None:
        first, *others = call.args
        features = call.features_of(first) if isinstance(first, Tensor) else None
        if features is None or any(isinstance(other, Tensor) for other in others):
            return None
        return call.results(rule(call, first, features))

    return follow_first


_RULES: Mapping[str, Callable[[_OperatorCall], Followed | None]] = {
    **dict.fromkeys(("clone", "_to_copy", "alias", "detach", "polar"), _pointwise),
    **dict.fromkeys(("cat", "stack"), _cat),
    "bmm": _bmm,
    "gather": _gather,
    "mm": _mm,
    "addmm": _addmm,
    "embedding": _lookup,
    "index": _index,
    "index_put_": _masked,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), _scatter),
    "convolution": _depthwise,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    **{
        name: _of_first(rule)
        for names, rule in {
            ("view", "_unsafe_view", "_reshape_alias"): _view,
            ("expand",): _expand,
            ("permute", "transpose", "t"): _permute,
            ("unsqueeze",): _unsqueeze,
            ("slice",): _slice,
            ("split", "split_with_sizes"): _split,
            ("select", "unbind"): _select,
            ("view_as_complex", "view_as_real"): _as_complex,
            ("constant_pad_nd",): _padded,
            ("repeat",): _repeated,
            ("topk", "sort", "argsort", "roll"): _sorted,
            (
                "_softmax",
                "_safe_softmax",
                "_log_softmax",
                "sum",
                "mean",
                "amax",
                "max",
                "min",
                "logsumexp",
                "linalg_vector_norm",
                "cumsum",
                "squeeze",
                "argmax",
                "amin",
                "any",
                "all",
                "prod",
                "var",
                "std",
            ): _along,
        }.items()
        for name in names
    },
}
