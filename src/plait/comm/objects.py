"""Broadcast strings, and raise one rank's error on every rank so that none hangs."""

import json

import torch

from plait.comm.collectives import Group, all_reduce, broadcast
from plait.errors import CheckpointError


def broadcast_text(source: int, text: str, group: Group, device: torch.device) -> str:
    """Return the text of group rank `source`; the text of the other ranks is ignored. Collective."""
    encoded = text.encode() if group.rank == source else b""
    length = torch.tensor([len(encoded)], device=device)
    broadcast(length, group, source)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if encoded:
        buffer.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    broadcast(buffer, group, source)
    return buffer.cpu().numpy().tobytes().decode()


def raise_on_all(error: CheckpointError | None, group: Group, device: torch.device) -> None:
    """Raise the same error on every rank if any rank passes one: that of the lowest such rank. Collective."""
    first = torch.tensor([-group.rank if error is not None else -group.size], device=device)
    all_reduce(first, group, "max")
    source = -int(first.item())
    if source == group.size:
        return
    encoded = "" if error is None else encode_error(error)
    raise decode_error(broadcast_text(source, encoded, group, device)) from error


def encode_error(error: CheckpointError) -> str:
    """Serialize an error for another rank."""
    parts = (error.given, error.expected, error.hint)
    return json.dumps([error.fact, *(None if part is None else str(part) for part in parts)])


def decode_error(text: str) -> CheckpointError:
    """Return the error that `encode_error` serialized."""
    fact, given, expected, hint = json.loads(text)
    return CheckpointError(fact, given=given, expected=expected, hint=hint)
