"""Shares of global batches: of the same batch that every rank has, each data rank takes a part."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from plait.comm import Group
from plait.engine.batch import Batch, check_is_batch, ranks_with_another_batch
from plait.errors import PlanError


class Shares:
    """A data rank's share of each batch of a loader.

    Every rank iterates over it, as often as over the loader, whose batches are the same on all ranks: the
    first ones of each pass are compared.
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
            share = share_of(batch, self._unit, self._ranks)
            if number == 0 and (others := ranks_with_another_batch(batch, self._everyone, self._device)):
                raise PlanError(
                    "ranks load different batches",
                    given=f"rank {others[0]} has other values or shapes than rank 0",
                    expected="a loader that gives the same batches in the same order on every rank",
                    hint="torch.manual_seed with one seed on all ranks, or a loader of each rank's own share",
                )
            yield share


def share_of(batch: Batch, unit: int, ranks: Group) -> dict[str, Tensor]:
    """Return this rank's samples of a global batch: consecutive, a multiple of `unit`, and as many as any
    other rank's but for one `unit`. Raises PlanError, on all ranks, if one would have none."""
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
