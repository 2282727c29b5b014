"""Optimizers that a try on a small parameter may take for element-wise: what they do depends on the tensor
only for some gradients, sizes or steps, or they count their own steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _WithRate(torch.optim.Optimizer):
    """An optimizer whose only option is a learning rate."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})


class _Moments(_WithRate):
    """Adam's moments; `_update` makes the step of a parameter of them."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
                p.sub_(group["lr"] * self._update(p.grad, state))

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Stable(_Moments):
    """StableAdamW (arXiv 2304.13013): divides by the mean of gradient^2 / variance where it exceeds 1."""

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        variance = state["exp_avg_sq"] / (1 - 0.95 ** state["step"])
        excess = (gradient.square() / variance.clamp(min=1e-16)).mean().sqrt()
        average = state["exp_avg"] / (1 - 0.9 ** state["step"])
        update: Tensor = average / (variance.sqrt() + 1e-8) / max(1.0, excess.item())
        return update


class Cautious(_Moments):
    """Cautious AdamW (arXiv 2411.16085): masks elements whose signs disagree, and scales the others up."""

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        agrees = (state["exp_avg"] * gradient > 0).to(gradient.dtype)
        update: Tensor = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) * agrees
        return update / agrees.mean().clamp(min=1e-3)


class Clipping(_Moments):
    """Clips the mean of gradients to a norm, tensor by tensor."""

    limit = 0.01

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        del gradient
        average: Tensor = state["exp_avg"]
        return average * (self.limit / average.norm()).clamp(max=1.0)


class ClippingLarge(Clipping):
    """The same, with a limit that small gradients do not reach."""

    limit = 100.0


class Factored(_WithRate):
    """Keeps means of rows and columns of squares, for matrices from a size on."""

    least = 16

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                squares, state = p.grad.square() + 1e-12, self.state[p]
                if p.ndim == 2 and min(p.shape) >= self.least:
                    row = state["row"] = state.get("row", 0.0) * 0.9 + squares.mean(1, keepdim=True)
                    column = state["column"] = state.get("column", 0.0) * 0.9 + squares.mean(0, keepdim=True)
                    variance = row * column / row.mean()
                else:
                    variance = state["variance"] = state.get("variance", 0.0) * 0.9 + squares
                p.sub_(group["lr"] * p.grad / variance.sqrt())


class FactoredLarge(Factored):
    least = 128


class LaterByTensor(_Moments):
    """Scales to the tensor's norm from step 3 on."""

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        del gradient
        average: Tensor = state["exp_avg"]
        return average / average.norm() if state["step"] >= 3 else average


class Counting(_WithRate):
    """Counts its calls itself."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] / self.t * p.grad)


class ReadingAtStart(_WithRate):
    """Pulls weights back to what they were when it was built."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, first in zip(parameters, self.first, strict=True):
            p.sub_(0.1 * p.grad).lerp_(first, 0.1)


class ByElement(_WithRate):
    """Lion's rule without decay. Declared."""

    is_elementwise = True

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * average.lerp(p.grad, 0.1).sign())
                average.lerp_(p.grad, 0.01)


class Replacing(_WithRate):
    """Treats parameters as a loop's: replaces gradients and data, keeps the last gradient, and drops it."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                assert isinstance(p, nn.Parameter)
                p.grad = p.grad - p.grad.mean()
                last = self.state[p].get("last", p.grad)
                self.state[p]["last"] = p.grad
                p.data = p.data - group["lr"] * (p.grad + 0.5 * last)
                p.grad = None


class FirstRate(_WithRate):
    """Steps all groups with the learning rate of the first one."""

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(self.param_groups[0]["lr"] * p.grad)


BY_TENSOR = (Stable, Cautious, Clipping, Factored, LaterByTensor, Counting)


def declaring(kind: type[torch.optim.Optimizer], value: bool = True) -> type[torch.optim.Optimizer]:
    """The class with a declaration."""
    return type(f"Declared{kind.__name__}", (kind,), {"is_elementwise": value})
