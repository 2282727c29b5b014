"""Forward and backward products of a linear layer with weight (out, in), or (in, out) if `transposed`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts a product's operands; None if it is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The layer's output, computed by the operators that the layer itself uses."""
    if not transposed:
        return F.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, flat(x), weight).view(*x.shape[:-1], weight.shape[1])


def input_gradient(dy: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """The input's gradient, which does not depend on the input."""
    return dy @ (weight.t() if transposed else weight)


def weight_gradient(dy: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """The weight's gradient, which does not depend on the weight."""
    return flat(x).t() @ flat(dy) if transposed else flat(dy).t() @ flat(x)


def bias_gradient(dy: Tensor) -> Tensor:
    return flat(dy).sum(0)


def flat(tensor: Tensor) -> Tensor:
    """Flatten to (tokens, features); unlike `reshape(-1, 0)` also without features."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)
