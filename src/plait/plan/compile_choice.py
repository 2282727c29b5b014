"""`compile=auto`: whether the blocks of a model are compiled, from measured times.

[Note: cost and gain of a compilation]
Where no compiled code is on disk, a compilation of one block takes 7 to 15 s of a processor; a compiled step
takes 0.65 to 0.85 of an uncompiled one (benchmarks/compiled.py). A run whose steps take `MIN_RUN_S` together
may gain about that much: times of a shorter one are not measured. Once they are, the compilation is done, and
the run keeps what is faster. Later runs find the times of their model, plan and machine on disk, and compile
if they gain more than it takes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.plan.plan import Plan

MIN_RUN_S = 100.0
MIN_GAIN = 0.02  # of an uncompiled step; less is within the noise of the measurement


@dataclass(frozen=True)
class CompileTimes:
    """Measured seconds.

    eager_s     forward and backward passes of a step, uncompiled
    compiled_s  the same, compiled
    compile_s   the compilation
    """

    eager_s: float
    compiled_s: float
    compile_s: float

    @property
    def gain_s(self) -> float:
        """Seconds that a compiled step takes less; 0 if that may be noise."""
        gain_s = self.eager_s - self.compiled_s
        return gain_s if gain_s > MIN_GAIN * self.eager_s else 0.0


@dataclass(frozen=True)
class CompileChoice:
    """The choice of a run, and its reason. `key`: of model, plan and shapes; "" if the plan decides."""

    is_on: bool
    reason: str
    key: str = ""

    def __str__(self) -> str:
        return f"{'on' if self.is_on else 'off'}: {self.reason}"

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def kept(cls, facts: Mapping[str, Any] | None, key: str) -> "CompileChoice | None":
        """The choice that a checkpoint has, from `facts`; None if it was for another model, plan or shape."""
        return cls(**facts) if facts is not None and facts["key"] == key else None

    @classmethod
    def of_short_run(cls, eager_s: float, num_steps: float, key: str) -> "CompileChoice | None":
        """Off for a run whose steps are too few to measure times; None otherwise."""
        if eager_s * num_steps >= MIN_RUN_S:
            return None
        run = f"{num_steps:,.0f} steps of {eager_s:.3g} s"
        return cls(is_on=False, reason=f"{run} are too few to repay it", key=key)

    @classmethod
    def of_times(
        cls, times: CompileTimes, num_steps: float, key: str, *, is_compiled: bool
    ) -> "CompileChoice":
        """The choice for so many steps. `is_compiled`: the compilation has been done in this run."""
        steps = f"{times.compiled_s:.3g} s a step instead of {times.eager_s:.3g} s"
        gain_s, took = times.gain_s * num_steps, f"a compilation of {times.compile_s:.3g} s"
        if not times.gain_s:
            return cls(is_on=False, reason=f"{steps}, compiled", key=key)
        if not is_compiled and gain_s <= times.compile_s:
            return cls(is_on=False, reason=f"{steps} do not repay {took} in {num_steps:,.0f} steps", key=key)
        return cls(is_on=True, reason=f"{steps}, after {took}", key=key)


def without_auto(plan: Plan, *, splits: bool, has_experts: bool) -> tuple[Plan, CompileChoice | None]:
    """The plan without `compile=auto` where that is off whatever the times, and why; else the same plan, and
    None. `splits`: the schedule splits backwards."""
    is_selective = plan.recompute == "selective"
    reasons = {
        "under deterministic=true, times decide nothing": plan.deterministic,
        "parameter servers have no step that all ranks can time": bool(plan.num_servers),
        f"schedule={plan.schedule} splits backwards, and that of a compiled block cannot be split": splits,
        "recompute=selective compiles no block with attention over ranks": is_selective and plan.cp > 1,
        "recompute=selective counts no experts in compiled blocks": is_selective and has_experts,
    }
    for reason, applies in reasons.items():
        if plan.compile == "auto" and applies:
            return replace(plan, compile=False), CompileChoice(is_on=False, reason=reason)
    return plan, None
