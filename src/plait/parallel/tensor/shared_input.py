"""Input gradients of parallel linear layers: one reduction per shared input, overlapped with weight
gradients; and re-gathering of sequence-parallel inputs in backward.

# T tokens  i this rank's input features  o this rank's output features;  t = this rank's tokens

[Note: overlap of the input-gradient reduction]
q, k and v multiply one tensor x. In backward each gives a partial gradient dx; autograd adds them, and the
sum is reduced over the group (for COLUMN layers of Megatron: over the tensor-parallel ranks). Each layer also
has a weight gradient dw to compute, which nothing waits for. Megatron overlaps the reduction with dw in the
backward of one linear layer; here one autograd node, through which all layers get x, does so for all of them:

  forward    z = node(x, w_q, w_k, w_v)        the identity on x; inputs: x and the layers' weights
             q = product(z, w_q) ...           autograd sees z alone; the weights are plain values here
  backward   product: returns dz = dq w_q; defers dw, by leaving (dq, z) with the node
             node: starts the reduction of dz; computes every deferred dw; waits for the reduction

Autograd runs the node after all products that use z, so all have deferred their dw by then. This is correct
in any order of autograd's other nodes, since the overlap happens inside one node. The weights are inputs of
the node, so their gradients reach them in the usual way: hooks run, `torch.autograd.grad` works, and a weight
that is also used elsewhere gets the sum. A frozen weight is no input. A layer that uses z twice defers twice.

The node needs the weights before the first layer runs. It takes those of the layers that shared the input
with this first layer last time. A layer that was not predicted (in the first step all but the first), or
whose weight is another tensor by now, computes dw in its own backward: the same values, without overlap. A
predicted layer that does not run defers nothing and gets no gradient here. Neither case saves other tensors
than the usual one, so recomputation need not repeat the prediction.

With a group of one there is nothing to reduce: no node is made, and layers compute dw themselves.

[Note: re-gathered inputs]
Under sequence parallelism z_T holds the tokens of all ranks, x_t those of this rank. Layers save x_t, and z_T
is gathered again in backward (Korthikanti et al. 2205.05198, section 4.2.2), once for all layers that use it:

  backward   first product: starts the all-gather of z, computes dz meanwhile
             node: starts the reduction of dz; waits for z; computes every dw; waits for dx; frees z

A layer that saved x_t depends on the node for z and for dw, also in the first step and in a copy of the model
without records of earlier steps: so regions name their layers in advance. A second region with the same input
(parallel attention and mlp) gets z through a node of its own, which computes the weight gradients that the
first node does not, before the reduction instead of overlapped with it. From the second step on the first
node computes all of them. A step and its recomputation may differ in these nodes, not in what is saved. A
layer that uses a view of z is unknown to the node, and z is saved for it.

All-gathers and reductions of one group are issued in the order of autograd's nodes, which is the same on
every rank.

[Note: shared inputs in traced graphs]
In graphs that torch.compile traces a layer does not know its module, so nothing is recorded between steps: a
node computes the weight gradients of the layers that are known when it is made. Those are all that use the
input of a pure region, but only the first one otherwise; the others compute theirs without overlap.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, Work, named_group, start_all_reduce
from plait.models.tensors import WeakTensorMap
from plait.parallel.linear_products import PlainProducts, Products
from plait.parallel.tensor.operators import define, is_traced
from plait.parallel.tensor.shards import TokenGather, TokenShards, token_dim

_REGATHERED = "a region's tokens"


class SharedInput:
    """The state of one shared input's autograd node. See [Note: overlap of the input-gradient reduction]."""

    def __init__(
        self,
        first_layer: nn.Module | None,
        scope: str,
        weights: list[Tensor],
        reduction: Group | TokenShards | None,
        regather: TokenGather | None = None,
    ) -> None:
        """`scope`: see SharedInputs. `reduction`: dz is all-reduced over this group, or reduce-scattered to
        these shards, one of which x is; None: dx is dz. `regather`: of x, if a shard of it is saved."""
        self.first_layer = (lambda: None) if first_layer is None else weakref.ref(first_layer)
        self.scope = scope
        self.reduction = reduction
        self.regather = regather
        self._weights = weights  # kept alive, so that their ids stay theirs
        self._indices = {id(weight): index for index, weight in enumerate(weights)}
        # By weight, calls of its layers: (dy, input or None for the re-gathered one, products).
        self._deferred: list[list[tuple[Tensor, Tensor | None, Products]]] = [[] for _ in weights]

    def defers(self, weight: Tensor) -> bool:
        """Return whether this node computes the gradient of `weight`."""
        return id(weight) in self._indices

    def start_regather(self, x_t: Tensor) -> None:
        """Start the all-gather of the saved input, if only this rank's tokens were saved."""
        if self.regather is not None:
            self.regather.start(x_t, _REGATHERED)

    def regather_during_product(self, x_t: Tensor, dy: Tensor, weight: Tensor, products: Products) -> Tensor:
        """`start_regather` in a graph that is traced; returns the input gradient of a layer."""
        if self.regather is None:
            return products.input_gradient(dy, weight)
        return self.regather.run_during_product(x_t, _REGATHERED, dy, weight, products)

    def defer_weight_grad(self, weight: Tensor, dy: Tensor, saved: Tensor, products: Products) -> None:
        """In backward, leave one summand of the gradient of `weight` to be computed by the node."""
        x = saved.detach() if self.regather is None else None  # detached: its graph contains the node
        self._deferred[self._indices[id(weight)]].append((dy, x, products))

    def compute_weight_grad(self, index: int) -> Tensor | None:
        """Compute and sum the deferred parts of one weight's gradient; None if there are none."""
        grad: Tensor | None = None
        deferred, self._deferred[index] = self._deferred[index], []
        for dy, x, products in deferred:
            if x is None:
                assert self.regather is not None
                x = self.regather.wait()
            part = products.weight_gradient(dy, x)
            grad = part if grad is None else grad.add_(part)
        return grad

    def apply(self, x: Tensor) -> Tensor:
        """Return z, which layers use in place of `x`."""
        z: Tensor = _SharedInputFunction.apply(x, self, *self._weights)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Compute z, without a graph."""
        return self.reduction.all_gather(x) if isinstance(self.reduction, TokenShards) else x.detach()

    def start_reduce(self, dz: Tensor) -> tuple[Tensor, Work]:
        """Return dx, valid once the Work is done."""
        if isinstance(self.reduction, TokenShards):
            return self.reduction.start_reduce_scatter(dz, "gradient of a region's tokens")
        if self.reduction is None:
            return dz, Work()
        dz = dz.contiguous()  # reduced in place: only products use z, so nothing else refers to dz
        return dz, start_all_reduce(dz, self.reduction, label="gradient of features")

    def traced_backward(self, dz: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the node's inputs, in a graph that is traced."""
        summands = [
            (index, dy, self.regather.wait() if x is None and self.regather is not None else x, products)
            for index, deferred in enumerate(self._deferred)
            for dy, x, products in deferred
            if needs[2 + index]
        ]
        self._deferred = [[] for _ in self._deferred]
        indices, dys, xs, products = zip(*summands, strict=True) if summands else ((),) * 4
        if self.reduction is None or not needs[0]:
            dx, parts = dz, [each.weight_gradient(dy, x) for _, dy, x, each in summands]
        else:
            transposed = [each.transposed for each in products]
            tokens = self.reduction if isinstance(self.reduction, TokenShards) else None
            group = self.reduction if isinstance(self.reduction, Group) else self.reduction.group
            dx, *parts = torch.ops.plait.reduced_during_products(
                dz, group.name, None if tokens is None else tokens.sizes, dys, xs, transposed
            )
        dws: list[Tensor | None] = [None] * len(self._deferred)
        for index, part in zip(indices, parts, strict=True):
            grad = dws[index]
            dws[index] = part if grad is None else grad + part
        self.end_backward()
        return dx if needs[0] else None, None, *dws

    def end_backward(self) -> None:
        """Free the re-gathered input, unless it is another node's."""
        if self.regather is not None and self.reduction is not None:
            self.regather.discard()


class _SharedInputFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedInput, *_: Tensor) -> Tensor:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return shared.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if dz is None:
            return (None,) * len(needs)
        if is_traced(dz):
            return ctx.shared.traced_backward(dz, needs)
        dx, work = ctx.shared.start_reduce(dz) if needs[0] else (None, Work())
        dws = [
            ctx.shared.compute_weight_grad(index) if need else None for index, need in enumerate(needs[2:])
        ]
        work.wait()
        ctx.shared.end_backward()
        return dx, None, *dws


@dataclass(frozen=True)
class InputView:
    """Substitute that layers use for an input tensor.

    tensor        z; None for the input itself, which this record must not keep alive
    shared_input  the node that reduces its gradient
    shard         x_t, saved for backward in place of z_T, if z_T is gathered again
    """

    tensor: Tensor | None = None
    shared_input: SharedInput | None = None
    shard: Tensor | None = None


class SharedInputs:
    """The inputs that parallel linear layers share, and which layers shared one last time.

    Keyed by tensors and modules, so copies of a model may use the same object. Layers share a node within a
    `scope` (a block) only: for a tensor that many blocks use, one node would keep all their gradients until
    the last.
    """

    def __init__(self, group: Group) -> None:
        self.group = group  # over which input gradients are reduced
        self._views: WeakTensorMap[InputView] = WeakTensorMap()
        self._sharing: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )  # by first layer

    def share(self, x: Tensor, module: nn.Module, scope: str) -> InputView:
        """Return the view of `x` that `module` uses, whose gradient is reduced over the group in backward."""
        if self.group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return InputView()
        if self._views.get(x) is None:
            weights = self.predict_weights(module, [weight_of(module)])
            shared = SharedInput(module, scope, weights, self.group)
            self._views.put(x, InputView(shared.apply(x), shared))
        return self.lookup(x, module, scope)

    def lookup(self, x: Tensor, module: nn.Module, scope: str) -> InputView:
        """Return the registered view of `x`, or an empty one; record that `module` uses it."""
        view = self._views.get(x) or InputView()
        if view.shared_input is not None and view.shared_input.scope == scope:
            self._record(view.shared_input, module)
        return view

    def join(self, z: Tensor, weights: list[Tensor]) -> Tensor:
        """Return the tensor that a further region uses for `z`, another region's output of a shared input."""
        view = self._views.get(z) or InputView()
        shared = view.shared_input
        if shared is None or all(shared.defers(weight) for weight in unique_trainable(weights)):
            return z
        # With the same first layer, so that `shared` predicts these layers next time.
        joined = SharedInput(
            shared.first_layer(), shared.scope, unique_trainable(weights), None, shared.regather
        )
        joined_z = joined.apply(z)
        self.register(joined_z, joined, view.shard)
        return joined_z

    def register(self, z: Tensor, shared: SharedInput, shard: Tensor | None) -> None:
        """Record that `z` is the output of `shared`, and `shard` this rank's tokens of it."""
        self._views.put(z, InputView(None, shared, shard))

    def predict_weights(self, first_layer: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        """Return `weights` and those of the layers that shared an input with `first_layer` last time."""
        others = [other() for other in self._sharing.get(first_layer, ())]
        return unique_trainable([*weights, *(weight_of(module) for module in others if module is not None)])

    def _record(self, shared: SharedInput, module: nn.Module) -> None:
        first_layer = shared.first_layer()
        if first_layer is None:
            return
        sharing = self._sharing.setdefault(first_layer, [])
        if all(other() is not module for other in sharing):
            sharing.append(weakref.ref(module))


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), f"a linear layer whose weight is a {type(weight).__name__}"
    return weight


def unique_trainable(weights: list[Tensor]) -> list[Tensor]:
    """Return those that require a gradient, each once."""
    return list({id(weight): weight for weight in weights if weight.requires_grad}.values())


# --- see [Note: shared inputs in traced graphs]


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
    dz: Tensor, group: str, sizes: Sequence[int] | None, *products: Any
) -> list[Tensor]:
    shape = list(dz.shape)
    if sizes is not None:
        shape[token_dim(dz)] = sizes[named_group(group).rank]
    return [dz.new_empty(shape), *_weight_gradients(*products)]


define(
    "reduced_during_products",
    "Tensor dz, str group, SymInt[]? sizes, Tensor[] dys, Tensor[] xs, bool[] transposed",
    "Tensor[]",
    _reduced_during_products,
    _reduced_during_products_shapes,
)
