"""Pipeline schedules: the ordered actions of every rank, on stages and micro-batches."""

from plait.plan.schedule.action import Action, B, F, Kind, Schedule, W
from plait.plan.schedule.generators import GENERATORS, compile_conflict, make_schedule
from plait.plan.schedule.load import forwards_only, one_micro_batch
from plait.plan.schedule.simulate import Durations, Span, Timeline, simulate
from plait.plan.schedule.validate import ScheduleNeeds, check, peak_activation_bytes

__all__ = [
    "GENERATORS",
    "Action",
    "B",
    "Durations",
    "F",
    "Kind",
    "Schedule",
    "ScheduleNeeds",
    "Span",
    "Timeline",
    "W",
    "check",
    "compile_conflict",
    "forwards_only",
    "make_schedule",
    "one_micro_batch",
    "peak_activation_bytes",
    "simulate",
]
