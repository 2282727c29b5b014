"""A sparse gradient: of an embedding with `sparse=True`, alone in its bucket.

Ranks have different rows, so theirs are gathered and added up: (p-1) x the largest rank's rows arrive at
each. The messages depend on one another, so this is done when the bucket lands, behind backward.
"""

import torch
from torch import Tensor, nn

from plait.comm.verbs import Group, all_gather
from plait.parallel.ddp.arrivals import Waiting
from plait.parallel.ddp.texts import not_sparse


class SparseBucket:
    """As `Bucket`, for one parameter with a sparse gradient."""

    def __init__(self, index: int, number: int, parameter: nn.Parameter, name: str) -> None:
        self.index = index
        self.numbers = (number,)
        self.parameters = [parameter]
        self.nbytes = parameter.numel() * parameter.dtype.itemsize
        self.factor: float | None = None
        self.name = name
        self.bytes_of = [self.nbytes]
        self.waiting = Waiting(1, self.nbytes)
        self._gradient: Tensor | None = None

    def begin(self) -> None:
        self.waiting.begin()
        self._gradient = None

    def flush(self) -> None:
        """Takes the gradient."""
        gradient = self.parameters[0].grad
        if gradient is None or gradient.layout is not torch.sparse_coo:
            raise not_sparse(self.name, is_there=gradient is not None)
        if self.factor is not None:
            with torch.no_grad():
                gradient.mul_(self.factor)
        self._gradient = gradient
        self.waiting.clear()

    def part(self) -> None:
        """Its gradient is its own anyway."""

    def is_unreached(self, _: int) -> bool:
        return False

    def keep_apart(self, _: int) -> None:
        """It is nobody else's."""

    def hand_over(self) -> None:
        """It lies in no other memory."""

    def seal(self) -> Tensor:
        assert self._gradient is not None, f"{self.name}: sealed before its gradient has come"
        return self._gradient

    def zeros(self) -> Tensor:
        like = self.parameters[0]
        return torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            like.new_zeros(0, *like.shape[1:]),
            like.shape,
            device=like.device,
            check_invariants=False,
        )

    def views_of(self, gradient: Tensor) -> list[Tensor]:
        return [gradient]

    def land(self, result: Tensor, _: object) -> None:
        """The result is the parameter's gradient."""
        assert self._gradient is not None, f"{self.name}: landed before its gradient has come"
        with torch.no_grad():
            self._gradient.copy_(result)

    def drop(self) -> None:
        self.begin()


def sum_of_rows(gradient: Tensor, group: Group, name: str) -> Tensor:
    """The sum over the ranks of their sparse (COO) gradients. All of them call it together."""
    mine = gradient.coalesce()
    if group.size == 1:
        return mine
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(group.size, dtype=torch.int64, device=indices.device)
    all_gather(counts, counts.new_tensor([indices.shape[1]]), group, label=f"numbers of rows of {name}")
    sizes = counts.tolist()
    largest = max(sizes)
    if largest == 0:
        return mine
    gathered_indices = _gathered(indices.mT, largest, group, name)
    gathered_values = _gathered(values, largest, group, name)
    rows = torch.cat([part[:size] for part, size in zip(gathered_indices, sizes, strict=True)])
    terms = torch.cat([part[:size] for part, size in zip(gathered_values, sizes, strict=True)])
    return torch.sparse_coo_tensor(rows.mT, terms, gradient.shape, check_invariants=False).coalesce()


def _gathered(rows: Tensor, largest: int, group: Group, name: str) -> Tensor:
    """The ranks' rows, (ranks, largest, ...)."""
    padded = rows.new_zeros(largest, *rows.shape[1:])
    padded[: len(rows)] = rows
    whole = rows.new_empty(group.size * padded.numel())
    real = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
    piece = torch.view_as_real(padded).reshape(-1) if padded.is_complex() else padded.reshape(-1)
    all_gather(real, piece, group, label=f"rows of {name}")
    return whole.view(group.size, *padded.shape)
