"""Recordings of what a rank does on the simulated device. On a real one nothing is recorded, and `recorded`
yields None."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from support.virtual_cuda.build import MODULE
from support.virtual_cuda.log import Entry, Kind
from support.virtual_cuda.races import Findings, analyze


@dataclass
class Recording:
    """One rank's part of a recorded piece of program; can be pickled.

    `communicators`: names and ranks of all that this rank has made, in order; `collectives`: the recorded
    ones in the order of issue, as (index of the communicator, its name and number there), without messages;
    `max_ctas`: limits of kernels' thread blocks, by index of the communicators that have one.
    """

    findings: Findings = field(default_factory=Findings)
    communicators: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    collectives: list[tuple[int, str, int]] = field(default_factory=list)
    max_ctas: dict[int, int] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)


@contextmanager
def recorded(*, keep_log: bool = False) -> Iterator[Recording | None]:
    """Record the body, and analyze it at its end. `keep_log`: also return the log."""
    native = sys.modules.get(MODULE)
    if native is None:
        yield None
        return
    recording = Recording()
    torch.cuda.synchronize()
    native.take_entries()
    native.set_recording(True, True)
    try:
        yield recording
    finally:
        log = [Entry(*entry) for entry in native.take_entries()]
        torch.cuda.synchronize()  # copies from memory that the host has overwritten are found now
        native.set_recording(False, False)
        last = [Entry(*entry) for entry in native.take_entries()]
        log += [entry for entry in last if entry.kind != Kind.SYNC_DEVICE]
    nccl = sys.modules.get("support.virtual_cuda.nccl")
    made = nccl.communicators() if nccl else []
    recording.communicators = [(it.name, it.ranks) for it in made]
    recording.max_ctas = {it.number: it.max_ctas for it in made if it.max_ctas is not None}
    recording.findings = analyze(log)
    recording.collectives = [
        (entry.id, entry.name, entry.bytes)
        for entry in log
        if entry.kind == Kind.OP and entry.name.startswith("nccl:") and not _is_message(entry)
    ]
    recording.log = log if keep_log else []


def order_errors(recordings: list[Recording]) -> list[str]:
    """Return pairs of ranks that issue the collectives of their common communicators in different orders.

    NCCL may deadlock if two communicators' kernels start in different orders on two ranks.
    """
    found = []
    for rank, one in enumerate(recordings):
        for peer in range(rank + 1, len(recordings)):
            both = {name for name, ranks in one.communicators if {rank, peer} <= {*ranks}}
            ours, theirs = (_named(recording, both) for recording in (one, recordings[peer]))
            if ours != theirs:
                index = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                found.append(
                    f"ranks {rank} and {peer}: collective {index} is {ours[index : index + 1]}, "
                    f"and {theirs[index : index + 1]}"
                )
    return found


def _named(recording: Recording, names: set[str]) -> list[tuple[str, str]]:
    by_index = [name for name, _ in recording.communicators]
    return [(by_index[index], what) for index, what, _ in recording.collectives if by_index[index] in names]


def _is_message(entry: Entry) -> bool:
    return entry.name in ("nccl:send", "nccl:recv")
