"""Lion: sign momentum with decoupled weight decay (Chen et al., "Symbolic Discovery of Optimization
Algorithms", arXiv 2302.06675, algorithm 2)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """An element-wise optimizer with one state per element; AdamW has two.

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
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas, not two numbers from 0 to below 1: {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
