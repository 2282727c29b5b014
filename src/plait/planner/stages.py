"""The number of blocks of every pipeline stage, as the engine balances them."""

from functools import lru_cache
from typing import NamedTuple

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.schedule.load import stages_of
from plait.plan.stages import LOSS_AS_HIDDEN_UNITS, balance_blocks
from plait.planner.model_shape import ModelShape
from plait.planner.workload import PLAIT, Software


class StageKind(NamedTuple):
    """Blocks of a stage, of which `dense` ones have no experts, and ends of the model."""

    blocks: int
    is_first: bool
    is_last: bool
    dense: int


@lru_cache(maxsize=1 << 12)
def stage_kinds(model: ModelShape, counts: tuple[int, ...]) -> tuple[StageKind, ...]:
    """Return the kind of every stage, of which there are few."""
    found, dense = [], model.dense_layers
    for stage, blocks in enumerate(counts):
        found.append(StageKind(blocks, stage == 0, stage == len(counts) - 1, min(blocks, dense)))
        dense -= found[-1].dense
    return tuple(found)


def block_counts(model: ModelShape, plan: Plan, software: Software = PLAIT) -> tuple[int, ...]:
    """Blocks of every stage. Raises PlanError if there are fewer blocks than stages."""
    if plan.blocks_per_stage is not None:
        counts = plan.blocks_per_stage
        if sum(counts) != model.layers:
            raise PlanError(
                "the stages' blocks do not add up to the model's",
                given=f"stages={plan.stages}",
                expected=f"{model.layers} blocks",
                hint="no stages",
            )
        return counts
    schedule = plan.schedule, plan.pp, plan.num_chunks
    balanced = _counts(model, *schedule, software.splits_evenly)
    if balanced is None:
        raise PlanError(
            f"{model.layers} blocks cannot fill {len(stages_of(*schedule))} stages",
            given=str(plan),
            expected="at least one block on every stage but the first and the last",
            hint="a smaller pp or chunks",
        )
    return balanced


@lru_cache(maxsize=1 << 12)
def _counts(
    model: ModelShape, schedule: str, pp: int, chunks: int, splits_evenly: bool
) -> tuple[int, ...] | None:
    """Return None for too many stages."""
    ranks = stages_of(schedule, pp, chunks)
    if splits_evenly:
        for ends in (0, 1):
            each, rest = divmod(model.layers + 2 * ends, len(ranks))
            if each > 0 and rest == 0:
                return (each - ends, *(each,) * (len(ranks) - 2), each - ends) if len(ranks) > 1 else (each,)
    if len(ranks) > model.layers + 2 * (not splits_evenly):
        return None
    head = (model.hidden + LOSS_AS_HIDDEN_UNITS) * model.vocab / model.block_matmul_params
    return _balanced(model.layers, ranks, head, not splits_evenly)


@lru_cache(maxsize=1 << 12)
def _balanced(layers: int, ranks: tuple[int, ...], head: float, bare_ends: bool) -> tuple[int, ...]:
    if len(ranks) == 1:
        return (layers,)
    return balance_blocks([1.0] * layers, len(ranks), last=head, ranks=ranks, bare_ends=bare_ends)
