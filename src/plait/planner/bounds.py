"""Prices of the plans of a search, and lower bounds of their time and memory that cost microseconds."""

from functools import cached_property

from plait.plan import Plan
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape
from plait.planner.price import Price, Software, Workload, price
from plait.planner.space import Decided


class Prices:
    """`best_first.Pricing` by the planner's own arithmetic. A plan is priced once."""

    def __init__(self, model: ModelShape, cluster: Cluster, work: Workload, software: Software) -> None:
        self._model, self._cluster, self._work, self._software = model, cluster, work, software
        self._prices: dict[Plan, Price] = {}

    def price(self, plan: Plan) -> Price:
        found = self._prices.get(plan)
        if found is None:
            found = price(self._model, plan, self._cluster, self._work, self._software)
            self._prices[plan] = found
        return found

    def memory_bytes(self, plan: Plan) -> float:
        return self.price(plan).memory_high_bytes

    def least_seconds(self, plan: Plan, decided: Decided) -> float:
        """The model's FLOPs at the peak rate."""
        device = self._cluster.device
        peak = device.peak_flops["tf32" if plan.tf32 else plan.precision] * self._cluster.num_devices
        recomputed = 4 / 3 if plan.recompute == "full" and decided >= Decided.COMPUTATION else 1.0
        return self._step_flops * recomputed / peak

    def least_bytes(self, plan: Plan, decided: Decided) -> float:
        return 0.0

    @cached_property
    def _step_flops(self) -> float:
        return self._model.training_flops_per_token(self._work.sequence) * self._work.tokens
