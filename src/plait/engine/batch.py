"""Inputs and results of a step: batches, micro-batches, losses."""

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm import Group, all_gather
from plait.errors import ModelError, PlanError, shown
from plait.models import remember_sources
from plait.parallel.local_steps.outer import ExchangeResult

_MAX_COUNT = 2**53


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    loss        mean over all targets of the step (NaN if there were none)
    grad_norm   2-norm of the step's gradient before clipping, each element counted once
    num_tokens  targets of the step, over all micro-batches and data ranks
    skipped     loss or norm was not finite, or there was no target: weights and optimizer are unchanged
    exchange    under local steps: what islands have exchanged after the step. Loss, norm and targets are then
                those of this rank's island
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    exchange: ExchangeResult | None = None


@dataclass(frozen=True)
class EvalResult:
    """Summed over all data ranks; the mean loss is `loss_sum / num_tokens`."""

    loss_sum: float
    num_tokens: int


@dataclass(frozen=True)
class ProbeResult:
    """The parameter whose gradient differs most from the full model's, relative to its norm, and the
    difference that the plan's precision explains."""

    name: str
    difference: float
    allowed: float

    def __str__(self) -> str:
        measured = f"gradients within {self.difference:.1g} of the full model's"
        return f"{measured}, {self.allowed:.1g} allowed ({self.name})"


Batch = Mapping[str, Tensor]


_COMPARED_EVERY = 100


@dataclass
class BatchPreparer:
    """Moves batches to the device and splits them into `micro` micro-batches; compares the first one, and
    every hundredth, between the ranks of one model."""

    device: torch.device
    compute: torch.dtype
    model: Group
    micro: int
    inputs: Collection[str] | None = None  # the entries that forward takes; None: all but the labels
    _num_checked: Counter[bool] = field(default_factory=Counter, init=False)  # in evaluation, in training

    def moved(self, batch: Batch) -> dict[str, Tensor]:
        return on_device(batch, self.device, self.compute, self.inputs)

    def checked(self, batch: Batch, *, trains: bool = True) -> dict[str, Tensor]:
        """The batch on the device. Batches of training and of evaluation are counted separately, to be
        compared at the same calls on all ranks. Raises PlanError for a batch without samples."""
        moved = self.moved(batch)
        if not any(value.shape[0] for value in moved.values()):
            raise PlanError(
                "this rank's share of the batch has no samples",
                given=", ".join(f"{key} {tuple(value.shape)}" for key, value in moved.items()),
                expected="at least one sample on every data rank",
                hint="drop_last=True in the loader, or engine.shard(loader), which checks it on all ranks",
            )
        if self._num_checked[trains] % _COMPARED_EVERY == 0:
            check_same_batch(moved, self.model)
        self._num_checked[trains] += 1
        remember_sources([moved], batch)
        return moved

    def micros(self, batch: Batch | Sequence[Batch]) -> list[dict[str, Tensor]]:
        """The micro-batches of a step. Raises PlanError unless there are `plan.micro`, or the batch divides
        into so many."""
        if not isinstance(batch, Mapping) and isinstance(batch, Sequence):
            for other in (micro for micro in batch if not isinstance(micro, Mapping)):
                check_is_batch(other)
            if len(batch) != self.micro:
                raise PlanError(
                    "the number of micro-batches is not plan.micro",
                    given=f"a list of {len(batch)}, micro={self.micro}",
                    expected=f"{self.micro} micro-batches",
                    hint=f"micro={len(batch)}, or a dict with all samples",
                )
            return [self.checked(micro) for micro in batch]
        moved = self.checked(batch)
        sizes = {key: value.shape[0] for key, value in moved.items()}
        if len(set(sizes.values())) != 1 or any(size % self.micro for size in sizes.values()):
            raise PlanError(
                "this rank's batch does not split into micro-batches",
                given=f"{sizes}, micro={self.micro}",
                expected="tensors of one size along dim 0, a multiple of micro",
                hint=f"a list of {self.micro} micro-batches, for entries that have no row per sample",
            )
        micros = split_batch(moved, self.micro)
        remember_sources(micros, batch)
        return micros


def on_device(
    batch: Mapping[str, Tensor],
    device: torch.device,
    compute: torch.dtype,
    inputs: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Move the batch; floating-point `inputs` (None: all but the labels) are cast to the compute dtype.

    The CPU does not wait for the GPU: entries are pinned first. Raises ModelError for an invalid batch.
    """
    check_is_batch(batch)
    pins = device.type == "cuda"
    return {
        key: (value.contiguous().pin_memory() if pins and value.device.type == "cpu" else value).to(
            device,
            compute
            if value.is_floating_point() and key != "labels" and (inputs is None or key in inputs)
            else value.dtype,
            non_blocking=True,
        )
        for key, value in batch.items()
    }


def check_is_batch(batch: object) -> None:
    """Raise ModelError unless it is a dict of tensors with samples along dim 0."""
    if not isinstance(batch, Mapping):
        raise ModelError(
            "a batch is a dict of tensors",
            given=f"a {type(batch).__name__}",
            expected="the arguments of the model's forward by name, and labels, which only the loss receives",
            hint="{'input_ids': ids, 'labels': ids}",
        )
    invalid = next((_describe(*entry) for entry in batch.items() if not _is_entry(*entry)), None)
    if invalid or not batch:
        raise ModelError(
            "a batch is a dict of tensors with samples along dim 0",
            given=invalid or "an empty dict",
            expected="dense tensors with values, by name",
            hint="{'input_ids': ids, 'labels': ids}",
        )


def _is_entry(key: object, value: object) -> bool:
    if not isinstance(key, str) or not isinstance(value, Tensor) or not value.ndim:
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def _describe(key: object, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{key!r}: {type(value).__name__}"
    return (
        f"{key!r}: a tensor of {value.dtype}, shape {tuple(value.shape)}, {value.layout}, on {value.device}"
    )


def split_batch(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Split the batch along dim 0 into at most `parts` micro-batches, as `torch.chunk` does."""
    chunks = {key: value.chunk(parts) for key, value in batch.items()}
    return [
        {key: of_key[number] for key, of_key in chunks.items()}
        for number in range(len(next(iter(chunks.values()))))
    ]


def check_same_batch(batch: Mapping[str, Tensor], grid: Group) -> None:
    """Raise PlanError on all ranks of `grid`, which hold one model, unless their batches are equal."""
    others = ranks_with_another_batch(batch, grid, next(iter(batch.values())).device)
    if others:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise PlanError(
            "ranks that share one model received different batches",
            given=f"rank {others[0]} has other values or shapes than rank {grid.ranks[0]}; here {shapes}",
            expected="the same samples on all of them: tp and pp multiply ranks, not data",
            hint="the share of engine.data_rank, of engine.data_ranks",
        )


def ranks_with_another_batch(batch: Batch, group: Group, device: torch.device) -> list[int]:
    """The ranks whose batch differs from that of the first one. Collective."""
    if group.size == 1:
        return []
    checksums = torch.zeros(group.size, dtype=torch.long, device=device)
    all_gather(checksums, torch.tensor([_checksum(batch)], device=device), group)
    first, *_ = values = checksums.tolist()
    return [rank for rank, value in zip(group.ranks, values, strict=True) if value != first]


def _checksum(batch: Mapping[str, Tensor]) -> int:
    checksum = 0
    for key in sorted(batch):
        value = batch[key].detach()
        checksum = zlib.crc32(f"{key} {value.dtype} {tuple(value.shape)}".encode(), checksum)
        checksum = zlib.crc32(
            value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), checksum
        )
    return checksum


def check_loss(loss: object, *, trains: bool = True) -> None:
    """Raise ModelError unless it is one real number and, if it `trains`, backward can start from it."""
    if not trains and isinstance(loss, int | float):
        return
    is_number = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    if is_number and (loss.requires_grad or not trains):  # type: ignore[attr-defined]
        return
    given = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        given = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    raise ModelError(
        "a loss must be a scalar that requires a gradient",
        given=given,
        expected="the sum over targets of a forward with gradients",
        hint="reduction='sum' in torch's losses; no .item() and no torch.no_grad()",
    )


def valid_count(count: object) -> float | Tensor:
    """Return the number of targets of a loss, or NaN if it is negative: all ranks find it in `update`, where
    they read the sum, without a synchronization of their devices here. Raises ModelError if it is no number.
    """
    if isinstance(count, Tensor) and count.numel() == 1 and not (count.is_complex() or count.is_meta):
        number = count.detach().reshape(()).double()
        return torch.where(number >= 0, number, math.nan)
    if isinstance(count, int | float) and abs(count) < _MAX_COUNT:
        return count if count >= 0 else math.nan
    if isinstance(count, float):  # not finite
        return math.nan
    given = f"shape {tuple(count.shape)}, {count.dtype}" if isinstance(count, Tensor) else f"{shown(count)}"
    raise ModelError(
        "a loss's number of targets must be a number",
        given=given,
        expected="an int, or a tensor with one real element",
        hint="(labels != -100).sum()",
    )


def check_total_count(count: float) -> None:
    """Raise ModelError for a step's number of targets that includes an invalid one. See `valid_count`."""
    if not math.isfinite(count):
        raise ModelError(
            "a loss's number of targets is negative or not finite",
            given="of a micro-batch of this step, on one of the ranks",
            expected="the number of targets that the loss is a sum over: 0 or more",
            hint="(labels != -100).sum()",
        )
