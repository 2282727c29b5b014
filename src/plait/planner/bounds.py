"""Prices of the plans of a search, and lower bounds of their time and memory.

[Note: bound of a pipeline's time]
A rank cannot start before the forwards of the stages ahead of its first one, computes all its actions, and
after its last backward of that stage the backwards of the stages ahead follow. Weight gradients that are
split off can fill that last wait, so it counts without them. The step takes at least the longest such sum
over the ranks. While the schedule is open, it takes at least the mean of the ranks' computation."""

from dataclasses import replace
from operator import attrgetter

from plait.plan import MemoryUse, Plan
from plait.plan.schedule.generators import GENERATORS
from plait.planner.cluster import Cluster
from plait.planner.memory import peak_memory
from plait.planner.model_shape import ModelShape
from plait.planner.price import Price, Software, Workload, price, stage_seconds
from plait.planner.space import SEARCHED, Decided
from plait.planner.timeline import stages_of


class Prices:
    """Prices of the plans of one model, cluster and workload, each computed once. Bounds hold for all plans
    that agree with `plan` in the keys decided so far."""

    def __init__(self, model: ModelShape, cluster: Cluster, work: Workload, software: Software) -> None:
        self._model, self._cluster, self._work, self._software = model, cluster, work, software
        self._prices: dict[Plan, Price] = {}
        self._memory: dict[Plan, float] = {}
        self._totals: dict[tuple[object, ...], float] = {}
        self._pipelines: dict[tuple[object, ...], float] = {}
        self._uses: dict[tuple[object, ...], tuple[MemoryUse, float]] = {}

    def price(self, plan: Plan) -> Price:
        if plan not in self._prices:
            self._prices[plan] = price(self._model, plan, self._cluster, self._work, self._software)
        return self._prices[plan]

    def memory_bytes(self, plan: Plan) -> float:
        """Return the upper end of the interval of the fullest rank's memory."""
        if plan not in self._memory:
            self._memory[plan] = peak_memory(self._model, plan, self._cluster, self._work, self._software)[1]
        return self._memory[plan]

    def least_seconds(self, plan: Plan, decided: Decided) -> float:
        """See [Note: bound of a pipeline's time]."""
        if decided >= Decided.SCHEDULE:
            key = _computation(plan)
            if key not in self._pipelines:
                self._pipelines[key] = self._pipeline_s(plan)
            return self._pipelines[key]
        options = [plan]
        if decided < Decided.COMPUTATION and plan.cols > 1:
            options.append(replace(plan, sp=True))
        return plan.micro * min(map(self._total_s, options)) / plan.pp

    def _total_s(self, plan: Plan) -> float:
        """Seconds of one micro-batch on all stages together, which does not depend on the stages."""
        key = (plan.tp, plan.dp * plan.micro, plan.sp, plan.recompute)
        if key not in self._totals:
            stages = stage_seconds(self._model, plan, self._cluster, self._work, self._software)
            self._totals[key] = sum(stage.forward + stage.backward + stage.weight for stage in stages)
        return self._totals[key]

    def _pipeline_s(self, plan: Plan) -> float:
        stages = stage_seconds(self._model, plan, self._cluster, self._work, self._software)
        ranks = stages_of(plan.schedule, plan.pp, plan.num_chunks)
        generator = GENERATORS.get(plan.schedule)
        splits = generator is None or generator.splits
        forward, backward, weight = [0.0] * plan.pp, [0.0] * plan.pp, [0.0] * plan.pp
        for stage, rank in zip(stages, ranks, strict=True):
            forward[rank] += stage.forward
            backward[rank] += stage.backward
            weight[rank] += stage.weight
        fill = drain = longest = 0.0
        for rank in dict.fromkeys(ranks):  # in order of their first stages
            first = stages[ranks.index(rank)]
            computed = plan.micro * (forward[rank] + backward[rank])
            weights = plan.micro * weight[rank]
            rest = max(weights, drain) if splits else weights + drain
            longest = max(longest, fill + computed + rest)
            fill += first.forward
            drain += first.backward + (0.0 if splits else first.weight)
        return longest / self._cluster.ranks_per_core

    def least_bytes(self, plan: Plan, decided: Decided) -> float:
        """The first rank's activations, with the model states that it keeps, then all that it holds."""
        if decided < Decided.SCHEDULE:
            return 0.0
        key = _computation(plan)
        if key not in self._uses:
            base = replace(
                plan, zero=0, shard=0, accumulate="auto", reshard="use", prefetch=1, offload="none"
            )
            self._uses[key] = self._first_rank(base)
        use, high = self._uses[key]
        tensors = use.activations or 0
        if decided is Decided.ALL:
            share = 0 if plan.offload != "none" else 1 / plan.shard_degree
            tensors += int(use.parameters * (share if plan.zero == 3 else 1))
            tensors += int(use.gradients * (1 if plan.keeps_full_grads else share))
            tensors += int((use.master + use.optimizer) * share)
        least = tensors * high / use.total * (1 + use.allocator / use.tensors)
        if decided is Decided.ALL and least <= self._cluster.device.memory_bytes:
            return self._first_rank(plan)[1]
        return least

    def _first_rank(self, plan: Plan) -> tuple[MemoryUse, float]:
        return peak_memory(self._model, plan, self._cluster, self._work, self._software, only_first=True)


# What the time of a pipeline without sharding depends on, of the keys in which the plans of a search differ.
_computation = attrgetter(*SEARCHED)
