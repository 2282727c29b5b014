"""Enumerate plans: all degrees on a number of ranks, combined with the policies that apply."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plait.errors import PlanError
from plait.plan import Plan

_SCHEDULES = ("1f1b", "interleaved", "zb-h1")


def all_plans(num_ranks: int, experts: int = 1) -> list[Plan]:
    """Return all valid plans on the ranks. `experts`: a number that `ep` has to divide.

    Every arrangement on pp, dp, rows and columns, at every ZeRO stage, with and without sequence parallelism,
    under three schedules; with hybrid sharding where dp is at least 4, and with every `ep`.
    """
    plans = []
    for pp, dp, rows, cols in _degrees(num_ranks):
        for policy in _policies(pp, dp, cols, math.gcd(dp, experts)):
            try:
                plans.append(Plan(pp=pp, dp=dp, tp=f"{rows}x{cols}", micro=2 if pp > 1 else 1, **policy))
            except PlanError:
                continue
    return plans


def simpler_plans(plan: Plan) -> dict[str, Plan]:
    """Return the plan without each of its parts, by the name of the part."""
    alone: dict[str, Any] = {"local_steps": 0, "outer": "average", "exchange": "fp32", "exchange_parts": 1}
    without_ep = {"ep": 1, "capacity": "none"}
    zero_defaults: dict[str, Any] = {
        **alone,
        "accumulate": "auto",
        "prefetch": 1,
        "reshard": "use",
        "offload": "none",
        "algorithm": "auto",
    }
    without: dict[str, dict[str, Any]] = {
        "tp": {"tp": "1", "sp": False},
        "sp": {"sp": False},
        "pp": {"pp": 1, "schedule": "1f1b", "chunks": 0, "stages": ""},
        "dp": {"dp": 1, **without_ep, "zero": 0, "shard": 0, "reduce": "fp32", **zero_defaults},
        "ep": without_ep,
        "capacity": {"capacity": "none"},
        "zero": {"zero": 0, "shard": 0, **zero_defaults},
        "local_steps": alone,
        "recompute": {"recompute": "none"},
        "router_balance": {"router_balance": "micro"},
        "compile": {"compile": False},
        "offload": {"offload": "none"},
        "micro": {"micro": 1},
        "schedule": {"schedule": "1f1b", "chunks": 0, "stages": ""},
    }
    used = [part for part in without if getattr(plan, part) != getattr(Plan(), part)]
    plans = {part: replace(plan, **without[part]) for part in used}
    return {part: other for part, other in plans.items() if other != plan}


def _degrees(num_ranks: int) -> Iterator[tuple[int, int, int, int]]:
    for pp in _divisors(num_ranks):
        for dp in _divisors(num_ranks // pp):
            grid = num_ranks // pp // dp
            for rows in _divisors(grid):
                yield pp, dp, rows, grid // rows


def _policies(pp: int, dp: int, cols: int, most_ep: int) -> Iterator[dict[str, Any]]:
    for zero in range(4) if dp > 1 else range(1):
        for shard in (0, dp // 2) if zero and dp >= 4 and dp % 2 == 0 else (0,):
            for sp in (False, True) if cols > 1 else (False,):
                for schedule in _SCHEDULES if pp > 1 else _SCHEDULES[:1]:
                    for ep in _divisors(most_ep):
                        yield {"zero": zero, "shard": shard, "sp": sp, "schedule": schedule, "ep": ep}


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
