"""Local steps: islands of ranks train alone and exchange the change of their weights every few steps.

Local SGD (Stich 1805.09767) averages; DiLoCo (Douillard et al. 2311.08105) gives the mean change to an outer
optimizer, SGD with Nesterov momentum; Streaming DiLoCo (Douillard et al. 2501.18512) exchanges parts of the
model at different steps, under the computation of the steps that follow.

[Note: parts of an exchange]
With one part, all weights are exchanged after every H-th step, and training waits. With P parts, part p is
sent after steps n with n mod H = H (p + 1) / P, so that the last part is sent after every H-th step, and
its result is applied H / P steps later, when the next part is due: about one part is in flight at any time.
In between an island has trained on, so the result is not its weights: each weight becomes the mean of the
local and the new global one (section 2.3 of the paper, with its alpha of 0.5).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from plait.errors import PlanError

EXCHANGES = ("fp32", "bf16", "int8")
_DECIMAL = r"[0-9]+(?:\.[0-9]+)?"
OUTER = re.compile(f"average|nesterov:({_DECIMAL}):({_DECIMAL})")
_DEFAULTS = {"outer": "average", "exchange": "fp32", "exchange_parts": 1}
_LOCAL_SHARE = 0.5  # of an island's own weights, if it has trained on during an exchange


@dataclass(frozen=True)
class LocalSteps:
    """When and how islands exchange weights.

    steps          between two exchanges of a part; 0: there are no islands
    learning_rate  of the outer optimizer; None: the mean change is added
    momentum       of the outer optimizer
    parts          see [Note: parts of an exchange]
    """

    steps: int
    learning_rate: float | None
    momentum: float
    parts: int

    @classmethod
    def from_keys(cls, local_steps: int, outer: str, exchange_parts: int) -> "LocalSteps":
        match = OUTER.fullmatch(outer)
        assert match is not None, "the plan is checked"
        if match[1] is None:
            return cls(local_steps, None, 0.0, exchange_parts)
        return cls(local_steps, float(match[1]), float(match[2]), exchange_parts)

    @property
    def delay(self) -> int:
        """Steps from the start of an exchange to its application."""
        return self.steps // self.parts if self.parts > 1 else 0

    @property
    def local_share(self) -> float:
        """Share of an island's own weights in the weights after an exchange."""
        return _LOCAL_SHARE if self.delay else 0.0

    def started_after(self, num_steps: int) -> int | None:
        """The part whose exchange starts after this number of steps."""
        if self.steps and num_steps > 0:
            for part in range(self.parts):
                if num_steps % self.steps == self.steps * (part + 1) // self.parts % self.steps:
                    return part
        return None

    def applied_after(self, num_steps: int) -> int | None:
        """The part whose exchange is applied after this number of steps."""
        return self.started_after(num_steps - self.delay)

    def in_flight_after(self, num_steps: int) -> int | None:
        """The part that is being exchanged at the end of this number of steps."""
        sent = range(num_steps - self.delay + 1, num_steps + 1)
        return next((part for n in reversed(sent) if (part := self.started_after(n)) is not None), None)

    def divide(self, sizes: Sequence[int]) -> list[int]:
        """Assign units of these sizes to parts, in order and of nearly equal size: a part for each unit."""
        ends, total = accumulate(sizes), sum(sizes) or 1
        centers = (end - size / 2 for end, size in zip(ends, sizes, strict=True))
        return [min(self.parts - 1, int(self.parts * center / total)) for center in centers]


def check_local_steps(values: Mapping[str, Any], islands: int | None) -> None:
    """Raise PlanError for values of a plan's keys that would have no effect or cannot be combined. `islands`:
    None if their number is not known yet."""
    steps, dp, cp, zero, ep = (values[key] for key in ("local_steps", "dp", "cp", "zero", "ep"))
    for key, default in _DEFAULTS.items() if not steps else ():
        if values[key] != default:
            raise PlanError(
                f"{key} has an effect only with local_steps",
                given=f"local_steps=0 {key}={values[key]}",
                expected="local_steps from 1",
                hint=f"local_steps=32 {key}={values[key]}, or no {key}",
            )
    if not steps:
        return
    if islands is not None and islands < 2:
        of_dp = ep // math.gcd(ep, cp)
        experts = f"{f' cp={cp}' * (cp > 1)} ep={ep}" * (ep > 1)
        raise PlanError(
            "local_steps needs at least two islands",
            given=f"dp={dp}{experts} zero={zero} shard={values['shard']} local_steps={steps}",
            expected="replicas of the model, which train alone: dp at least twice what shard and ep need",
            hint="shard=1" if zero and dp > 1 == of_dp else f"dp={2 * of_dp}{f' shard={of_dp}' * bool(zero)}",
        )
    if values["exchange_parts"] > steps:
        raise PlanError(
            "more parts of an exchange than local steps",
            given=f"local_steps={steps} exchange_parts={values['exchange_parts']}",
            expected="at most one part after each step",
            hint=f"exchange_parts={steps}, or no exchange_parts",
        )
    if values["offload"] == "disk":
        raise PlanError(
            "local_steps cannot be combined with offload=disk",
            given=f"local_steps={steps} offload=disk",
            expected="global weights and outer momentum in memory",
            hint="offload=cpu, or no offload",
        )
    has_servers = values["servers"] or values["server"] == "colocated"  # an island is one rank
    reduces = ("fp32",) if has_servers else ("fp32", "bf16")
    refused = {"algorithm": values["algorithm"] != "auto", "reduce": values["reduce"] not in reduces}
    if any(refused.values()):
        keys = [key for key, is_refused in refused.items() if is_refused]
        raise PlanError(
            "local_steps cannot be combined with a named algorithm or compressed gradients",
            given=" ".join([f"local_steps={steps}", *(f"{key}={values[key]}" for key in keys)]),
            expected="an exchange between islands, which exchange=int8 compresses",
            hint=" and ".join(f"no {key}" for key in keys),
        )
