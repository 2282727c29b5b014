"""Forward and backward products of a linear layer with weight (out, in), or (in, out) if `transposed`.

# T tokens (of any leading dims)  I in_features  O out_features
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Operand = Any  # of a product: a Tensor, or what a layer's Products have made of it

FLOAT8_MULTIPLE = 16  # elements: dims of the operands of products in float8 are multiples of it


class TokenSharding(Protocol):
    """Tokens sharded over ranks. Implemented by `TokenShards` of sequence parallelism."""

    @property
    def group(self) -> Any:
        """The ranks."""

    def all_gather(self, x_tI: Tensor) -> Tensor:
        """All-gather the tokens of all ranks."""


class InputCast(Protocol):
    """The form in which layers' weight gradients take an input. Implemented by Float8Input."""

    def encode(self, x: Tensor, tokens: TokenSharding) -> tuple[Tensor, Callable[[Tensor], Operand]]:
        """Return this rank's tokens to send, and what makes the operand of those of all ranks."""


class Products(Protocol):
    """The products of one layer, in forward and backward. Implemented by PlainProducts and Float8Products."""

    @property
    def transposed(self) -> bool:
        """Return whether the weight is stored as (in, out)."""

    @property
    def names(self) -> tuple[str, bool, str, str]:
        """The arguments of `products_named` for these products: operators of torch take no objects."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output."""

    def output_gradient(self, dy: Tensor, tokens: TokenSharding | None = None) -> Operand:
        """Return dy in the form that the next two take, all-gathered if a rank has only its `tokens`."""

    def input_gradient(self, dy: Operand, weight: Tensor) -> Tensor:
        """The input's gradient, which does not depend on the input."""

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor:
        """The weight's gradient, which does not depend on the weight."""


@dataclass(frozen=True)
class PlainProducts:
    """Products in the dtype of their operands, by the operators that the layer itself uses."""

    transposed: bool = False

    @property
    def names(self) -> tuple[str, bool, str, str]:
        return "", self.transposed, "", ""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.transposed:
            return F.linear(x, weight, bias)
        if bias is None:
            return x @ weight
        return torch.addmm(bias, flat(x), weight).view(*x.shape[:-1], weight.shape[1])

    def output_gradient(self, dy: Tensor, tokens: TokenSharding | None = None) -> Tensor:
        return dy if tokens is None else tokens.all_gather(dy)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy @ (weight.t() if self.transposed else weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return flat(x).t() @ flat(dy) if self.transposed else flat(dy).t() @ flat(x)


def bias_gradient(dy: Tensor) -> Tensor:
    return flat(dy).sum(0)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts a product's operands; None if it is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def flat(tensor: Tensor) -> Tensor:
    """Flatten to (tokens, features); unlike `reshape(-1, 0)` also without features."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)
