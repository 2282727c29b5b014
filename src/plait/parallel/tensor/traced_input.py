"""Shared inputs of parallel linear layers in graphs that torch.compile traces; see shared_input.py.

A layer does not know its module in a trace, so nothing is recorded between steps: a node computes the weight
gradients of the layers that are known when it is made. Those are all that use the input of a pure region, but
only the first one otherwise; the others compute theirs without overlap.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import Group, named_group, start_all_gather, start_all_reduce
from plait.models.tensors import WeakTensorMap
from plait.parallel.linear_products import PlainProducts
from plait.parallel.tensor.operators import define
from plait.parallel.tensor.shards import TokenGather, TokenShards, token_dim
from plait.parallel.tensor.shared_input import InputView, SharedInput, unique_trainable


class _TracedInputs:
    """The last inputs that traced layers share: tensors of a trace, which is over soon."""

    def __init__(self) -> None:
        self.views: WeakTensorMap[InputView] = WeakTensorMap()
        self.gathered: WeakTensorMap[Tensor] = WeakTensorMap()  # by this rank's tokens


_traced_inputs: dict[str, _TracedInputs] = defaultdict(_TracedInputs)  # by the group's name


def share_traced(x: Tensor, weight: Tensor, group: Group) -> InputView:
    """`SharedInputs.share` in a trace."""
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return InputView()
    views = _traced_inputs[group.name].views
    view = views.get(x)
    if view is None:
        shared = SharedInput(None, "", unique_trainable([weight]), group)
        view = InputView(shared.apply(x), shared)
        views.clear()
        views.put(x, view)
    return view


def lookup_traced(x: Tensor, _: Tensor, group: Group) -> InputView:
    """`SharedInputs.lookup` in a trace."""
    return _traced_inputs[group.name].views.get(x) or InputView()


@torch.compiler.allow_in_graph
def traced_full_input(x_BtH: Tensor, weights: list[Tensor], group: str, sizes: tuple[int, ...]) -> Tensor:
    """Return all tokens of a pure region's input. `weights`: those that multiply it. `sizes`: tokens of each
    rank."""
    traced, tokens = _traced_inputs[group], TokenShards(named_group(group), sizes)
    weights = unique_trainable(weights)
    if not (torch.is_grad_enabled() and x_BtH.requires_grad):
        return tokens.all_gather(x_BtH)
    x_BTH = traced.gathered.get(x_BtH)
    if x_BTH is None:
        shared = SharedInput(None, "", weights, tokens, TokenGather(tokens))
        x_BTH = shared.apply(x_BtH)
        traced.gathered.clear()
        traced.gathered.put(x_BtH, x_BTH)
    else:
        first = lookup_traced(x_BTH, x_BTH, tokens.group).shared_input
        assert first is not None, "the view of a gathered input is discarded with it"
        shared = SharedInput(None, "", weights, None, first.regather)
        x_BTH = shared.apply(x_BTH)
    traced.views.put(x_BTH, InputView(None, shared, x_BtH.detach()))
    return x_BTH


def _reduced_during_products(
    dz: Tensor,
    group: str,
    sizes: Sequence[int] | None,
    dys: list[Tensor],
    xs: list[Tensor],
    transposed: Sequence[bool],
) -> list[Tensor]:
    """Return dz reduced, and the weight gradients that are computed meanwhile. `sizes`: tokens of each rank,
    if they are reduce-scattered."""
    if sizes is not None:
        shards = TokenShards(named_group(group), tuple(sizes))
        reduced, work = shards.start_reduce_scatter(dz, "gradient of a region's tokens")
    else:
        reduced = dz.clone(memory_format=torch.contiguous_format)
        work = start_all_reduce(reduced, named_group(group), label="gradient of features")
    products = _weight_gradients(dys, xs, transposed)
    work.wait()
    return [
        reduced.clone(memory_format=torch.contiguous_format) if reduced._is_view() else reduced,
        *products,
    ]


def _weight_gradients(dys: list[Tensor], xs: list[Tensor], transposed: Sequence[bool]) -> list[Tensor]:
    calls = zip(dys, xs, transposed, strict=True)
    return [PlainProducts(stored_as_in_out).weight_gradient(dy, x) for dy, x, stored_as_in_out in calls]


def _reduced_during_products_shapes(
    dz: Tensor,
    group: str,
    sizes: Sequence[int] | None,
    dys: list[Tensor],
    xs: list[Tensor],
    transposed: Sequence[bool],
) -> list[Tensor]:
    shape = list(dz.shape)
    if sizes is not None:
        shape[token_dim(dz)] = sizes[named_group(group).rank]
    products = _weight_gradients(dys, xs, transposed)
    return [dz.new_empty(shape), *products]


define(
    "reduced_during_products",
    "Tensor dz, str group, SymInt[]? sizes, Tensor[] dys, Tensor[] xs, bool[] transposed",
    "Tensor[]",
    _reduced_during_products,
    _reduced_during_products_shapes,
)


def _all_gather_during_product(
    own: Tensor, group: str, size: int, label: str, dy: Tensor, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the gathered tensor, and the input gradient that is computed meanwhile."""
    full = own.new_empty(size * own.numel())
    work = start_all_gather(full, own.contiguous(), named_group(group), label=label)
    dx = PlainProducts(transposed).input_gradient(dy, weight)
    work.wait()
    return full, dx


def _all_gather_during_product_shapes(
    own: Tensor, _: str, size: int, __: str, dy: Tensor, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    return own.new_empty(size * own.numel()), PlainProducts(transposed).input_gradient(dy, weight)


define(
    "all_gather_during_product",
    "Tensor own, str group, int size, str label, Tensor dy, Tensor weight, bool transposed",
    "(Tensor, Tensor)",
    _all_gather_during_product,
    _all_gather_during_product_shapes,
)
