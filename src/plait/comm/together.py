"""A mistake that one rank has found becomes one of all ranks, so that nobody waits for who is not coming."""

import json

import torch

from plait.comm.verbs import Group, all_reduce, broadcast
from plait.errors import CheckpointError


def raise_together(error: CheckpointError | None, group: Group, device: torch.device) -> None:
    """Raises the error that a rank of the group gives, on all of them the same: the first one's. Every rank
    must call it."""
    first = torch.tensor([-group.rank if error is not None else -group.size], device=device)
    all_reduce(first, group, "max")
    source = -int(first.item())
    if source == group.size:
        return
    said = b""
    if error is not None and group.rank == source:
        letter = [error.fact, *(None if part is None else str(part) for part in _rest(error))]
        said = json.dumps(letter).encode()
    length = torch.tensor([len(said)], device=device)
    broadcast(length, group, source)
    text = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if said:
        text.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    broadcast(text, group, source)
    fact, given, expected, hint = json.loads(text.cpu().numpy().tobytes())
    told = CheckpointError(fact, given=given, expected=expected, hint=hint)
    raise told from error


def _rest(error: CheckpointError) -> tuple[object, object, object]:
    return error.given, error.expected, error.hint
