"""Pipeline schedules: what each rank does with which stage and micro-batch, and in what order."""

from plait.plan.schedule.action import Action, B, F, Kind, Schedule, W
from plait.plan.schedule.generators import GENERATORS, make_schedule
from plait.plan.schedule.load import forwards_only, one_micro
from plait.plan.schedule.simulate import Durations, Span, Timeline, most_kept, peak_bytes, simulate
from plait.plan.schedule.validate import Checked, check

__all__ = [
    "GENERATORS",
    "Action",
    "B",
    "Checked",
    "Durations",
    "F",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "W",
    "check",
    "forwards_only",
    "make_schedule",
    "most_kept",
    "one_micro",
    "peak_bytes",
    "simulate",
]
