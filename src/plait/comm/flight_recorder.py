"""Collectives in progress on the device, from torch's flight recorder."""

import json
from typing import Any

import torch


def pending_collectives() -> list[str]:
    """Describe the collectives that this rank has started and that are not complete, oldest first. Does not
    wait for the device. Empty if NCCL is not used."""
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # a build without NCCL
        return []
    return describe_trace(dump(includeCollectives=True, onlyActive=True))


def describe_trace(trace: bytes) -> list[str]:
    """Describe the incomplete entries of a trace. Unknown formats have none."""
    try:
        entries = json.loads(trace).get("entries", [])
        return [_describe(entry) for entry in entries if entry.get("state") != "completed"]
    except (AttributeError, TypeError, ValueError):
        return []


def _describe(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "a collective")).removeprefix("nccl:")
    group = entry.get("process_group") or ["", ""]
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return f"{name} number {number} of group {group[0]}, {entry.get('state')}"
