"""Options of loss scaling.

[Note: powers of two only]
A scale that is a power of two changes exponents and no mantissa: scaling and unscaling are exact, so the
results of a step do not depend on the current scale, nor differ between plans. A growth of 1.5 would lose
that and gain nothing: the interval between 2^k and 2^(k+1) is one bit of fp16's range.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from plait.errors import ConfigError

# Range of float32, in which losses are scaled.
SMALLEST, LARGEST = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class LossScaling:
    """Options of loss scaling: dynamic, or with a scale that never changes.

    initial      the first scale
    growth       factor after `interval` consecutive steps without an overflow
    backoff      factor when gradients overflow
    interval     in steps
    hysteresis   overflows before the scale backs off, consecutive or not; after that every further one backs
                 off, until a full interval without one restores the number. 1 is torch.amp.GradScaler's rule
    minimum      lower bound of the scale
    dynamic      False: every step has the initial scale, and the other options do not apply. Steps whose
                 gradients overflow are skipped all the same

    All but the counts are powers of two: see [Note: powers of two only]. Raises ConfigError.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        self._check_fixed()
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if field.name in ("interval", "hysteresis"):
                is_valid, expected, near = (
                    isinstance(value, int) and _is_number(value),
                    "an integer from 1",
                    None,
                )
            else:
                is_valid, expected = is_power_of_two(value), "a power of two in float32"
                near = f"{field.name}={_nearest_power(value)}" if _is_number(value) else None
            _require(is_valid, field.name, repr(value), expected, near)
        _require(self.growth > 1, "growth", self.growth, "more than 1")
        _require(self.backoff < 1, "backoff", self.backoff, "less than 1")
        fits = self.minimum <= self.initial or not self.dynamic
        _require(fits, "minimum", self.minimum, f"at most the initial scale, {self.initial}")

    def _check_fixed(self) -> None:
        changed = [f.name for f in fields(self)[1:-1] if getattr(self, f.name) != f.default]
        if changed and not self.dynamic:
            raise ConfigError(
                "a fixed loss scale never changes",
                given=f"dynamic=False, {changed[0]}={getattr(self, changed[0])}",
                expected="no option but initial",
                hint="dynamic=True",
            )


def _require(ok: bool, name: str, value: object, expected: str, hint: str | None = None) -> None:
    if not ok:
        fact = f"the loss scale's {name} is out of range"
        raise ConfigError(fact, given=f"{name}={value}", expected=expected, hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_power_of_two(value: Any) -> bool:
    return _is_number(value) and math.frexp(value)[0] == 0.5 and SMALLEST <= value <= LARGEST


def _nearest_power(value: float) -> float:
    return 2.0 ** max(-126, min(127, round(math.log2(value))))
