"""Predict the step of one plan on a cluster: time by part, memory of the fullest rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.plan import MemoryUse, Plan
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """What a step computes: `batch` sequences of `sequence` tokens, over all data ranks and micro-batches."""

    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch


@dataclass(frozen=True)
class Software:
    """Properties of the training program that change the time of a plan. The defaults are this product's own.

    Published runs were made by other programs, whose reports say which of these they have.

    fused_attention    flash attention: scores are not stored
    overlaps_data      gradients are reduced, and parameters gathered, during the computation
    """

    fused_attention: bool = True
    overlaps_data: bool = True


@dataclass(frozen=True)
class Price:
    """A prediction. `parts`: seconds of the step on the slowest rank by what they are spent on (compute, recompute,
    bubble, tensor communication, data communication, pipeline communication, optimizer, ...): exposed time only, they
    add up to `step_s`. `hidden`: seconds of communication behind computation, by the same names."""

    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    memory: MemoryUse  # of the fullest rank
    memory_high_bytes: float  # upper end of its interval: a plan fits if this does
    bubble: float  # idle fraction
    model_flops: float  # of the whole step, causal attention
    notes: tuple[str, ...] = field(default=())


def price(
    model: ModelShape, plan: Plan, cluster: Cluster, work: Workload, software: Software = Software()
) -> Price:
    """Predict a step of `plan`. Raises PlanError for a plan that does not fit the model, the cluster or the batch."""
    raise AssertionError("being written")
