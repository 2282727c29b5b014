"""fp16's loss scale, for losses that are sums over targets."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from plait.comm import Group, all_reduce
from plait.optim.scale import LossScale
from plait.plan.loss_scaling import LossScaling

_KEYS, _UNIT = "engine/loss_scale.", "engine/scale_unit"


class SumLossScale:
    """Loss scale for summed losses. The configured scale is for a mean, so it is divided by `unit`, a power
    of two near the number of targets, determined once from the first micro-batches of all ranks. 1 for other
    precisions."""

    def __init__(self, options: LossScaling | None) -> None:
        self._options = options
        self._scale = LossScale(options) if options is not None else None
        self.unit = 0.0  # 0 until the first loss

    @property
    def value(self) -> float | None:
        """The scale for a mean loss; None for precisions without one."""
        return None if self._scale is None else self._scale.value

    @property
    def factor(self) -> float:
        """The scale for a summed loss."""
        return 1.0 if self._scale is None else self._scale.value / max(1.0, self.unit)

    def scale_loss(self, loss: Tensor, num_targets: float | Tensor | None, ranks: Group) -> Tensor:
        """Scale the loss. `ranks`: the data ranks, which determine the unit together."""
        if self._scale is None:
            return loss
        if not self.unit:
            max_targets = torch.tensor([float(num_targets or 1)], device=loss.device)
            all_reduce(max_targets, ranks, "max")
            self.unit = 2.0 ** round(math.log2(max(1.0, max_targets.item())))
        return loss * self.factor

    def update(self, *, skipped: bool) -> None:
        """Adjust the scale after a step with targets."""
        if self._scale is not None:
            self._scale.update(skipped)

    def state(self) -> dict[str, Tensor]:
        """State to save, by engine state key."""
        if self._scale is None:
            return {}
        state = {f"{_KEYS}{key}": value for key, value in self._scale.state().items()}
        return state | {_UNIT: torch.tensor(self.unit, dtype=torch.float64)}

    def load(self, keys: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Restore what `state` returned; without such keys, start fresh. Raises CheckpointError."""
        known = [key for key in keys if key.startswith(_KEYS)]
        self._scale = LossScale(self._options) if self._options is not None else None
        self.unit = 0.0
        if self._scale is not None and known:
            self._scale.load({key.removeprefix(_KEYS): read(key) for key in known})
            self.unit = float(read(_UNIT)) if _UNIT in keys else 0.0
