"""A plan with its estimate, and what training with it takes: days, device-hours, dollars, energy."""

from dataclasses import dataclass

from plait.plan import Plan
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import StepEstimate, Workload
from plait.planner.workload import PLAIT, Software

SECONDS_PER_DAY = 86_400.0
_SECONDS_PER_HOUR = 3_600.0


@dataclass(frozen=True)
class RankedPlan:
    """A priced plan on its cluster. `tokens`: of the complete training; None: unknown, as are its totals.

    Dollars are device-hours at the price of the device. Energy is counted for the devices at full load,
    without hosts, network and cooling.
    """

    estimate: StepEstimate
    model: ModelShape
    cluster: Cluster
    work: Workload
    tokens: float | None = None
    software: Software = PLAIT

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.work.tokens / self.estimate.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.cluster.num_devices

    def mfu(self, *, causal: bool) -> float:
        """Model FLOPs utilization: FLOPs of the model, recomputation not counted, per second and peak FLOP/s.

        causal  count the attention of a token to itself and the tokens before it, as it is computed; else to
                the full sequence, as PaLM's and Megatron's reports do
        """
        flops = self.model.training_flops_per_token(self.work.sequence, causal=causal) * self.tokens_per_s
        return flops / (self.cluster.num_devices * self.peak_flops)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one device, in the plan's precision."""
        return self.cluster.device.peak_flops[
            "tf32" if self.plan.tf32 else self.plan.precision.partition("-")[0]
        ]

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which the slowest rank waits for communication."""
        return sum(seconds for part, seconds in self.estimate.parts.items() if part.endswith("communication"))

    @property
    def days(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.tokens_per_s / SECONDS_PER_DAY

    @property
    def device_hours(self) -> float | None:
        days = self.days
        return None if days is None else days * 24 * self.cluster.num_devices

    @property
    def dollars(self) -> float | None:
        hours = self.device_hours
        return None if hours is None else hours * self.cluster.device.dollars_per_hour

    @property
    def joules(self) -> float | None:
        hours = self.device_hours
        return None if hours is None else hours * _SECONDS_PER_HOUR * self.cluster.device.watts
