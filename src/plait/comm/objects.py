"""What one rank knows becomes known to all: a text; a mistake, so that nobody waits for who is not coming."""

import json

import torch

from plait.comm.collectives import Group, all_reduce, broadcast
from plait.errors import CheckpointError


def text_of(source: int, text: str, group: Group, device: torch.device) -> str:
    """The text that rank `source` of the group gives, on all of them; what the others give is not looked at.
    Every rank must call it."""
    said = text.encode() if group.rank == source else b""
    length = torch.tensor([len(said)], device=device)
    broadcast(length, group, source)
    found = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if said:
        found.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    broadcast(found, group, source)
    return found.cpu().numpy().tobytes().decode()


def raise_on_all(error: CheckpointError | None, group: Group, device: torch.device) -> None:
    """Raises the error that a rank of the group gives, on all of them the same: the first one's. Every rank
    must call it."""
    first = torch.tensor([-group.rank if error is not None else -group.size], device=device)
    all_reduce(first, group, "max")
    source = -int(first.item())
    if source == group.size:
        return
    said = "" if error is None else packed(error)
    raise unpacked(text_of(source, said, group, device)) from error


def packed(error: CheckpointError) -> str:
    """As text, for another rank."""
    rest = (error.given, error.expected, error.hint)
    return json.dumps([error.fact, *(None if part is None else str(part) for part in rest)])


def unpacked(text: str) -> CheckpointError:
    """The error that `packed` was given."""
    fact, given, expected, hint = json.loads(text)
    return CheckpointError(fact, given=given, expected=expected, hint=hint)
