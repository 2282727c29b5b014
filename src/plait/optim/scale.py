"""Loss scaling for fp16: dynamic, the largest scale without infinite gradients, or fixed.

torch.amp.GradScaler's rule: an overflow multiplies the scale by `backoff` and the step is skipped; after
`interval` steps without one it is multiplied by `growth`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.plan.loss_scaling import LARGEST, LossScaling, is_power_of_two


class LossScale:
    """The loss scale of the next step. All ranks update it with the same overflows, so it is equal on all."""

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self.value = float(scaling.initial)
        self._clean = 0  # steps without an overflow since the last change
        self._left = scaling.hysteresis  # overflows until the next backoff

    def update(self, overflow: bool) -> None:
        """Update after a step. `overflow`: a gradient of any rank was not finite, and the step was
        skipped."""
        if not self._scaling.dynamic:
            return
        if overflow:
            self._clean = 0
            if self._left == 1:
                self.value = max(self.value * self._scaling.backoff, self._scaling.minimum)
            else:
                self._left -= 1
            return
        self._clean += 1
        if self._clean == self._scaling.interval:
            self._clean = 0
            self._left = self._scaling.hysteresis
            if self.value * self._scaling.growth <= LARGEST:
                self.value *= self._scaling.growth

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        return {
            "value": torch.tensor(self.value, dtype=torch.float64),
            "clean": torch.tensor(self._clean),
            "hysteresis_left": torch.tensor(self._left),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, also from a scale with other options. A fixed scale keeps its own
        value. Raises CheckpointError."""
        known = {key: tensor.item() for key, tensor in state.items() if tensor.numel() == 1}
        if known.keys() != self.state().keys() or not is_power_of_two(known["value"]):
            raise CheckpointError(
                "the checkpoint has no valid loss scale",
                given=known,
                expected="a power of two and two counts",
                hint="another checkpoint of an fp16 run",
            )
        if not self._scaling.dynamic:
            return
        self.value = max(known["value"], self._scaling.minimum)
        self._clean = min(max(int(known["clean"]), 0), self._scaling.interval - 1)
        self._left = min(max(int(known["hysteresis_left"]), 1), self._scaling.hysteresis)
