"""Split backward of linear layers: the input's gradient first, the weight's later (2401.10241, section 2.1).

    splitter = BackwardSplitter()
    split_linears(blocks, splitter)
    ...
    with splitter.deferring() as deferred:      # B: the gradient that the previous stage waits for
        torch.autograd.backward(outputs, gradients)
    deferred.run(accumulate_grad)               # W: calls accumulate_grad(parameter, gradient)

# T tokens (of any leading dims)  I in_features  O out_features
#
#   y_TO = x_TI w_OI^T + b_O    dx_TI = dy_TO w_OI    dw_OI = dy_TO^T x_TI    db_O = sum over T of dy_TO

Between B and W a layer's x and dy are held, but no weight: dw does not need it. All other gradients are
computed in B: those of norms and embeddings, and of products outside of a linear layer's own forward.

[Note: hooks and deferred gradients]
The graph does not know in forward whether its backward will be split. If it is, autograd gets no gradient for
the parameter: `grad` is left unchanged, and hooks still run: a tensor's with None, post-accumulate ones with
the former `grad`, which may be None. Deferred gradients pass no hook.

[Note: gradients that products add]
On a CPU a product, deferred or not, whose dtype is that of the unit's gradients adds to these itself, and
autograd gets no gradient: a pass that writes one, and another that reads and adds it, are saved. Not in bf16
and fp16, whose products torch's CPU kernels do not add to float32.

[Note: autocast]
The layer computes in the dtype that autocast would cast to, and saves its input in it. It saves the weight in
its own dtype and casts it again in backward: a cast copy would survive when ZeRO frees the weight. The casts
bypass autocast's cache, which would hand the weight's copy, made without a graph, to other users of the
weight. With create_graph, the weight's gradient cannot be differentiated by an input of which a cast was
saved, so that its own backward is an error.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.models import linear_forwards
from plait.parallel.linear_products import (
    Float8Forward,
    Operand,
    PlainProducts,
    Products,
    autocast_dtype,
    bias_gradient,
)
from plait.parallel.zero.grad_buffer import AddGradient
from plait.parallel.zero.parameter import has_hooks, owner_of

AccumulateGrad = Callable[[Tensor, Tensor | AddGradient], object]  # (parameter, gradient)


class BackwardSplitter:
    """Switch between full backwards of split layers and ones that defer weight gradients to `deferred`.
    `sends_first`: stages whose full backwards run in halves, too, see executor.py [Note: gradients that are
    sent first]."""

    def __init__(self, sends_first: Set[int] = frozenset()) -> None:
        self.sends_first = sends_first
        self.deferred: DeferredWeightGrads | None = None

    @contextmanager
    def deferring(self) -> Iterator["DeferredWeightGrads"]:
        """Defer the gradients of split layers' weights and biases in backwards inside the context."""
        assert self.deferred is None, "a split backward within another"
        self.deferred = DeferredWeightGrads()
        try:
            yield self.deferred
        finally:
            self.deferred = None


class DeferredWeightGrads:
    """Weight gradients that one backward has deferred, in its order."""

    def __init__(self) -> None:
        # Parameters, and what to compute their gradients from: `compute(*operands)`.
        self._grads: deque[tuple[Tensor, Callable[..., Tensor | AddGradient], tuple[Any, ...]]] = deque()

    def add(self, parameter: Tensor, compute: Callable[..., Tensor | AddGradient], *operands: Any) -> None:
        self._grads.append((parameter, compute, operands))

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """Queue a gradient that is computed already."""
        self.add(parameter, Tensor.detach, gradient)

    def parameters(self) -> list[Tensor]:
        """Return the parameters in order, once for each gradient."""
        return [parameter for parameter, _, _ in self._grads]

    def num_bytes(self) -> int:
        """Return the bytes held until `run`, each storage once."""
        operands = (operand for _, _, operands in self._grads for operand in operands)
        storages = [tensor.untyped_storage() for operand in operands for tensor in _tensors(operand)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    @torch.no_grad()
    def run(self, accumulate_grad: AccumulateGrad) -> None:
        """Compute the gradients, each in its parameter's shape and dtype, and pass them on. A parameter that
        was used twice gets two. Inputs of each product are freed after it."""
        while self._grads:
            parameter, compute, operands = self._grads.popleft()
            gradient = compute(*operands)
            accumulate_grad(
                parameter, gradient.to(parameter.dtype) if isinstance(gradient, Tensor) else gradient
            )


def split_linears(modules: Iterable[nn.Module], splitter: BackwardSplitter) -> int:
    """Give linear layers in (and among) the modules a forward whose backward `splitter` can split.

    Returns their number. Covers layers whose forward is nn.Linear's, that of transformers' Conv1D or one in
    float8; layers with other forwards are unchanged. Under torch.compile nothing is split.
    """
    num_split, forwards = 0, linear_forwards()
    for module in modules:
        for layer in module.modules():
            original = _own_forward(layer)
            if isinstance(original, FunctionType) and original in forwards:
                products: Products = PlainProducts(forwards[original])
            elif isinstance(original, Float8Forward):
                products = original.products
            else:
                continue
            layer.forward = MethodType(SplitLinear(splitter, original, products), layer)
            num_split += 1
    return num_split


class DeferredBytes:
    """Estimate of the bytes that deferred weight gradients will hold, from one forward of the modules: each
    input's storage once, and a gradient for each output."""

    def __init__(self) -> None:
        self._inputs: dict[int, Tensor] = {}  # by storage
        self._output_bytes = 0

    @property
    def total(self) -> int:
        return self._output_bytes + sum(x.untyped_storage().nbytes() for x in self._inputs.values())

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record the split layers that run inside the context."""
        handles = [
            layer.register_forward_hook(self._record, with_kwargs=True)
            for layer in module.modules()
            if isinstance(getattr(layer.forward, "__func__", None), SplitLinear)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        inputs: list[Tensor] = [*args, *kwargs.values()]
        [x] = inputs
        self._inputs[x.untyped_storage()._cdata] = x  # keeps it alive, so that no address is used twice
        held = _tensors(layer.forward.__func__.products.output_gradient(output))
        held += [] if layer.bias is None else [output]  # a bias's gradient is computed from dy as it is
        self._output_bytes += sum({t.untyped_storage()._cdata: t.nbytes for t in held}.values())


def _tensors(operand: Operand) -> list[Tensor]:
    """The tensors that an operand of a product consists of."""
    parts = operand if isinstance(operand, tuple) else (operand,)
    return [part for part in parts if isinstance(part, Tensor)]


def _own_forward(module: nn.Module) -> Any:
    forward: Any = module.forward
    is_own = isinstance(forward, MethodType) and forward.__self__ is module
    return forward.__func__ if is_own else None


@dataclass(frozen=True)
class SplitLinear:
    """Forward of a split layer, for `types.MethodType`: copies of the module share it."""

    splitter: BackwardSplitter
    original: Callable[..., Tensor]
    products: Products

    def __call__(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(module, *args, **kwargs)
        [x] = (*args, *kwargs.values())
        out: Tensor = _Linear.apply(x, module.weight, module.bias, self)
        return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, w_OI: Tensor, b_O: Tensor | None, layer: SplitLinear) -> Tensor:
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        ctx.layer, ctx.x_dtype = layer, x_TI.dtype
        ctx.cast = cast = _autocast(x_TI.device.type, autocast_dtype(x_TI.device.type))
        x_TI = cast(x_TI)
        ctx.save_for_backward(x_TI if needs_weight else None, w_OI if needs_x else None)
        ctx.weight, ctx.bias = w_OI if needs_weight else None, b_O if needs_bias else None
        with cast.disabled():
            return layer.products.output(x_TI, cast(w_OI), None if b_O is None else cast(b_O))

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph, operators of torch have derivatives.
        is_refused = torch.is_grad_enabled() and not isinstance(ctx.layer.products, PlainProducts)
        return once_differentiable(_gradients)(ctx, dy_TO) if is_refused else _gradients(ctx, dy_TO)


def _gradients(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
    x_TI, w_OI = ctx.saved_tensors
    weight, bias, products = ctx.weight, ctx.bias, ctx.layer.products
    adds = _adds_product(ctx, dy_TO, x_TI)
    dx_TI, dw_OI, operand_TO = None, None, products.output_gradient(dy_TO)
    if w_OI is not None:
        dx_TI = products.input_gradient(operand_TO, ctx.cast(w_OI)).to(ctx.x_dtype)
    deferred = None if torch.is_grad_enabled() else ctx.layer.splitter.deferred
    if deferred is None or not (_may_wait(ctx, 1, weight) and _may_wait(ctx, 2, bias)):
        if weight is not None and not (adds and _added_product(ctx, dy_TO, x_TI)):
            dw_OI = products.weight_gradient(operand_TO, x_TI).to(weight.dtype)
            if torch.is_grad_enabled() and x_TI.dtype != ctx.x_dtype:
                dw_OI = torch._C._functions.DelayedError(_CAST, 1)(dw_OI)
        db_O = None if bias is None else bias_gradient(dy_TO).to(bias.dtype)
        return dx_TI, dw_OI, db_O, None
    if bias is not None:
        deferred.add(bias, bias_gradient, dy_TO)
    if weight is not None:
        deferred.add(weight, products.weight_product if adds else products.weight_gradient, operand_TO, x_TI)
    return dx_TI, None, None, None


_CAST = b"a weight's gradient under autocast has no derivative in layers of pipelines: use precision=fp32"


def _adds_product(ctx: Any, dy_TO: Tensor, x_TI: Tensor) -> bool:
    """Return whether the product can add: see [Note: gradients that products add]."""
    is_plain = isinstance(ctx.layer.products, PlainProducts) and not torch.is_grad_enabled()
    if ctx.weight is None or not (is_plain and dy_TO.is_cpu and dy_TO.dtype == x_TI.dtype):
        return False
    unit = owner_of(ctx.weight)[0]
    of_unit = unit is not None and unit.context.grad_buffer_dtype == dy_TO.dtype
    return of_unit and _may_wait(ctx, 1, ctx.weight)


def _added_product(ctx: Any, dy_TO: Tensor, x_TI: Tensor) -> bool:
    """Add the product to the weight's gradient, if the unit takes it. See `FlatParam.add_product`."""
    found: bool = owner_of(ctx.weight)[0].add_product(
        ctx.weight, ctx.layer.products.weight_product(dy_TO, x_TI)
    )
    return found


def _may_wait(ctx: Any, number: int, tensor: Tensor | None) -> bool:
    """Return whether the gradient of an input of the function is for its `grad`, and neither a hook nor what
    the tensor was computed from needs it now. A backward within this one, and `torch.autograd.grad`, may ask
    for other gradients only, or for this one as a result."""
    if tensor is None:
        return True
    if not tensor.is_leaf or has_hooks(tensor):
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[number][0]))
    except RuntimeError:  # of a leaf whose gradient is a result
        return False


@dataclass(frozen=True)
class _Autocast:
    """The casts that autocast applies to a product's operands. See [Note: autocast]."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Cast a tensor, unless it is float64, which autocast does not cast."""
        return tensor if self.dtype is None or tensor.dtype is torch.float64 else tensor.to(self.dtype)

    def disabled(self) -> Any:
        return torch.autocast(self.device_type, enabled=False) if self.dtype is not None else nullcontext()


_autocast = cache(_Autocast)  # a few, and one is needed in each call
