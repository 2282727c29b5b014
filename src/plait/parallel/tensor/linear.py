"""Linear layers sharded over both axes: each rank multiplies with its shard of the weight, then partial sums
are reduced.

# T tokens (of any leading dims)  I in_features  O out_features;  lower case = this rank's shard
#
#   COLUMN  y_To = sum over row (x_Ti w_oi^T) + b_o     dx_Ti = sum over col (dy_To w_oi)
#   ROW     the same with row and col swapped

The gradients of the weight shard, dw_oi = dy_To^T x_Ti, and of the bias need no reduction.

[Note: product and reduction in one operator]
Selective recompute saves the outputs of matrix products. If a partial product were saved and then summed in
place, recompute would have to multiply and reduce again. So torch sees product and reduction as one operator,
and the sum is saved.

[Note: compiled layers]
torch.compile traces a block's own code up to a layer, which is one call of `_traced_linear`. It runs the
layer's forward and backward without values, as they are; operators.py has what becomes of their collectives.
A layer that splits its input, gathers its output or multiplies in float8 runs uncompiled, between two graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, named_group
from plait.parallel.linear_products import (
    NOT_TRACED,
    PlainProducts,
    Products,
    autocast_dtype,
    bias_gradient,
    products_named,
)
from plait.parallel.tensor.functional import (
    UsedFeatures,
    all_reduce_in_place,
    copy_ranges_to_group,
    gather,
    split,
)
from plait.parallel.tensor.head import DeferredLogits, HeadOperator
from plait.parallel.tensor.operators import define, is_traced
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.shards import ShardedDim, TokenShards, token_dim
from plait.parallel.tensor.shared_input import (
    InputView,
    SharedInput,
    SharedInputs,
    lookup_traced,
    share_traced,
    weight_of,
)
from plait.plan.sharding import Range


@dataclass
class HeadOutput:
    """Output mode of the head.

    loss     of the model's outputs, inside of its forward, where ZeRO has gathered the weights. With it, the
             head returns this rank's columns of the logits, deferred if it `defers`; else all logits
    result   of `loss`
    """

    loss: Callable[[Any], Any] | None = None
    defers: bool = True
    result: Any = None

    def watch(self, model: nn.Module) -> None:
        """Compute the loss at the end of the model's forward. Copies of the model do as well, with this."""
        model.register_forward_hook(self._call_loss)  # a method: a model can be saved by torch.save

    def _call_loss(self, _: nn.Module, __: Any, outputs: Any) -> None:
        if self.loss is not None:
            self.result = self.loss(outputs)

    def __deepcopy__(self, _: Any) -> "HeadOutput":
        return self

    @contextmanager
    def calling(self, loss: Callable[[Any], Any] | None) -> Iterator[None]:
        """Call this loss in a forward inside the context."""
        self.loss = loss
        try:
            yield
        finally:
            self.loss, self.result = None, None

    def full(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call the head without deferring its logits."""
        before, self.defers = self.defers, False
        try:
            logits: Tensor = module(x)
            return logits
        finally:
            self.defers = before


@dataclass(frozen=True)
class ParallelLinear:
    """Forward of a sharded linear layer, for `types.MethodType`: its first argument is the module.

    products            computes this rank's products
    reduce_group        ranks whose partial outputs are summed
    shared_inputs       tracks the layers that share an input; reduces the input's gradient over its group
    scope               the block that contains the layer; see SharedInputs
    input_is_gathered   a sequence-parallel region made the input and reduces its gradient
    split_input         the input is full: this rank takes its features of it
    gather_output       the output is all-gathered, unless `head` keeps it sharded
    sequence_shard      the output is reduce-scattered over tokens instead of all-reduced (sequence parallel)
    used_output         the features that this rank reads of the output, if not its own
    summed              ranges of the output that each rank uses differently: see `LayerSharding`
    """

    products: Products
    reduce_group: Group
    shared_inputs: SharedInputs
    scope: str = ""
    input_is_gathered: bool = False
    split_input: ShardedDim | None = None
    gather_output: ShardedDim | None = None
    head: HeadOutput | None = None
    sequence_shard: SequenceShard | None = None
    used_output: UsedFeatures | None = None
    summed: tuple[Range, ...] = ()

    def __call__(self, module: nn.Module, x: Tensor, operator: HeadOperator | None = None) -> Tensor:
        if operator is not None:
            groups = self.reduce_group, self.shared_inputs.group
            return operator(*self._operands(module, x), *groups)
        if (
            self.head is not None
            and self.head.loss is not None
            and self.head.defers
            and not _has_hooks(module)
        ):
            weight, make = weight_of(module), partial(self.head.full, module, x)
            dtype = autocast_dtype(x.device.type) or x.dtype
            return DeferredLogits(module, x, (*x.shape[:-1], len(weight)), dtype, make)
        num_sequences = None if self.sequence_shard is None else self.sequence_shard.num_flattened(x)
        if num_sequences is None:
            return self._output(module, x)
        return self._output(module, x.unflatten(0, (num_sequences, -1))).flatten(0, 1)

    def _output(self, module: nn.Module, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self._full_output(module, x)
        if not isinstance(self.products, PlainProducts):
            return self._uncompiled_float8_output(module, x)
        if self.split_input or self.gather_output or self.used_output or self.summed:
            return self._uncompiled_output(module, x)
        tokens = None if self.sequence_shard is None else self.sequence_shard.shards_of_full(x)
        sizes = None if tokens is None else tokens.sizes
        options = (self.reduce_group.name, self.shared_inputs.group.name, self.input_is_gathered)
        bias = getattr(module, "bias", None)
        return _traced_linear(x, weight_of(module), bias, *options, self.products.transposed, sizes)

    def _full_output(self, module: nn.Module, x: Tensor) -> Tensor:
        y = copy_ranges_to_group(self.sharded_output(module, x), self.summed, self.reduce_group)
        if self.used_output is not None:
            return self.used_output(y)
        if self.gather_output is None or (self.head is not None and self.head.loss is not None):
            return y
        return gather(y, self.gather_output)

    _uncompiled_output = torch.compiler.disable(
        _full_output, reason="a layer that splits its input or gathers or shares its output"
    )
    _uncompiled_float8_output = torch.compiler.disable(_full_output, reason=NOT_TRACED)

    def sharded_output(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return this rank's features of the output, (..., o)."""
        x, weight, bias = self._operands(module, x)
        lookup = self.shared_inputs.lookup if self.input_is_gathered else self.shared_inputs.share
        view = lookup(x, module, self.scope)
        tokens = None if self.sequence_shard is None else self.sequence_shard.shards_of_full(x)
        call = _LinearCall(self.products, self.reduce_group, view.shared_input, weight, tokens)
        return call.run(x, bias, view)

    def _operands(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's features of the input, its shard of the weight, and the bias."""
        if self.split_input is not None:
            x = split(x, self.split_input)
        return _autocast(x, weight_of(module), getattr(module, "bias", None))


def _has_hooks(module: nn.Module) -> bool:
    """True if hooks of others than plait read or change the module's inputs, outputs or their gradients."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    of_backward = module._backward_hooks or module._backward_pre_hooks
    return bool(of_backward) or not all(str(hook.__module__).startswith("plait.") for hook in hooks)


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = autocast_dtype(x.device.type)
    if dtype is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@torch.compiler.allow_in_graph
def _traced_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reduce_group: str,
    input_group: str,
    input_is_gathered: bool,
    transposed: bool,
    sizes: tuple[int, ...] | None,
) -> Tensor:
    """The layer's output in a graph that is traced. `sizes`: tokens of each rank, if sharded. See [Note:
    compiled layers]."""
    x, weight, bias = _autocast(x, weight, bias)
    group, products = named_group(reduce_group), PlainProducts(transposed)
    view = (lookup_traced if input_is_gathered else share_traced)(x, weight, named_group(input_group))
    tokens = None if sizes is None else TokenShards(group, sizes)
    return _LinearCall(products, group, view.shared_input, weight, tokens).run(x, bias, view)


@dataclass(frozen=True)
class _LinearCall:
    """The arguments of one call that are not differentiated. `tokens`: shards of the output's tokens."""

    products: Products
    reduce_group: Group
    shared_input: SharedInput | None
    weight: Tensor
    tokens: TokenShards | None

    @property
    def defers_weight_grad(self) -> bool:
        """True if the shared input's node computes the weight's gradient."""
        return self.shared_input is not None and self.shared_input.defers(self.weight)

    def run(self, x: Tensor, bias: Tensor | None, view: InputView) -> Tensor:
        x = x if view.tensor is None else view.tensor
        if self.defers_weight_grad:
            return _LinearFunction.apply(x, None, bias, view.shard, self)
        return _LinearFunction.apply(x, self.weight, bias, None, self)


class _LinearFunction(Function):
    """Multiply, reduce the partial sums, add the bias once. The weight's gradient is computed here or
    deferred to the shared input: see shared_input.py."""

    @staticmethod
    def forward(
        ctx: Any,
        x_Ti: Tensor,
        _: Tensor | None,
        bias_o: Tensor | None,
        x_ti: Tensor | None,
        call: _LinearCall,
    ) -> Tensor:
        weight_oi = call.weight
        needs_x = ctx.needs_input_grad[0]
        ctx.call = call
        saved = x_Ti if x_ti is None else x_ti  # see [Note: re-gathered inputs] in shared_input.py
        ctx.save_for_backward(saved if weight_oi.requires_grad else None, weight_oi if needs_x else None)
        bias_once_o = bias_o if call.reduce_group.rank == 0 else None
        if call.reduce_group.size == 1:
            return call.products.output(x_Ti, weight_oi, bias_once_o)
        group, sizes = call.reduce_group.name, None if call.tokens is None else call.tokens.sizes
        return torch.ops.plait.summed_product(
            x_Ti, weight_oi, bias_once_o, *call.products.names, group, sizes
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight_oi = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad
        # False in a backward that does not run the shared input's node: it would compute no gradient.
        defers = saved is not None and call.defers_weight_grad
        defers = defers and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        overlaps_in_graph = defers and is_traced(dy)
        if defers and not overlaps_in_graph:
            call.shared_input.start_regather(saved)
        db_o = bias_gradient(dy) if needs[2] else None  # over this rank's tokens
        dy = call.products.output_gradient(dy, call.tokens)
        if overlaps_in_graph:
            dx_Ti = call.shared_input.regather_during_product(saved, dy, weight_oi, call.products)
        else:
            dx_Ti = call.products.input_gradient(dy, weight_oi) if needs[0] else None
        if defers:
            call.shared_input.defer_weight_grad(call.weight, dy, saved, call.products)
        dw_oi = call.products.weight_gradient(dy, saved) if needs[1] else None
        return dx_Ti, dw_oi, db_o, None, None


def _summed_product(
    x_Ti: Tensor,
    weight_oi: Tensor,
    bias_o: Tensor | None,
    recipe: str,
    transposed: bool,
    inp: str,
    out: str,
    group: str,
    sizes: Sequence[int] | None,
) -> Tensor:
    """Multiply and sum over the ranks; with the tokens of each rank, return this rank's tokens of the sum.
    See [Note: product and reduction in one operator], and `products_named` for the names."""
    partial_To = products_named(recipe, transposed, inp, out).output(x_Ti, weight_oi, bias_o)
    if sizes is None:
        return all_reduce_in_place(partial_To, named_group(group), "parts of a product")
    own = TokenShards(named_group(group), tuple(sizes)).reduce_scatter(partial_To)
    return own.contiguous()  # as `_summed_product_shape` says: a shorter rank's tokens are a part of a buffer


def _summed_product_shape(x_Ti: Tensor, weight_oi: Tensor, *others: Any) -> Tensor:
    _bias, _recipe, transposed, _inp, _out, group, sizes = others
    leading = list(x_Ti.shape[:-1])
    if sizes is not None:
        leading[token_dim(x_Ti)] = sizes[named_group(group).rank]
    return x_Ti.new_empty(*leading, weight_oi.shape[1 if transposed else 0])


define(
    "summed_product",
    "Tensor x, Tensor weight, Tensor? bias, str recipe, bool transposed, str inp, str out, str group, "
    "SymInt[]? sizes",
    "Tensor",
    _summed_product,
    _summed_product_shape,
)
