"""Pipeline schedules: what each rank does with which stage and micro-batch, and in what order."""

from plait.plan.schedule.action import Action, B, F, Kind, Schedule, W
from plait.plan.schedule.clock import Durations, Span, Timeline

__all__ = ["Action", "B", "Durations", "F", "Kind", "Schedule", "Span", "Timeline", "W"]
