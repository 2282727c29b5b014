"""A linear layer in float8 from the formulas of its recipe: values are rounded to float8, then multiplied in
float32, or in float64 if the layer is in float64."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype, dim: int, precision: str) -> Tensor:
    """The values of a matrix in float8. `dim`: that a product sums over."""
    largest, rowwise = torch.finfo(dtype).max, precision == "fp8-rowwise"
    amax = x.abs().amax(dim, keepdim=True) if rowwise else x.abs().amax()
    scale = (largest / amax.double().clamp(min=1e-12)).float()
    data = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return data.to(torch.promote_types(x.dtype, torch.float32)) / scale


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.precision, ctx.has_bias = precision, bias is not None
        product = rounded(x.flatten(0, -2), E4M3, 1, precision) @ rounded(weight, E4M3, 1, precision).t()
        y = product.to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), precision = ctx.saved_tensors, ctx.precision
        dtype = E4M3 if precision == "fp8-rowwise" else E5M2
        x_flat, dy_flat = x.flatten(0, -2), dy.flatten(0, -2)
        dx = rounded(dy_flat, dtype, 1, precision) @ rounded(weight, E4M3, 0, precision)
        dw = rounded(dy_flat, dtype, 0, precision).t() @ rounded(x_flat, E4M3, 0, precision)
        db = dy_flat.sum(0) if ctx.has_bias else None
        return dx.to(x.dtype).view(x.shape), dw.to(weight.dtype), db, None


def convert(model: nn.Module, precision: str) -> None:
    """Give every nn.Linear of the model this forward."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        y: Tensor = Linear.apply(x, layer.weight, layer.bias, precision)
        return y

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def outcome(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The layer's output, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
