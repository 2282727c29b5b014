"""A linear layer cut over both axes: each rank multiplies with its piece of the weight, and parts are summed.

  B batch  T tokens  I in_features  O out_features;  lower case = this rank's piece

  COLUMN  y_To = sum over row (x_Ti w_oi^T) + b_o     dx_Ti = sum over col (dy_To w_oi)
  ROW     the same with row and col swapped

The weight's gradient is whole on this rank: dw_oi = dy_To^T x_Ti. So is the bias's.

[Note: a product and its sum are one operator]
Selective recompute keeps what products give. A part that is kept, and then summed in place, would have to
be computed and summed again. So a product with its sum is one operator to torch, and what is kept is the
sum. An operator's arguments are tensors and numbers; what else it needs waits for it under a number, from
its call to its end.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group
from plait.parallel.linear_ops import flat, input_gradient, product, weight_gradient
from plait.parallel.tensor.functional import gather_features, split_features, all_reduce_in_place
from plait.parallel.tensor.groups import ShardedDim
from plait.parallel.tensor.sequence import SequenceShard, all_gather_tokens, reduce_scatter_tokens
from plait.parallel.tensor.shared_input import SharedInput, SharedInputs, weight_of


@dataclass
class HeadOutput:
    """Whether logits stay cut over the vocabulary just now."""

    stays_cut: bool = False


@dataclass(frozen=True)
class ParallelLinear:
    """The forward of a cut linear layer, for `types.MethodType`: it is given the module.

    parts       the ranks whose products are summed
    readers     of its input, whose gradient they sum
    scope       the block it is in; see Readers
    is_given    whoever gives the input sums its gradient (sequence parallel)
    transposed  the weight is (in, out)
    splits      the input is whole, this rank takes its features of it
    gathers     the output is gathered, unless the `head` says otherwise
    tokens      the sum leaves this rank's tokens only (sequence parallel)
    """

    parts: Group
    readers: SharedInputs
    scope: str = ""
    is_given: bool = False
    transposed: bool = False
    splits: ShardedDim | None = None
    gathers: ShardedDim | None = None
    head: HeadOutput | None = None
    tokens: SequenceShard | None = None

    @torch.compiler.disable
    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        sequences = None if self.tokens is None else self.tokens.sequences_of(x)
        if sequences is None:
            y = self.product(module, x)
        else:
            y = self.product(module, x.unflatten(0, (sequences, -1))).flatten(0, 1)
        if self.gathers is None or (self.head is not None and self.head.stays_cut):
            return y
        return gather_features(y, self.gathers)

    def product(self, module: nn.Module, x: Tensor) -> Tensor:
        """This rank's features of the output."""
        if self.splits is not None:
            x = split_features(x, self.splits)
        weight, bias = weight_of(module), getattr(module, "bias", None)
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        read = self.readers.find if self.is_given else self.readers.read
        source = read(x, module, self.scope)
        sizes = None if self.tokens is None else self.tokens.sizes_within(x)
        job = _LinearCall(self.parts, self.transposed, source.reading, weight, self.tokens, sizes)
        x = x if source.tensor is None else source.tensor
        if job.is_expected:
            return _LinearFunction.apply(x, None, bias, source.piece, job)
        return _LinearFunction.apply(x, weight, bias, None, job)


@dataclass(frozen=True)
class _LinearCall:
    parts: Group
    transposed: bool
    reading: SharedInput | None
    weight: Tensor
    tokens: SequenceShard | None
    sizes: tuple[int, ...] | None

    @property
    def is_expected(self) -> bool:
        """Whether the reading computes the weight's gradient."""
        return self.reading is not None and self.reading.expects(self.weight)

    def read_again(self, kept: Tensor, reader: Any) -> Callable[[], Tensor] | None:
        """In backward: what was read, for the reading to compute with; None where it does not compute.

        `reader`: the reading's node, which this backward may end above.
        """
        reading = self.reading
        if reading is None or not self.is_expected or not torch._C._will_engine_execute_node(reader):
            return None
        if reading.again is None:
            kept = kept.detach()  # its graph is the reading's own
            return lambda: kept
        reading.again.begin(kept)
        return reading.again.whole

    def sum(self, part: Tensor) -> Tensor:
        """Of all ranks' parts, in the part that is given; or this rank's tokens of it."""
        if self.tokens is None:
            return all_reduce_in_place(part, self.parts, "parts of a product")
        assert self.sizes is not None
        return reduce_scatter_tokens(part, self.tokens.group, self.sizes)


class _LinearFunction(Function):
    """The product, the sum of the parts, the bias once. See readers.py for who computes the weight's
    gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _: Tensor | None, bias: Tensor | None, piece: Tensor | None, job: _LinearCall
    ) -> Tensor:
        given = job.weight
        needs_x = ctx.needs_input_grad[0]
        ctx.job = job
        kept = x if piece is None else piece  # see [Note: what is gathered is not kept] in readers.py
        ctx.save_for_backward(kept if given.requires_grad else None, given if needs_x else None)
        added = bias if job.parts.rank == 0 else None
        if job.parts.size == 1:
            return product(x, given, added, job.transposed)
        return _product_then_reduce(x, given, added, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, given = ctx.saved_tensors
        job, needs = ctx.job, ctx.needs_input_grad
        x = None if kept is None else job.read_again(kept, ctx.next_functions[0][0])
        db = flat(dy).sum(0) if needs[2] else None  # of this rank's tokens
        if job.tokens is not None:
            dy = all_gather_tokens(dy, job.tokens.group, job.sizes)
        dx = input_gradient(dy, given, job.transposed) if needs[0] else None
        if x is not None:
            job.reading.leave(job.weight, lambda: weight_gradient(dy, x(), job.transposed))
        dw = weight_gradient(dy, kept, job.transposed) if needs[1] else None
        return dx, dw, db, None, None


def _product_then_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, job: "_LinearCall") -> Tensor:
    """See [Note: a product and its sum are one operator]."""
    number = next(_call_ids)
    _reductions[number] = job.sum
    try:
        out: Tensor = torch.ops.plait.summed_product(x, weight, bias, job.transposed, number)
    finally:
        _reductions.pop(number)
    return out


def _summed_product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, number: int) -> Tensor:
    return _reductions[number](product(x, weight, bias, transposed))


# Operators take numbers and tensors only: a sum is here from just before its operator's call to just after.
_call_ids = itertools.count()
_reductions: dict[int, Callable[[Tensor], Tensor]] = {}
_operators = torch.library.Library("plait", "FRAGMENT")
_operators.define(
    "summed_product(Tensor x, Tensor weight, Tensor? bias, bool transposed, int number) -> Tensor"
)
_operators.impl("summed_product", _summed_product, "CompositeExplicitAutograd")
