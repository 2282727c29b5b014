"""Parameter servers in a plan: which policy admits pushes, and which other keys they allow.

[Note: roles of ranks]
Ranks 0 to dp - 1 are workers, each with all of the model; the ranks after them are servers. With
`server=colocated` every worker's process is also a server, and there are no other ranks. With
`server=replicated` each server also has a copy of the ranges of the server before it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.errors import PlanError

MAX_WORKERS = 62  # a set of workers is sent as the bits of a 64-bit integer
SERVER = ("dedicated", "colocated", "replicated")
_ALLOWED = {"dp", "micro", "accumulate", "precision", "recompute", "compile", "deterministic"}
_ALLOWED |= {"servers", "sync", "server", "local_steps", "outer", "exchange"}
TOP_K = re.compile(r"topk:(0\.[0-9]{0,5}[1-9])")
_SYNC = re.compile("all|async|(stale|backup):([0-9]{1,6})")


@dataclass(frozen=True)
class SyncPolicy:
    """When pushes are applied, and how far workers may be apart.

    kind    all: a step is the sum of every worker's push; backup: of the first `dp - number`; async and
            stale: each push is a step by itself, and with stale no worker is more than `number` clocks ahead
    """

    kind: str
    number: int = 0

    @classmethod
    @lru_cache(maxsize=64)  # every plan has one
    def parse(cls, text: str) -> "SyncPolicy":
        """Read `all`, `async`, `stale:3` or `backup:1`. Raises PlanError."""
        match = _SYNC.fullmatch(text)
        if match is None or match[0] == "backup:0":
            raise PlanError(
                "unknown value for sync",
                given=f"sync={text}",
                expected="all, async, stale:S (at most S clocks apart) or backup:B (B pushes are dropped)",
                hint="sync=all",
            )
        return cls(match[1], int(match[2])) if match[1] else cls(text)

    @property
    def sums(self) -> bool:
        """True if a step is the sum of several workers' pushes."""
        return self.kind in ("all", "backup")


def top_share(reduce: str) -> float:
    """The share of a gradient's elements that reduce=topk:R sends; 0 for other values."""
    match = TOP_K.fullmatch(reduce)
    return float(match[1]) if match else 0.0


def check_servers(plan: Mapping[str, Any], default: Mapping[str, Any]) -> None:
    """Raise PlanError for values of `servers`, `sync` and `server` that have no effect or that other keys
    exclude. `plan`, `default`: values by key."""
    policy = SyncPolicy.parse(plan["sync"])
    colocated = plan["server"] == "colocated"
    if plan["server"] == "replicated" and plan["servers"] < 2:
        raise PlanError(
            "a replica of a server is on another server",
            given=f"servers={plan['servers']} server=replicated",
            expected="2 servers or more",
            hint="servers=2 server=replicated, or no server",
        )
    if not (plan["servers"] or colocated):
        if top_share(str(plan["reduce"])):
            raise PlanError(
                "only parameter servers add up the largest elements of gradients",
                given=f"reduce={plan['reduce']}",
                expected="parameter servers: servers from 1, or server=colocated",
                hint=f"servers=1 reduce={plan['reduce']}, or reduce=powersgd",
            )
        if plan["sync"] != default["sync"]:
            raise PlanError(
                "sync has an effect only with parameter servers",
                given=f"sync={plan['sync']}",
                expected="servers from 1, or server=colocated",
                hint=f"servers=1 sync={plan['sync']}, or no sync",
            )
        return
    if colocated and plan["servers"]:
        raise PlanError(
            "colocated servers are as many as the workers",
            given=f"server=colocated servers={plan['servers']}",
            expected="a number of servers, or server=colocated",
            hint="no servers, or no server",
        )
    given = "server=colocated" if colocated else f"servers={plan['servers']}"
    excluded = [key for key in plan if plan[key] != default[key] and _is_excluded(key, plan[key])]
    if excluded:
        own = [key for key in ("servers", "server", "sync") if plan[key] != default[key]]
        raise PlanError(
            "parameter servers cannot be combined with these keys",
            given=f"{given} {' '.join(f'{key}={plan[key]}' for key in excluded)}",
            expected="workers that hold all of the model",
            hint=f"{_without(excluded)}, or {_without(own)}",
        )
    if not 0 < plan["dp"] <= MAX_WORKERS:
        raise PlanError(
            "parameter servers need a number of workers",
            given=f"dp={plan['dp'] or 'auto'} {given}",
            expected=f"dp from 1 to {MAX_WORKERS}",
            hint=f"dp={min(max(plan['dp'], 1), MAX_WORKERS)}",
        )
    if policy.kind == "backup" and policy.number >= plan["dp"]:
        raise PlanError(
            "sync drops the pushes of all workers",
            given=f"dp={plan['dp']} sync={plan['sync']}",
            expected="fewer backups than workers",
            hint="no sync",
        )


def _without(keys: list[str]) -> str:
    return " and ".join(f"no {key}" for key in keys)


def _is_excluded(key: str, value: object) -> bool:
    if key == "reduce":  # PowerSGD's factors are of all workers together
        return str(value).startswith("powersgd")
    return key not in _ALLOWED or value == "fp16"  # fp16: workers would have different loss scales


def no_servers_error(purpose: str, plan: str, dp: int) -> PlanError:
    """The error for a plan with servers where there are none."""
    return PlanError(
        f"{purpose} does not know parameter servers",
        given=plan,
        expected="a plan without them",
        hint=f'"dp={dp} zero=1", which computes the same as sync=all',
    )
