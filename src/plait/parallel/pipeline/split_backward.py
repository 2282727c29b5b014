"""Backward in halves for linear layers: the input's gradient at once, the weight's later (2401.10241, 2.1).

    halves = Halves()
    split_linears(blocks, halves)
    ...
    with halves.collecting() as queued:         # B: what the stage before waits for
        torch.autograd.backward(outputs, gradients)
    queued.run(deliver)                         # W: deliver(parameter, gradient), for each use of a parameter

  T tokens, of whatever leading dims  I in_features  O out_features

  y_TO = x_TI w_OI^T + b_O    dx_TI = dy_TO w_OI    dw_OI = dy_TO^T x_TI    db_O = sum over T of dy_TO

Between the two halves a layer's x and dy are held, and no weight: dw does not need it. All other gradients
are computed in B: norms', embeddings', those of products that are not of a linear layer's own forward.

[Note: what hooks hear of a queued gradient]
The graph does not know in forward whether its backward will be in halves. If it is, autograd finds that
there is no gradient for the parameter: `grad` is left alone, and hooks run all the same: a tensor's with
None, post-accumulate ones with what `grad` was, which may be None. What is delivered has passed no hook.

[Note: autocast]
The layer computes in the dtype that autocast would cast to, and keeps its input in it. The weight is kept as
it is, and cast again in backward: a cast copy would be memory behind the back of whoever frees weights. The
casts are not autocast's, which would remember the weight's, made without a graph, for its other readers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from plait.models import LINEAR_FORWARDS
from plait.parallel.linear_ops import flat, input_gradient, product, weight_gradient

AccumulateGrad = Callable[[Tensor, Tensor], object]


class BackwardSplitter:
    """Whether a backward is to leave the gradients of weights for later, and to whom."""

    def __init__(self) -> None:
        self.queued: DeferredWeightGrads | None = None

    @contextmanager
    def deferring(self) -> Iterator["DeferredWeightGrads"]:
        """Inside, backwards compute no gradients of split layers' weights and biases, but queue them."""
        assert self.queued is None, "a backward in halves within another"
        self.queued = DeferredWeightGrads()
        try:
            yield self.queued
        finally:
            self.queued = None


class DeferredWeightGrads:
    """What one backward has left to compute, in its order."""

    def __init__(self) -> None:
        self._uses: deque[_LinearUse | _ComputedGrad] = deque()

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, use: "_LinearUse") -> None:
        self._uses.append(use)

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """One that is computed already, to be delivered in its turn."""
        self._uses.append(_ComputedGrad(parameter, gradient))

    def parameters(self) -> list[Tensor]:
        """Those whose gradients are to come, as often as they will."""
        return [parameter for use in self._uses for parameter in use.parameters()]

    def num_bytes(self) -> int:
        """Of what is held until then, each storage once."""
        held = (tensor for use in self._uses for tensor in use.held())
        storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in held)}
        return sum(storages.values())

    @torch.no_grad()
    def run(self, deliver: AccumulateGrad) -> None:
        """Computes the gradients, each in its parameter's shape and dtype, and hands them over. A parameter
        that was used twice comes twice. What a product needs is let go when it is done."""
        while self._uses:
            self._uses.popleft().finish(deliver)


def split_linears(modules: Iterable[nn.Module], halves: BackwardSplitter) -> int:
    """Gives linear layers in (and among) the modules a forward whose backward `halves` can split; how many.

    Those whose forward is nn.Linear's or Conv1D's of transformers; layers with a forward of their own stay
    as they are. Under torch.compile nothing is split.
    """
    num_split = 0
    for module in modules:
        for layer in module.modules():
            original = _own_forward(layer)
            if isinstance(original, FunctionType) and original in _FORWARDS:
                layer.forward = MethodType(SplitLinear(halves, original, _FORWARDS[original]), layer)
                num_split += 1
    return num_split


class DeferredBytes:
    """What the second halves of backwards will hold, seen on a forward of the modules: each input's storage
    once, and a gradient for each output."""

    def __init__(self) -> None:
        self._inputs: dict[int, Tensor] = {}  # by storage
        self._output_bytes = 0

    @property
    def total(self) -> int:
        return self._output_bytes + sum(x.untyped_storage().nbytes() for x in self._inputs.values())

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        handles = [
            layer.register_forward_hook(self._called, with_kwargs=True)
            for layer in module.modules()
            if isinstance(getattr(layer.forward, "__func__", None), SplitLinear)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, _: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        given: list[Tensor] = [*args, *kwargs.values()]
        [x] = given
        self._inputs[x.untyped_storage()._cdata] = x  # which keeps it, so that no address comes twice
        self._output_bytes += output.nbytes


# Whether the weight is transposed.
_FORWARDS: dict[Any, bool] = {**dict.fromkeys(LINEAR_FORWARDS, False), Conv1D.forward: True}


def _own_forward(module: nn.Module) -> Any:
    forward: Any = module.forward
    is_own = isinstance(forward, MethodType) and forward.__self__ is module
    return forward.__func__ if is_own else None


@dataclass(frozen=True)
class SplitLinear:
    """The forward of a split layer, for `types.MethodType`: copies of the module share it."""

    halves: BackwardSplitter
    original: Callable[..., Tensor]
    transposed: bool

    def __call__(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(module, *args, **kwargs)
        [x] = (*args, *kwargs.values())
        out: Tensor = _Linear.apply(x, module.weight, module.bias, self)
        return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear) -> Tensor:
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        ctx.layer, ctx.x_dtype = layer, x.dtype
        ctx.cast = cast = _Cast.of(x.device.type)
        x = cast(x)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.weight, ctx.bias = weight if needs_weight else None, bias if needs_bias else None
        with cast.off():
            return product(x, cast(weight), None if bias is None else cast(bias), layer.transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        transposed, queued = ctx.layer.transposed, ctx.layer.halves.queued
        use = _LinearUse(dy, x, ctx.weight, ctx.bias, transposed)
        dx = None
        if weight is not None:
            dx = input_gradient(dy, ctx.cast(weight), transposed).to(ctx.x_dtype)
        if queued is None or not use.is_of_leaves:
            return dx, use.weight_gradient(), use.bias_gradient(), None
        if ctx.weight is not None or ctx.bias is not None:
            queued.add(use)
        return dx, None, None, None


@dataclass(frozen=True)
class _Cast:
    """What autocast does to a product's operands. See [Note: autocast]."""

    kind: str  # of device
    dtype: torch.dtype | None

    @classmethod
    def of(cls, kind: str) -> "_Cast":
        is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return cls(kind, torch.get_autocast_dtype(kind) if is_on else None)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Autocast leaves float64 alone."""
        return tensor if self.dtype is None or tensor.dtype is torch.float64 else tensor.to(self.dtype)

    def off(self) -> Any:
        return torch.autocast(self.kind, enabled=False) if self.dtype is not None else nullcontext()


@dataclass(frozen=True)
class _LinearUse:
    """One use of a layer in one forward, as far as its parameters' gradients need it."""

    dy: Tensor
    x: Tensor | None
    weight: Tensor | None  # those that need a gradient
    bias: Tensor | None
    transposed: bool

    @property
    def is_of_leaves(self) -> bool:
        """What was computed from parameters needs its gradient now: theirs follow from it."""
        return all(given is None or given.is_leaf for given in (self.weight, self.bias))

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in (self.bias, self.weight) if parameter is not None]

    def held(self) -> list[Tensor]:
        return [self.dy] if self.x is None else [self.dy, self.x]

    def weight_gradient(self) -> Tensor | None:
        if self.weight is None:
            return None
        assert self.x is not None, "an input that was not kept"
        return weight_gradient(self.dy, self.x, self.transposed).to(self.weight.dtype)

    def bias_gradient(self) -> Tensor | None:
        return None if self.bias is None else flat(self.dy).sum(0).to(self.bias.dtype)

    def finish(self, deliver: AccumulateGrad) -> None:
        for parameter, gradient in ((self.bias, self.bias_gradient), (self.weight, self.weight_gradient)):
            if parameter is not None:
                found = gradient()
                assert found is not None
                deliver(parameter, found)


@dataclass(frozen=True)
class _ComputedGrad:
    """A gradient of no split layer."""

    parameter: Tensor
    gradient: Tensor

    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def held(self) -> list[Tensor]:
        return [self.gradient]

    def finish(self, deliver: AccumulateGrad) -> None:
        deliver(self.parameter, self.gradient)
