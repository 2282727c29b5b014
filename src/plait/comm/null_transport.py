"""A fake transport for dry runs: calls are logged by the group and move nothing.

It shows what a rank would communicate, by running the program on meta tensors in one process, for any number
of ranks.
"""

import torch
from torch import Tensor

from plait.comm.transport import (
    Call,
    PartialReduceWork,
    ReduceWork,
    Work,
    narrow_reads_less,
    narrow_sends_less,
)


class NullTransport:
    """A transport with the properties of the named one, and no peers."""

    def __init__(self, name: str, num_ranks: int) -> None:
        """`name`: host, gloo or nccl."""
        self.name = name
        self.is_direct = name != "nccl"
        self.shares_memory = name == "host"
        self.takes_mean = name != "gloo"
        self._num_ranks = num_ranks

    def start(self, call: Call) -> Work:  # noqa: ARG002
        return Work()

    def run(self, call: Call) -> None: ...

    def exchange(self, call: Call, sends: object, receives: object) -> Work:  # noqa: ARG002
        return Work()

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str) -> ReduceWork:  # noqa: ARG002
        """Return the input as the sum, or one rank's range of it."""
        return PartialReduceWork([tensor[: tensor.numel() // self._num_ranks] if scatter else tensor], Work())

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        if self.shares_memory:
            return narrow_reads_less(self._num_ranks, narrow, wide)
        return self.is_direct and narrow_sends_less(self._num_ranks, narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device="meta")

    def close(self) -> None: ...
