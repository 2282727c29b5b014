"""The head of a language model: its last linear layer and the cross entropy of its logits in one operator,
which holds the logits of a few tokens at a time.

# T tokens, n of them with a target, c of a chunk  I hidden features  V vocabulary;
# lower case = this rank's shard: i over `row`, v over `col`

[Note: gradients in forward]
The gradients of hidden states and weight are proportional to the gradient of the loss, which is one number: a
loss scale, or what a script multiplies a loss by. (A step divides by its count in the update.) So forward
computes them for a loss gradient of one, of a chunk of tokens while its logits exist, and backward multiplies
them. That is three products, as with full logits; computing the logits again in backward would be a fourth.
Held from forward to backward are (n, i) and (v, i) numbers in the compute dtype instead of (T, v). A schedule
with k micro-batches in flight at the last stage holds k times as many.
In 16 bits, the weight's gradient is summed over chunks in float32. In fp16 small probabilities would
underflow, so forward's loss gradient is 256 and not one, divided by the largest weight of a token's loss if
that is above one, and the weight's gradient stays in float32. A sum
over a chunk's tokens would then overflow, and no smaller loss scale could prevent it, which is multiplied in
later. So hidden states are divided by their number in this product. Without a backward, as in an evaluation,
there are no gradients.

[Note: chunks of tokens]
Each chunk reads and writes the weight's gradient once more, which its product hides from some hundred tokens
on. Over the columns of `col` a chunk's largest logits and sums are reduced before its gradient: two messages
of 8 and 8 or 12 bytes a token. Reducing once for all tokens would need all logits twice, a fourth product.
In bf16 one chunk needs no sum in float32, and so has as many tokens as that has memory for.
Tokens without a target, or with weight 0, are dropped before the product, if there are more than one a row.

[Note: deferred logits]
Models return logits, some after scaling them or limiting them by tanh. In a forward whose loss is built in,
the head returns a tensor without values, which records multiplication by numbers and tanh. The loss calls the
head again, with the operator. What else is done to such a tensor, by a model's code or a hook, computes the
values, and the loss takes them as it takes those of any model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from plait.comm import Group
from plait.parallel.tensor.cross_entropy import (
    LossBuffers,
    SoftTargets,
    TokenLoss,
    new_wide,
    refuse_second_derivative,
    summed_loss,
    write_gradient,
)
from plait.parallel.tensor.functional import all_reduce_in_place
from plait.plan.memory import head_chunk

_FP16_UNIT = 256.0

# (x_Ti, weight_vi, bias_v, ranks that sum the product, ranks that sum x's gradient) -> what the head returns
HeadOperator = Callable[[Tensor, Tensor, Tensor | None, Group, Group], Tensor]


class DeferredLogits(Tensor):
    """Logits that are computed if they are needed: see [Note: deferred logits]. They are
    softcap tanh(scale z / softcap) of the head's output z, or scale z without a softcap."""

    module: nn.Module
    hidden: Tensor
    scale: float
    softcap: float | None
    _make: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: type["DeferredLogits"],
        module: nn.Module,
        hidden: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> "DeferredLogits":
        """Logits of `hidden` (..., H), the input of `module`. `make`: computes their values."""
        self: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        self.module, self.hidden, self.scale, self.softcap = module, hidden, scale, softcap
        self._make, self._value = make, None
        return self

    @property
    def is_deferred(self) -> bool:
        return self._value is None

    def value(self) -> Tensor:
        """The values, in this rank's columns."""
        if self._value is None:
            self._value = self._make()
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, cls) and first.is_deferred and not kwargs:
            changed = first._after(getattr(func, "__name__", ""), args[1:])
            if changed is not None:
                scale, softcap, dtype = changed
                make = lambda: func(first.value(), *args[1:])  # noqa: E731
                return cls(first.module, first.hidden, first.shape, dtype, make, scale, softcap)
        values, named = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*values, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the values for an operation of code below `__torch_function__`."""
        values, named = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*values, **named)

    def _after(self, name: str, others: tuple[Any, ...]) -> tuple[float, float | None, torch.dtype] | None:
        """Scale, softcap and dtype after an operation; None if it is not one of those that are recorded."""
        if name == "tanh" and not others:
            return None if self.softcap is not None else (self.scale, 1.0, self.dtype)
        if (name, others) in (("float", ()), ("to", (torch.float32,))):
            wider = torch.promote_types(self.dtype, torch.float32)
            return (self.scale, self.softcap, wider) if wider is torch.float32 else None
        if len(others) != 1 or not isinstance(others[0], int | float) or not others[0]:
            return None
        factor = float(others[0]) if name in _PRODUCTS else 1 / float(others[0])
        if name not in _PRODUCTS + _QUOTIENTS or not math.isfinite(factor):
            return None
        return self.scale * factor, None if self.softcap is None else self.softcap * factor, self.dtype


_PRODUCTS, _QUOTIENTS = ("mul", "__mul__", "__rmul__"), ("div", "__truediv__")
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_cpu")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
}


class Targets(NamedTuple):
    """Targets of the tokens whose positions are `rows_n` (None: all), and weights of their losses."""

    targets_n: Tensor
    weights_n: Tensor | None
    rows_n: Tensor | None
    soft: SoftTargets | None = None

    def of(self, rows: slice | Tensor) -> "Targets":
        """Return those of some tokens, without positions."""
        weights_n, soft = self.weights_n, self.soft
        return Targets(
            self.targets_n[rows],
            None if weights_n is None else weights_n[rows],
            None,
            None if soft is None else soft.of(rows),
        )


def head_loss(logits: DeferredLogits, targets: Targets, loss: TokenLoss) -> Tensor:
    """`cross_entropy` of deferred logits."""
    loss.check_targets(targets.targets_n)
    if targets.soft is not None:
        loss.check_targets(targets.soft.ids_TK)

    def operator(x: Tensor, weight: Tensor, bias: Tensor | None, summed: Group, summed_grad: Group) -> Tensor:
        total: Tensor = _HeadLoss.apply(
            x.flatten(0, -2), weight, bias, _Call(targets, loss, summed, summed_grad, torch.is_grad_enabled())
        )
        return total

    result: Tensor = logits.module(logits.hidden, operator)
    return result


# (logits (T, v), targets_T, loss) -> (values, T)
Statistic = Callable[[Tensor, Tensor, TokenLoss], Tensor]


def head_statistics(
    logits: DeferredLogits, targets: Targets, loss: TokenLoss, statistic: Statistic, width: int
) -> Tensor:
    """A statistic of `width` values of deferred logits."""

    def operator(x: Tensor, weight: Tensor, bias: Tensor | None, summed: Group, _: Group) -> Tensor:
        parts = [
            statistic(_product(x_ci, weight, bias, summed), own.targets_n, loss)
            for _, x_ci, own in _chunks(x.flatten(0, -2), len(weight), targets, 0)
        ]
        return torch.cat([new_wide(x, width, 0), *parts], 1)

    result: Tensor = logits.module(logits.hidden, operator)
    return result


class _Call(NamedTuple):
    """`summed`, `summed_grad`: the ranks that sum the product, and those that sum its input's gradient.
    `trains`: a backward may follow. (What needs a gradient is the same without.)"""

    targets: Targets
    loss: TokenLoss
    summed: Group
    summed_grad: Group
    trains: bool


class _HeadLoss(Function):
    """See [Note: gradients in forward]."""

    @staticmethod
    def forward(ctx: Any, x_Ti: Tensor, weight_vi: Tensor, bias_v: Tensor | None, call: _Call) -> Tensor:
        ctx.call, is_fp16 = call, x_Ti.dtype is torch.float16
        ctx.unit = _fp16_unit(call.targets.weights_n) if is_fp16 else 1.0
        needs_x, needs_weight, needs_bias = (call.trains and needed for needed in ctx.needs_input_grad[:3])
        targets, loss, total = call.targets, call.loss, new_wide(x_Ti).zero_()
        dx_ni = x_Ti.new_empty(len(targets.targets_n), x_Ti.shape[1]) if needs_x else None
        dw_vi = weight_vi.new_zeros(weight_vi.shape) if needs_weight and not len(targets.targets_n) else None
        db_v = new_wide(x_Ti, len(weight_vi)).zero_() if needs_bias else None
        sums = x_Ti.shape[1] if needs_weight and weight_vi.dtype is torch.bfloat16 else 0
        for rows, x_ci, own in _chunks(x_Ti, len(weight_vi), targets, sums, loss.buffers):
            z_cv = _product(x_ci, weight_vi, bias_v, call.summed)
            is_narrow = z_cv.dtype.itemsize == 2 and (is_fp16 or len(x_ci) < len(targets.targets_n))
            if loss.buffers is not None:
                wide_bytes = weight_vi.numel() * 4 if needs_weight and is_narrow else 0
                copied = 0 if targets.rows_n is None else x_ci.nbytes
                loss.buffers.held_bytes = z_cv.nbytes + copied + wide_bytes
            of_chunk, factor_c = summed_loss(z_cv, own.targets_n, own.weights_n, loss, own.soft)
            total += of_chunk
            if needs_x or needs_weight or needs_bias:
                of_tokens = own.targets_n, own.weights_n, factor_c, ctx.unit
                write_gradient(z_cv, *of_tokens, loss, z_cv, own.soft)
            if dx_ni is not None:
                torch.mm(z_cv, weight_vi, out=dx_ni[rows])
            if needs_weight:
                dw_vi = _added(dw_vi, z_cv, x_ci, is_wide=is_narrow)
            if db_v is not None:
                db_v += z_cv.sum(0, dtype=db_v.dtype)
            del z_cv  # before the next chunk's
        if loss.buffers is not None:
            loss.buffers.held_bytes = 0
        if dw_vi is not None and not is_fp16:
            dw_vi = dw_vi.to(weight_vi.dtype)
        ctx.num_tokens, ctx.bias_dtype = len(x_Ti), None if bias_v is None else bias_v.dtype
        ctx.weight_dtype = weight_vi.dtype
        ctx.save_for_backward(dx_ni, dw_vi, db_v, targets.rows_n)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        *saved, rows_n = ctx.saved_tensors
        dx_ni, dw_vi, db_v = (_scaled(gradient, grads[0] / ctx.unit) for gradient in saved)
        dx_Ti = dx_ni
        if dx_ni is not None:
            all_reduce_in_place(dx_ni, ctx.call.summed_grad, "gradient of features")
            if rows_n is not None:
                dx_Ti = dx_ni.new_zeros(ctx.num_tokens, dx_ni.shape[1]).index_copy_(0, rows_n, dx_ni)
        casts = zip((dw_vi, db_v), (ctx.weight_dtype, ctx.bias_dtype), strict=True)
        return dx_Ti, *(None if gradient is None else gradient.to(dtype) for gradient, dtype in casts), None


def _fp16_unit(weights_n: Tensor | None) -> Tensor | float:
    """The gradient of the loss in forward. Waits for no GPU."""
    if weights_n is None or not len(weights_n):
        return _FP16_UNIT
    return _FP16_UNIT / weights_n.abs().max().clamp(min=1.0).log2().ceil().exp2()


def _product(x_ci: Tensor, weight_vi: Tensor, bias_v: Tensor | None, summed: Group) -> Tensor:
    """A chunk's logits, (c, v)."""
    z_cv = F.linear(x_ci, weight_vi, bias_v if summed.rank == 0 else None)
    return all_reduce_in_place(z_cv, summed, "parts of a product")


def _added(sum_vi: Tensor | None, dz_cv: Tensor, x_ci: Tensor, *, is_wide: bool) -> Tensor:
    """Add the weight's gradient from a chunk; `is_wide`: in float32. See [Note: gradients in forward]."""
    if sum_vi is not None and sum_vi.dtype == dz_cv.dtype:
        return sum_vi.addmm_(dz_cv.t(), x_ci)
    ratio = 2.0 ** len(x_ci).bit_length() if dz_cv.dtype is torch.float16 else 1.0
    product_vi = dz_cv.t() @ (x_ci if ratio == 1.0 else x_ci / ratio)
    if sum_vi is not None:
        return sum_vi.add_(product_vi, alpha=ratio)
    return product_vi.float().mul_(ratio) if is_wide else product_vi


def _scaled(gradient: Tensor | None, ratio: Tensor) -> Tensor | None:
    """Multiply, in place unless the graph is kept for another backward; in float32 at least."""
    if gradient is None or gradient.is_meta:
        return gradient
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    if ratio.device.type == "cpu" and not is_kept and ratio.item() == 1.0:
        return gradient
    # With a dim: the product with a number would be rounded to the gradient's dtype first.
    return (gradient.clone() if is_kept else gradient).mul_(ratio.reshape(1))


def _chunks(
    x_Ti: Tensor, num_columns: int, targets: Targets, sum_features: int, buffers: LossBuffers | None = None
) -> Iterator[tuple[slice, Tensor, Targets]]:
    """Yield for each chunk of tokens with a target: their range among these, hidden states, targets.
    `sum_features`: of `head_chunk`."""
    device_type = buffers.device_type if buffers is not None and x_Ti.is_meta else x_Ti.device.type
    num_kept, rows_n = len(targets.targets_n), targets.rows_n
    size = head_chunk(num_kept, num_columns, on_gpu=device_type != "cpu", sum_features=sum_features)
    for start in range(0, num_kept, size or 1):
        rows = slice(start, min(start + size, num_kept))
        x_ci = x_Ti[rows] if rows_n is None else x_Ti.index_select(0, rows_n[rows])
        yield rows, x_ci, targets.of(rows)
