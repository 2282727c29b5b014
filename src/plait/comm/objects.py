"""Send strings as tensors of bytes, and raise one rank's error on every rank so that none hangs."""

import json

import numpy as np
import torch
from torch import Tensor

from plait import errors
from plait.comm.collectives import Group, all_gather, all_reduce, broadcast, receive, send
from plait.errors import PlaitError


def encode_text(text: str) -> Tensor:
    """Return the text's UTF-8 bytes, on the CPU."""
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), np.uint8))


def decode_text(encoded: Tensor) -> str:
    """Return the text that `encode_text` encoded."""
    return encoded.cpu().numpy().tobytes().decode()


def broadcast_text(source: int, text: str, group: Group, device: torch.device) -> str:
    """Return the text of group rank `source`; the text of the other ranks is ignored. Collective."""
    encoded = encode_text(text).to(device)
    length = torch.tensor([len(encoded)], device=device)
    broadcast(length, group, source)
    if group.rank != source:
        encoded = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    broadcast(encoded, group, source)
    return decode_text(encoded)


def gather_texts(text: str, group: Group, device: torch.device, *, label: str = "") -> list[str]:
    """Return the texts of all ranks, without NUL at their end, in order of rank. Collective."""
    encoded = encode_text(text)
    length = torch.tensor([len(encoded)], device=device)
    all_reduce(length, group, "max", label=label)
    row = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    row[: len(encoded)] = encoded
    rows = torch.empty(group.size * len(row), dtype=torch.uint8, device=device)
    all_gather(rows, row, group, label=label)
    return [decode_text(row).rstrip("\0") for row in rows.view(group.size, -1)]


def send_text(text: str, group: Group, to: int, device: torch.device) -> None:
    """Send to group rank `to`, which calls `receive_text`."""
    encoded = encode_text(text).to(device)
    send(torch.tensor([len(encoded)], device=device), group, to)
    send(encoded, group, to)


def receive_text(group: Group, source: int, device: torch.device) -> str:
    """Return the text that group rank `source` sends."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    receive(length, group, source)
    encoded = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    receive(encoded, group, source)
    return decode_text(encoded)


def raise_on_all(error: PlaitError | None, group: Group, device: torch.device) -> None:
    """Raise the same error on every rank if any rank passes one: that of the lowest such rank. Collective."""
    first = torch.tensor([-group.rank if error is not None else -group.size], device=device)
    all_reduce(first, group, "max")
    source = -int(first.item())
    if source == group.size:
        return
    encoded = "" if error is None else encode_error(error)
    raise decode_error(broadcast_text(source, encoded, group, device)) from error


def encode_error(error: PlaitError) -> str:
    """Serialize an error for another rank."""
    parts = (error.given, error.expected, error.hint)
    texts = [error.fact, *(None if part is None else str(part) for part in parts)]
    return json.dumps([type(error).__name__, *texts])


def decode_error(text: str) -> PlaitError:
    """Return the error that `encode_error` serialized; a RunError for a class that is not in `errors`."""
    name, fact, given, expected, hint = json.loads(text)
    kind = getattr(errors, name, errors.RunError)
    assert issubclass(kind, PlaitError), f"{name} is not an error class"
    decoded: PlaitError = kind(fact, given=given, expected=expected, hint=hint)
    return decoded
