"""Options of a loss that distils a teacher. The loss itself is in engine/distillation.py."""

import math
from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True)
class Distillation:
    """A loss of tokens for `parallelize(loss=)` (Hinton et al. 2015), in training:

        (1 - weight) cross entropy of the label + weight T^2 KL(teacher || student)

    where both distributions are those of logits divided by the temperature T, and the teacher's is that of
    its likeliest tokens alone, which a batch has: `plait.with_teacher`. Evaluations have the first term
    alone, without its factor. Raises ConfigError.
    """

    weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks = (
            ("weight", 0 < self.weight <= 1, "above 0, at most 1", "weight=0.5"),
            ("temperature", 0 < self.temperature < math.inf, "a number above 0", "temperature=1.0"),
        )
        for name, is_valid, expected, hint in checks:
            if not is_valid:
                raise ConfigError(
                    f"{name} is not valid for a distillation",
                    given=f"{name}={getattr(self, name)!r}",
                    expected=expected,
                    hint=hint,
                )
