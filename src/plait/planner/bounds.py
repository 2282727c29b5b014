"""Estimates of the plans of a search, and lower bounds of their time and memory.

[Note: bound of a pipeline's time]
A rank cannot start before the forwards of the stages ahead of its first one, computes all its actions, and
after its last backward of that stage the backwards of the stages ahead follow. Weight gradients that are
split off can fill that last wait, so it counts without them. The step takes at least the longest such sum
over the ranks. While the schedule is open, it takes at least the mean of the ranks' computation.

Once the schedule is decided, it is simulated without the communication of sharding. With it, the step takes
at least that and the exposed reductions after it, and, if parameters are gathered for every micro-batch, the
longest sum with the gathers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import add, attrgetter, itemgetter
from typing import NamedTuple

from plait.plan import Layout, MemoryUse, Plan
from plait.plan.schedule.generators import GENERATORS
from plait.plan.schedule.load import stages_by_rank
from plait.plan.schedule.simulate import PipelineEnds
from plait.planner.cluster import Cluster
from plait.planner.communication import Links
from plait.planner.compute import Rates
from plait.planner.memory import peak_memory, rank_layouts, upper_bytes, without_sharding
from plait.planner.model_shape import ModelShape
from plait.planner.space import SEARCHED, Decided
from plait.planner.step_estimate import (
    Overlapped,
    Software,
    StageSeconds,
    StepEstimate,
    Workload,
    estimate_step,
    pipeline_ends,
    stage_gathers,
    stage_seconds,
    step_reductions,
    update_s,
)


class _Simulated(NamedTuple):
    """A schedule without the communication of sharding."""

    stages: tuple[StageSeconds, ...]
    ends: PipelineEnds
    layouts: tuple[Layout, ...]  # of the ranks
    differ: tuple[Layout, ...]  # of these, those of different sizes


# For the many plans of a search: looking up a member takes long.
_, _, _COMPUTATION, _SCHEDULE, _SIMULATED, _STATES, _ALL = Decided


class EstimateCache:
    """Estimates of the plans of one model, cluster and workload, each computed once. Bounds hold for all
    plans that agree with `plan` in the keys decided so far."""

    def __init__(self, model: ModelShape, cluster: Cluster, work: Workload, software: Software) -> None:
        self._model, self._cluster, self._work, self._software = model, cluster, work, software
        self._links = Links.of(cluster, cluster.constants)
        self._estimates: dict[Plan, StepEstimate] = {}
        self._memory: dict[Plan, float] = {}
        self._seconds: dict[Decided, dict[Plan, float]] = {level: {} for level in Decided}
        self._totals: dict[tuple[object, ...], float] = {}
        self._pipelines: dict[tuple[object, ...], _Simulated] = {}
        self._spans: dict[tuple[object, ...], float] = {}
        self._uses: dict[tuple[object, ...], tuple[MemoryUse, float]] = {}

    def estimate(self, plan: Plan) -> StepEstimate:
        if plan not in self._estimates:
            self._estimates[plan] = estimate_step(
                self._model, plan, self._cluster, self._work, self._software
            )
        return self._estimates[plan]

    def memory_bytes(self, plan: Plan) -> float:
        """Return the upper end of the interval of the fullest rank's memory."""
        if plan not in self._memory:
            self._memory[plan] = peak_memory(self._model, plan, self._cluster, self._work, self._software)[1]
        return self._memory[plan]

    def least_seconds(self, plan: Plan, decided: Decided) -> float:
        """See [Note: bound of a pipeline's time]."""
        known = self._seconds[decided]
        least = known.get(plan)
        if least is None:
            least = known[plan] = self._least_seconds(plan, decided)
        return least

    def _least_seconds(self, plan: Plan, decided: Decided) -> float:
        if decided is _ALL:
            return self._sharded_s(plan)
        if decided is _STATES:  # at least the optimizer's, with all of dp as shards
            simulated = self._simulated(plan)
            return self._span_s(simulated.ends.end) + self._update_s(plan, simulated.differ)
        if decided is _SIMULATED:
            return self._span_s(self._simulated(plan).ends.end)
        if decided is _SCHEDULE:
            return self._pipeline_s(plan, *list(zip(*self._stages(plan), strict=True))[:3])
        options = (False, True) if decided < _COMPUTATION and plan.cols > 1 else (plan.sp,)
        return plan.micro * min(self._total_s(plan, sp) for sp in options) / plan.pp

    def _total_s(self, plan: Plan, sp: bool) -> float:
        """Seconds of one micro-batch on all stages together, which does not depend on the stages."""
        key = (plan.tp, plan.cp, plan.cp_method, plan.dp * plan.micro, plan.ep, sp, plan.recompute)
        if key not in self._totals:
            stages = self._stages(replace(plan, sp=sp))
            self._totals[key] = sum(stage.forward + stage.backward + stage.weight for stage in stages)
        return self._totals[key]

    def _stages(self, plan: Plan) -> tuple[StageSeconds, ...]:
        return stage_seconds(self._model, plan, self._cluster, self._work, self._software)

    def _pipeline_s(
        self, plan: Plan, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float]
    ) -> float:
        """See [Note: bound of a pipeline's time]. Seconds by stage."""
        generator, micro = GENERATORS.get(plan.schedule), plan.micro
        splits = generator is None or generator.splits
        fill = drain = longest = 0.0
        both = list(map(add, forward, backward))
        for first, of_own in _in_order(plan.schedule, plan.pp, plan.num_chunks):
            if of_own is None:
                computed, weights = micro * both[first], micro * weight[first]
            else:
                computed, weights = micro * sum(of_own(both)), micro * sum(of_own(weight))
            rest = (weights if weights > drain else drain) if splits else weights + drain
            longest = max(longest, fill + computed + rest)
            fill += forward[first]
            drain += backward[first] + (0.0 if splits else weight[first])
        return longest / self._cluster.ranks_per_core

    def _simulated(self, plan: Plan) -> "_Simulated":
        key = computation(plan)
        if key not in self._pipelines:
            stages = self._stages(plan)
            nothing = [Overlapped(0.0, 0.0)] * len(stages)
            ends = pipeline_ends(self._model, plan, self._links, stages, nothing, self._work)
            layouts = rank_layouts(self._model, plan, self._software)
            differ = {(layout.numel, layout.expert_numel): layout for layout in layouts}
            self._pipelines[key] = _Simulated(stages, ends, layouts, tuple(differ.values()))
        return self._pipelines[key]

    def _span_s(self, ends: Iterable[float]) -> float:
        return max(ends) / self._cluster.ranks_per_core

    def _sharded_s(self, plan: Plan) -> float:
        reduces = (plan.zero, plan.shard_degree, plan.accumulates_full, plan.reshard)
        key = (*computation(plan), *reduces)  # and not `offload`
        if key not in self._spans:
            self._spans[key] = self._sharded_span_s(plan)
        return self._spans[key] + self._update_s(plan, self._simulated(plan).differ)

    def _sharded_span_s(self, plan: Plan) -> float:
        stages, ends, layouts, _ = self._simulated(plan)
        links, software, constants = self._links, self._software, self._cluster.constants
        data = step_reductions(plan, links, stages, layouts, software, constants)
        span = self._span_s(end + rank.exposed for end, rank in zip(ends.end, data, strict=True))
        gathers = stage_gathers(self._model, plan, links, stages, software, constants)
        if any(stage.forward or stage.backward for stage in gathers):
            forward, backward, weight, *_ = zip(*stages, strict=True)
            _, _, ahead, back, _ = zip(*gathers, strict=True)
            forward, backward = tuple(map(add, forward, ahead)), tuple(map(add, backward, back))
            span = max(span, self._pipeline_s(plan, forward, backward, weight))
        return span

    def _update_s(self, plan: Plan, layouts: Sequence[Layout]) -> float:
        constants = self._cluster.constants
        rates = Rates.of(self._cluster.device, plan.precision, plan.tf32, constants)
        seconds = [update_s(plan, each, 0, rates, self._links, self._software) for each in layouts]
        return min(seconds) + constants.step_s

    def least_bytes(self, plan: Plan, decided: Decided) -> float:
        """The first rank's activations, with the model states that it keeps, then all that it holds."""
        if decided < Decided.SCHEDULE:
            return 0.0
        key = computation(plan)
        if key not in self._uses:
            self._uses[key] = self._first_rank(without_sharding(plan))
        use, _ = self._uses[key]
        states = 0
        if decided >= Decided.STATES:  # `shard` and `accumulate` have the defaults until they are decided
            share = 0 if plan.offload != "none" else 1 / plan.shard_degree
            states += int(use.parameters * (share if plan.zero == 3 else 1))
            full = plan.keeps_full_grads if decided is Decided.ALL else plan.zero < 2
            states += int(use.gradients * (1 if full else share))
            states += int((use.master + use.optimizer) * share)
        return upper_bytes(states, (use.activations or 0) + use.loss + use.allocator + use.runtime)

    def first_rank_bytes(self, plan: Plan) -> float:
        """Return a lower bound of `memory_bytes`, in a third of its time."""
        return self._first_rank(plan)[1]

    def _first_rank(self, plan: Plan) -> tuple[MemoryUse, float]:
        return peak_memory(self._model, plan, self._cluster, self._work, self._software, only_first=True)


@lru_cache(maxsize=1 << 10)
def _in_order(
    schedule: str, pp: int, chunks: int
) -> list[tuple[int, Callable[[Sequence[float]], Iterable[float]] | None]]:
    """Return the first stage of every rank, in order, and what reads values of all its stages, if several."""
    of_ranks = sorted(stages_by_rank(schedule, pp, chunks))
    return [(own[0], itemgetter(*own) if len(own) > 1 else None) for own in of_ranks]


# The searched keys on which the time of a pipeline without sharding depends.
computation = attrgetter(*SEARCHED)
