"""The products of a linear layer, whose weight is (out, in), or (in, out) if it is `transposed`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The layer's output, by the operators that the layer itself uses."""
    if not transposed:
        return F.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, flat(x), weight).view(*x.shape[:-1], weight.shape[1])


def input_gradient(dy: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return dy @ (weight.t() if transposed else weight)


def weight_gradient(dy: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Needs no weight."""
    return flat(x).t() @ flat(dy) if transposed else flat(dy).t() @ flat(x)


def flat(tensor: Tensor) -> Tensor:
    """(tokens, features); also of no features, which `reshape` would not know the tokens of."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)
