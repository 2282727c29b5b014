"""Forward and backward products of a linear layer: in the dtype of its operands, or in float8.

The weight is (out, in), or (in, out) if `transposed`. Products in float8 (2209.05433) are scaled dynamically:
no state is kept between steps.

# T tokens (of any leading dims)  I in_features  O out_features;  lower case = this rank's shard

[Note: recipes]
The recipes of torchao's float8 training, with its formulas; tests compare the bits. A tensor is multiplied by
a scale that maps its largest magnitude (its amax) to float8's largest number, and cast. `fp8`: one scale per
tensor; output gradients in e5m2, the rest in e4m3. `fp8-rowwise`: a scale per row of each operand of a
product; all in e4m3. A tensor is then cast twice, because its two products sum over different dims. Scales
per row are not rounded down to powers of two, torchao's default: a row's largest value is then off by up to
6 %, and if one element is the largest of most rows, it has the same error in all of them.

[Note: the scales of one process]
A shard has another amax than the full tensor, and with its own scale every value would be rounded differently
than in one process. So ranks agree on the amax: all-reduces of one number per tensor, or per row where scales
are per row and the row is sharded. After that the only difference from one process is the order of the sums.
A data rank's micro-batch has scales of its own, as in gradient accumulation.

[Note: kernels and emulation]
GPUs multiply by torch._scaled_mm. It takes a row-major and a column-major matrix, and needs multiples of 16
along the dim that is summed over: weight gradients sum over tokens, and other numbers of tokens are padded
with zeros. Forward sums in the tensor cores' own width (`fast`), gradients in float32. The kernel for scales
per row is slow without `fast`: there the product is scaled afterwards, as in torchao. Other devices emulate:
they multiply the float8 values in float32, or in float64 if the operands were float64.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plait.comm import Group, all_reduce, named_group

Operand = Any  # of a product: a Tensor, or what a layer's products have made of it

FLOAT8_MULTIPLE = 16  # elements: dims of the operands of products in float8 are multiples of it
NOT_TRACED = "products in float8 on a tensor-parallel grid"  # they run uncompiled, between two graphs

_MIN_AMAX = 1e-12  # so that zeros have a finite scale


class TokenSharding(Protocol):
    """Tokens sharded over ranks. Implemented by `TokenShards` of sequence parallelism."""

    @property
    def group(self) -> Any:
        """The ranks."""

    def all_gather(self, x_tI: Tensor) -> Tensor:
        """All-gather the tokens of all ranks."""


@dataclass(frozen=True)
class PlainProducts:
    """Products in the dtype of their operands, by the operators that the layer itself uses."""

    transposed: bool = False

    @property
    def names(self) -> tuple[str, bool, str, str]:
        """The arguments of `products_named` for these products: operators of torch take no objects."""
        return "", self.transposed, "", ""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output."""
        if not self.transposed:
            return F.linear(x, weight, bias)
        if bias is None:
            return x @ weight
        return torch.addmm(bias, flat(x), weight).view(*x.shape[:-1], weight.shape[1])

    def output_gradient(self, dy: Tensor, tokens: TokenSharding | None = None) -> Tensor:
        """Return dy in the form that the next two take, all-gathered if a rank has only its `tokens`."""
        return dy if tokens is None else tokens.all_gather(dy)

    def input_gradient(self, dy: Operand, weight: Tensor) -> Tensor:
        """The input's gradient, which does not depend on the input."""
        return dy @ (weight.t() if self.transposed else weight)

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor:
        """The weight's gradient, which does not depend on the weight."""
        return torch.mm(*self._weight_operands(dy, x))

    def weight_product(self, dy: Tensor, x: Tensor) -> Callable[[Tensor, bool], None]:
        """Return what adds the weight's gradient to a sum of its dtype, or, if it is the first, writes it."""
        operands = self._weight_operands(dy, x)

        def add(sum_: Tensor, is_first: bool) -> None:
            sum_.addmm_(*operands, beta=0 if is_first else 1)

        return add

    def _weight_operands(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (flat(x).t(), flat(dy)) if self.transposed else (flat(dy).t(), flat(x))


@dataclass(frozen=True)
class ScalingRecipe:
    """See [Note: recipes]. `gradient_dtype`: of output gradients."""

    name: str
    is_rowwise: bool
    gradient_dtype: torch.dtype
    dtype = torch.float8_e4m3fn


RECIPES = {
    recipe.name: recipe
    for recipe in (
        ScalingRecipe("fp8", False, torch.float8_e5m2),
        ScalingRecipe("fp8-rowwise", True, torch.float8_e4m3fn),
    )
}


class ScaledTensor(NamedTuple):
    """A tensor times `scale`, cast to float8. `dtype`: that it had, and that its products have."""

    data: Tensor
    scale: Tensor  # () or, of a matrix, (rows, 1) or (1, columns)
    dtype: torch.dtype

    def t(self) -> "ScaledTensor":
        return ScaledTensor(self.data.t(), self.scale.t(), self.dtype)


@dataclass(frozen=True)
class Float8Products:
    """Products in float8, with the methods of `PlainProducts`.

    inp, out   the ranks over which the weight's input and output features are sharded
    """

    recipe: ScalingRecipe
    transposed: bool = False
    inp: Group | None = None
    out: Group | None = None

    @property
    def names(self) -> tuple[str, bool, str, str]:
        assert self.inp is not None, "operators are for sharded layers"
        assert self.out is not None, "operators are for sharded layers"
        return self.recipe.name, self.transposed, self.inp.name, self.out.name

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x_Ti = self._cast(flat(x), self.recipe.dtype, -1, None, self.inp)
        y_To = _product(x_Ti, self._cast_weight(weight, 0), fast=True)
        y = y_To.view(*x.shape[:-1], y_To.shape[1])
        return y if bias is None else y + bias.to(y.dtype)

    def output_gradient(self, dy: Tensor, tokens: TokenSharding | None = None) -> Operand:
        """With one scale per tensor, cast dy once for both products, and gather it in float8."""
        if self.recipe.is_rowwise:
            return dy if tokens is None else tokens.all_gather(dy)
        group = None if tokens is None else tokens.group
        scaled = self._cast(dy, self.recipe.gradient_dtype, None, group, self.out)
        if tokens is None:
            return scaled
        return _with_bits(scaled, tokens.all_gather(_bits(scaled)))

    def input_gradient(self, dy: Operand, weight: Tensor) -> Tensor:
        leading = (dy.data if isinstance(dy, ScaledTensor) else dy).shape[:-1]
        dx_Ti = _product(self._cast_gradient(dy, -1), self._cast_weight(weight, -1).t())
        return dx_Ti.view(*leading, dx_Ti.shape[1])

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor:
        x_Ti = self._cast(_flat(x), self.recipe.dtype, 0, None, self.inp)
        dw_oi = _product(self._cast_gradient(dy, 0).t(), x_Ti)
        return dw_oi.t() if self.transposed else dw_oi

    def _cast_weight(self, weight: Tensor, dim: int) -> ScaledTensor:
        weight_io = weight if self.transposed else weight.t()
        return self._cast(weight_io, self.recipe.dtype, dim, self.inp, self.out)

    def _cast_gradient(self, dy: Operand, dim: int) -> ScaledTensor:
        return self._cast(_flat(dy), self.recipe.gradient_dtype, dim, None, self.out)

    def _cast(
        self, tensor: Operand, dtype: torch.dtype, dim: int | None, *sharding: Group | None
    ) -> ScaledTensor:
        """Cast, unless it is cast already. `dim`: of a matrix, that rows extend along; `sharding`: ranks over
        which each of its two dims is sharded. See [Note: the scales of one process]."""
        if isinstance(tensor, ScaledTensor):
            return tensor
        dim = dim if self.recipe.is_rowwise else None
        amax = _amax(tensor, dim)
        for group in sharding if dim is None else (sharding[dim],):
            if group is not None and group.size > 1:
                all_reduce(amax, group, "max", label="float8 scales")
        largest = torch.finfo(dtype).max
        # In float64: the quotient is the same in compiled code.
        scale = (largest / amax.double().clamp(min=_MIN_AMAX)).float()
        # Clamped, because casts of torch before 2.12 overflow.
        data = (tensor.float() * scale).clamp(-largest, largest).to(dtype)
        return ScaledTensor(data, scale, tensor.dtype)


Products = PlainProducts | Float8Products


def products_named(recipe: str, transposed: bool, inp: str, out: str) -> Products:
    """Return products by their `names`."""
    if not recipe:
        return PlainProducts(transposed)
    return Float8Products(RECIPES[recipe], transposed, named_group(inp), named_group(out))


@dataclass(frozen=True)
class Float8Input:
    """Cast of an input that all weight gradients take in float8.

    inp   the ranks over which its features are sharded
    """

    products: Float8Products

    @classmethod
    def build(cls, recipe: ScalingRecipe, inp: Group) -> "Float8Input | None":
        """None for a recipe that casts inputs differently for each product."""
        return None if recipe.is_rowwise else cls(Float8Products(recipe, inp=inp))

    def encode(self, x: Tensor, tokens: TokenSharding) -> tuple[Tensor, Callable[[Tensor], Operand]]:
        """Return this rank's tokens to send, and what makes the operand of those of all ranks."""
        products = self.products
        scaled = products._cast(x, products.recipe.dtype, None, tokens.group, products.inp)
        return _bits(scaled), lambda bits: _with_bits(scaled, bits)


@dataclass(frozen=True)
class Float8Forward:
    """Forward of an unsharded layer, for `types.MethodType`."""

    products: Float8Products

    def __call__(self, module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        [x] = (*args, *kwargs.values())
        if autocast_dtype(x.device.type) is not None:
            x = x.to(module.weight.dtype)
        y: Tensor = _Float8Linear.apply(x, module.weight, module.bias, self.products)
        return y


class _Float8Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, products: Float8Products
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x_TI if needs_weight else None, weight if needs_x else None)
        ctx.products, ctx.bias_dtype = products, None if bias_O is None else bias_O.dtype
        return products.output(x_TI, weight, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        scaled = ctx.products.output_gradient(dy_TO)
        dx_TI = ctx.products.input_gradient(scaled, weight) if needs_x else None
        dweight = ctx.products.weight_gradient(scaled, x_TI) if needs_weight else None
        return dx_TI, dweight, bias_gradient(dy_TO).to(ctx.bias_dtype) if needs_bias else None, None


def bias_gradient(dy: Tensor) -> Tensor:
    return flat(dy).sum(0)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts a product's operands; None if it is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def flat(tensor: Tensor) -> Tensor:
    """Flatten to (tokens, features); unlike `reshape(-1, 0)` also without features."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _amax(tensor: Tensor, dim: int | None) -> Tensor:
    """The largest magnitude along a dim, or of all; 0 of no elements. In a dtype that transports reduce."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    magnitudes = tensor.detach().abs()
    if not tensor.numel():
        return (magnitudes.sum() if dim is None else magnitudes.sum(dim, keepdim=True)).to(wide)
    return (magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)).to(wide)


def _bits(scaled: ScaledTensor) -> Tensor:
    return scaled.data.view(torch.uint8)


def _with_bits(scaled: ScaledTensor, bits: Tensor) -> ScaledTensor:
    """The tensor with the same scale and other bits."""
    return scaled._replace(data=bits.view(scaled.data.dtype))


def _flat(operand: Operand) -> Operand:
    if isinstance(operand, ScaledTensor):
        return operand._replace(data=flat(operand.data))
    return flat(operand)


def _product(a: ScaledTensor, b: ScaledTensor, *, fast: bool = False) -> Tensor:
    """Multiply matrices (m, k) and (k, n). See [Note: kernels and emulation]."""
    return (_kernel_product if a.data.is_cuda else _emulated_product)(a, b, fast)


def _kernel_product(a: ScaledTensor, b: ScaledTensor, fast: bool) -> Tensor:
    if not a.data.numel():
        return a.data.new_zeros(len(a.data), b.data.shape[1], dtype=a.dtype)
    padding = -a.data.shape[1] % FLOAT8_MULTIPLE
    left = _padded(a.data, padding).contiguous()
    right = _padded(b.data.t(), padding).contiguous().t()
    left_factor, right_factor = a.scale.reciprocal(), b.scale.reciprocal()
    if a.scale.dim() == 0 or fast:
        return torch._scaled_mm(
            left, right, left_factor, right_factor, out_dtype=a.dtype, use_fast_accum=fast
        )
    one = left_factor.new_ones(())
    return torch._scaled_mm(left, right, one, one, out_dtype=a.dtype).mul_(left_factor).mul_(right_factor)


def _padded(matrix: Tensor, num_columns: int) -> Tensor:
    """Append columns of zeros."""
    return F.pad(matrix, (0, num_columns)) if num_columns else matrix


def _emulated_product(a: ScaledTensor, b: ScaledTensor, _: bool) -> Tensor:
    y: Tensor = torch.ops.plait_float8.emulated_scaled_mm(a.data, b.data, a.scale, b.scale, a.dtype)
    return y


def _emulated_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    wide, device_type = torch.promote_types(dtype, torch.float32), a.device.type
    is_autocast = autocast_dtype(device_type) is not None
    with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
        return torch.mm(a.to(wide) / scale_a, b.to(wide) / scale_b).to(dtype)


# One operator, so that selective recompute saves its output in `dtype`, as it does a GPU's. In a namespace of
# its own: compiled code takes operators of `plait` for collectives.
_operators = torch.library.Library("plait_float8", "FRAGMENT")
_operators.define(
    "emulated_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor"
)
_operators.impl("emulated_scaled_mm", _emulated_scaled_mm, "CompositeExplicitAutograd")
