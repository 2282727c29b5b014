"""Optimizers that torch lacks: Lion and LAMB."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.optim.clip import squared_norm


class Lion(torch.optim.Optimizer):
    """Sign momentum with decoupled weight decay (Chen et al., "Symbolic Discovery of Optimization
    Algorithms", arXiv 2302.06675, algorithm 2): element-wise, with one state per element; AdamW has two.

    Every update has the size of the learning rate, so the rate is usually 3 to 10 times smaller than
    AdamW's, and the weight decay as many times larger (section 5 of the paper).
    """

    is_elementwise = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """Raises ValueError for values out of range, as torch's optimizers do."""
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"Invalid learning rate or weight decay: {lr}, {weight_decay}")
        _check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, as in torch."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average, gradient, (beta1, beta2) = state["exp_avg"], parameter.grad, group["betas"]
        direction = average.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        average.lerp_(gradient, 1 - beta2)


class LAMB(torch.optim.Optimizer):
    """Adam with decoupled weight decay, whose update of each parameter is scaled to the parameter's norm (You
    et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
    algorithm 2).

    With x the parameter and r Adam's bias-corrected direction: u = r + weight_decay x, and
    x <- x - lr |x| / |u| u. If x or u is zero, the factor is lr.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        """Raises ValueError for values out of range, as torch's optimizers do."""
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"Invalid learning rate, eps or weight decay: {lr}, {eps}, {weight_decay}")
        _check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def sum_over_shards(self, shards: Sequence[Tensor], sums: Tensor) -> Tensor:
        """Add up numbers of each parameter over its shards. An engine replaces it.

        `sums`: float64 (shards, numbers), of the shards that this rank steps; returns the same shape. Called
        once in each step, also by ranks without shards.
        """
        del shards
        return sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, as in torch."""
        loss = _evaluate(closure)
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = [self._direction(*each) for each in stepped]
        shards = [parameter for parameter, _ in stepped]
        pairs = zip(shards, updates, strict=True)
        squares = [torch.stack([squared_norm(p.reshape(-1)), squared_norm(u.reshape(-1))]) for p, u in pairs]
        sums = self.sum_over_shards(shards, torch.stack(squares) if squares else torch.zeros(0, 2).double())
        ratios = torch.where((sums > 0).all(1), (sums[:, 0] / sums[:, 1]).sqrt(), 1.0)
        for (parameter, group), update, ratio in zip(stepped, updates, ratios, strict=True):
            parameter.sub_(update.mul_((group["lr"] * ratio).to(update.dtype)))
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's direction with weight decay."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient, (beta1, beta2) = parameter.grad, group["betas"]
        assert gradient is not None
        average = state["exp_avg"].lerp_(gradient, 1 - beta1)
        squares = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1, bias2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
        update = average / squares.div(bias2).sqrt_().add_(group["eps"]).mul_(bias1)
        return update.add_(parameter, alpha=group["weight_decay"])


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"Invalid betas, not two numbers from 0 to below 1: {betas}")


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a step's closure, as torch's optimizers do."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
