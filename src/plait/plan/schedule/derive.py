"""Schedules over the stages of another schedule, where its ranks have them."""

from plait.plan.schedule.action import Action, B, F, Schedule


def forwards_only(schedule: Schedule, micros: int) -> Schedule:
    """Forwards of so many micro-batches: each rank takes its stages in turn, all micro-batches of one."""
    return Schedule.of(
        "inference",
        (
            [F(stage, micro) for stage in schedule.stages_of(rank) for micro in range(micros)]
            for rank in range(schedule.num_ranks)
        ),
    )


def one_micro(schedule: Schedule) -> Schedule:
    """Forward and backward of one micro-batch."""
    ranks: list[list[Action]] = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        ranks.append([*(F(stage, 0) for stage in stages), *(B(stage, 0) for stage in reversed(stages))])
    return Schedule.of("one micro-batch", ranks)
