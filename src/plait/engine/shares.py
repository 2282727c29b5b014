"""Shares of global batches: every rank loads the same batch, and each data rank takes a part of it."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from plait.comm import Group
from plait.engine.batch import Batch, check_is_batch, ranks_with_another_batch
from plait.errors import PlanError


class Shares:
    """A data rank's share of each batch of a loader.

    Every rank iterates over it equally often. The loader's batches must be the same on all ranks: the first
    one of each pass is compared.
    """

    def __init__(
        self, loader: Iterable[Batch], unit: int, ranks: Group, everyone: Group, device: torch.device
    ) -> None:
        """`unit`: see `share_of`. `ranks`: the data ranks."""
        self._loader = loader
        self._unit = unit
        self._ranks = ranks
        self._everyone = everyone
        self._device = device

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError for a loader without a length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(self._loader):
            check_is_batch(batch)
            if number == 0 and (others := ranks_with_another_batch(batch, self._everyone, self._device)):
                raise PlanError(
                    "ranks load different batches",
                    given=f"rank {others[0]} has other values or shapes than rank 0",
                    expected="a loader that yields the same batches in the same order on every rank",
                    hint="the same torch.manual_seed on all ranks, or a loader without engine.shard",
                )
            yield share_of(batch, self._unit, self._ranks)


def share_of(batch: Batch, unit: int, ranks: Group) -> dict[str, Tensor]:
    """Return this rank's samples of a global batch: consecutive, and a multiple of `unit`; the shares of two
    ranks differ by at most one `unit`. Raises PlanError if the batch is not a multiple of `unit`, or a rank
    would have no sample; on all ranks, as they have the same batch."""
    check_is_batch(batch)
    sizes = {key: value.shape[0] for key, value in batch.items()}
    num_samples, least = next(iter(sizes.values())), unit * ranks.size
    if len(set(sizes.values())) != 1 or num_samples % unit or num_samples < least:
        raise PlanError(
            "the batch does not divide over the data ranks",
            given=f"{sizes}, {ranks.size} data ranks" + (f", micro={unit}" if unit > 1 else ""),
            expected=f"tensors of one size along dim 0, {least} or more"
            + (f", a multiple of {unit}" if unit > 1 else ""),
            hint="drop_last=True in the loader"
            + ("; for evaluation, engine.shard(loader, trains=False)" if unit > 1 else ""),
        )
    num_units = num_samples // unit
    start, stop = (unit * (num_units * rank // ranks.size) for rank in (ranks.rank, ranks.rank + 1))
    return {key: value[start:stop] for key, value in batch.items()}
