"""Options of a loss that distils a teacher. The loss itself is in engine/distillation.py."""

import math
from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True)
class Distillation:
    """A loss of tokens for `parallelize(loss=)` (Hinton et al. 2015), in training:

        (1 - weight) cross entropy of the label + weight T^2 KL(teacher || student)

    where both distributions are those of logits divided by the temperature T, over the teacher's
    `top_tokens` likeliest tokens of each position and all others as one class: the divergence is 0 if the
    models agree, and complete if these are all tokens. A batch has them from `plait.with_teacher`.
    Evaluations have the first term alone, without its factor. Raises ConfigError.
    """

    weight: float = 0.5
    temperature: float = 1.0
    top_tokens: int = 64

    def __post_init__(self) -> None:
        checks = (
            ("weight", 0 < self.weight <= 1, "above 0, at most 1", "weight=0.5"),
            ("top_tokens", self.top_tokens >= 1, "a number from 1", "top_tokens=64"),
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
