"""A transport with nobody at its other end: calls are counted by their ledger and move nothing.

What a rank would say can then be found out by the program that says it, on meta tensors and without any other
rank, whatever the number of ranks.
"""

import torch
from torch import Tensor

from plait.comm.transport import (
    Call,
    PartialReduceWork,
    ReduceWork,
    Work,
    narrow_is_less_to_read,
    narrow_is_less_to_send,
)


class NullTransport:
    """Answers what is asked of a transport as the one of that name would."""

    def __init__(self, name: str, num_ranks: int) -> None:
        """`name`: host, gloo or nccl."""
        self.name = name
        self.is_direct = name != "nccl"
        self.shares = name == "host"
        self._num_ranks = num_ranks

    def start(self, call: Call) -> Work:  # noqa: ARG002
        """Nobody hears it: it is over at once."""
        return Work()

    def run(self, call: Call) -> None:
        """Nobody hears it."""

    def start_sum(self, given: Tensor, *, scatter: bool, label: str) -> ReduceWork:  # noqa: ARG002
        """The sum is what was given, or as much of it as one rank's range has."""
        return PartialReduceWork([given[: given.numel() // self._num_ranks] if scatter else given], Work())

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        """By the rule of the transport of that name."""
        if self.shares:
            return narrow_is_less_to_read(self._num_ranks, narrow, wide)
        return self.is_direct and narrow_is_less_to_send(self._num_ranks, narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """On meta, as all tensors of a dry world are."""
        return torch.empty(numel, dtype=dtype, device="meta")

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        """On meta, where there is nothing to share."""
        return torch.zeros(numel, dtype=dtype, device="meta")

    def cut(self) -> None:
        """There is nothing to let go of."""
