"""fp16's loss scale, for losses that are sums over targets."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from plait.comm import Group, all_reduce
from plait.optim import LossScale, LossScaling

_KEYS, _UNIT = "engine/loss_scale.", "engine/scale_unit"


class SumLossScale:
    """Losses are sums, the scale is for a mean: it is divided by `unit`, a power of two near the number of
    targets, which is found once, with the ranks' first micro-batches. Of other precisions all is 1."""

    def __init__(self, how: LossScaling | None) -> None:
        self._how = how
        self._scale = LossScale(how) if how is not None else None
        self.unit = 0.0  # 0 before the first loss

    @property
    def value(self) -> float | None:
        """For a mean loss; None for precisions that need none."""
        return None if self._scale is None else self._scale.value

    @property
    def factor(self) -> float:
        """For a sum."""
        return 1.0 if self._scale is None else self._scale.value / max(1.0, self.unit)

    def of(self, loss: Tensor, num_targets: int | Tensor | None, ranks: Group) -> Tensor:
        """The loss, scaled. `ranks`: those with other data, which find the unit together."""
        if self._scale is None:
            return loss
        if not self.unit:
            most = torch.tensor([float(num_targets or 1)], device=loss.device)
            all_reduce(most, ranks, "max")
            self.unit = 2.0 ** round(math.log2(max(1.0, most.item())))
        return loss * self.factor

    def update(self, *, skipped: bool) -> None:
        """After a step with targets."""
        if self._scale is not None:
            self._scale.update(skipped)

    def state(self) -> dict[str, Tensor]:
        """What continues it, by key of an engine's state."""
        if self._scale is None:
            return {}
        found = {f"{_KEYS}{key}": value for key, value in self._scale.state().items()}
        return found | {_UNIT: torch.tensor(self.unit, dtype=torch.float64)}

    def load(self, keys: Collection[str], whole: Callable[[str], Tensor]) -> None:
        """Takes over what `state` gave; without any, begins anew. Raises CheckpointError."""
        known = [key for key in keys if key.startswith(_KEYS)]
        self._scale = LossScale(self._how) if self._how is not None else None
        self.unit = 0.0
        if self._scale is not None and known:
            self._scale.load({key.removeprefix(_KEYS): whole(key) for key in known})
            self.unit = float(whole(_UNIT)) if _UNIT in keys else 0.0
