"""Results of steps and evaluations, the totals over micro-batches and ranks that they follow from, and the
scale of summed losses in fp16.

[Note: ranks in different steps]
If a step raises an error on one rank alone, and the program catches it and continues, that rank's next step
communicates with the other ranks' current one: with equal shapes every collective succeeds, and from then on
batches, counters and schedules are one step apart. So each rank counts the steps that it has begun, also
those that failed. Count and squared count are summed over ranks in the all-reduce of the loss, at no cost:
n counts are equal if and only if n times the sum of their squares is the square of their sum.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm import Group, Work, all_gather, all_reduce, start_all_reduce
from plait.errors import CheckpointError, ModelError, RunError, shown
from plait.parallel.local_steps import ExchangeResult
from plait.parallel.zero.state_io import StateReader, not_engine_state
from plait.plan.loss_scaling import LARGEST, LossScaling, is_power_of_two

_SCALE_KEYS, _SCALE_UNIT = "engine/loss_scale.", "engine/scale_unit"
_MAX_COUNT = 2**53
_OWN = 6  # totals, apart from those of routers
_MODULUS = 2**12  # of counts of steps, so that float64 sums are exact for 2 ** 14 ranks


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    loss        mean over all targets of the step (NaN if there were none)
    grad_norm   2-norm of the step's gradient before clipping, each element counted once
    num_tokens  targets of the step, over all micro-batches and data ranks; with `loss_weights` the sum of
                their weights, rounded down
    skipped     loss or norm was not finite, or there was no target: weights and optimizer are unchanged
    aux_loss    the auxiliary loss of routers, without its coefficient, if the model's configuration has one
    router_z_loss  the z loss of routers, without its coefficient, with `router_z_loss`
    expert_loads  how often each expert was chosen in the step, by the name of the layer
    dropped_choices  of experts, beyond the plan's capacity, in all layers; None without one
    exchange    under local steps: what islands have exchanged after the step. Loss, norm and targets are then
                those of this rank's island
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    exchange: ExchangeResult | None = None
    aux_loss: float | None = None
    router_z_loss: float | None = None
    expert_loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dropped_choices: int | None = None


@dataclass(frozen=True)
class EvalResult:
    """Summed over all data ranks; the mean loss is `loss_sum / num_tokens`. With `loss_weights`, the latter
    is the sum of the weights, under a `Preference` the number of pairs."""

    loss_sum: float
    num_tokens: float

    @classmethod
    def of(cls, loss_sum: float, num_targets: float) -> "EvalResult":
        """Raises ModelError for an invalid number of targets."""
        check_total_count(num_targets)
        count = int(num_targets)
        return cls(loss_sum, count if count == num_targets else num_targets)


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


class StepTotals:
    """The totals of a step, which are summed in one all-reduce: loss, targets, unit of the loss scale, terms
    of the count of steps, units with late gradients; and those of routers."""

    def __init__(self, ranks: Group, device: torch.device, of_routers: int) -> None:
        """`ranks`: all ranks of a step. `of_routers`: the number of their totals."""
        self._ranks = ranks
        self._sums = torch.zeros(_OWN + of_routers, dtype=torch.float64, device=device)
        self._begun = 0  # steps since the engine was created or has loaded a state

    def begin_step(self) -> None:
        self._begun += 1

    def forget_steps(self) -> None:
        """Count steps from 0 again, on all ranks."""
        self._begun = 0

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, loss: Tensor, num_targets: int | Tensor | None) -> float | Tensor:
        """Add a micro-batch, and return its number of targets: one if it is None. Raises ModelError."""
        check_loss(loss)
        self._sums[0] += loss.detach()
        count = 1 if num_targets is None else valid_count(num_targets)
        self._sums[1] += count
        return count

    @property
    def of_routers(self) -> Tensor:
        return self._sums[_OWN:]

    def start_sum(self, unit: float, late: int) -> Work:
        """Start to sum over the ranks. `unit`: of the loss scale; `late`: units with late gradients."""
        count = self._begun % _MODULUS
        for index, number in enumerate((unit, count, count**2, late), 2):
            self._sums[index : index + 1].fill_(number)  # `sums[index] = number` would block on CUDA
        return start_all_reduce(self._sums, self._ranks)

    def read(self, others: Tensor) -> tuple[list[float], float, list[float], list[float]]:
        """Return loss, targets and unit; the number of units with late gradients; the totals of routers; and
        the values of `others`, for which the device is waited for as well. Clears the totals. Raises RunError
        or ModelError, on all ranks, if ranks are in different steps or a number of targets is invalid."""
        values = torch.cat([self._sums, others]).tolist()
        *totals, begun, of_squares, late = values[:_OWN]
        self.clear()
        if of_squares * self._ranks.size != begun**2:
            self._raise_steps()
        check_total_count(totals[1])
        return totals, late, values[_OWN : len(self._sums)], values[len(self._sums) :]

    def _raise_steps(self) -> None:
        """Raise RunError: see [Note: ranks in different steps]. Collective."""
        counts = torch.empty(self._ranks.size, dtype=torch.int64, device=self._sums.device)
        all_gather(counts, counts.new_tensor([self._begun]), self._ranks, label="steps begun")
        of_ranks = counts.tolist()
        other = next(rank for rank, count in enumerate(of_ranks) if count != of_ranks[0])
        raise RunError(
            "the ranks are in different steps: this step has combined their batches",
            given=f"rank 0 is in its step {of_ranks[0]}, rank {other} in its step {of_ranks[other]}",
            expected="as many calls of engine.step on all ranks, also of calls that raise an error",
            hint="let a rank exit if its step raises an error; engine.load on all ranks resets the count",
        )


class LossScale:
    """The loss scale of the next step. All ranks update it with the same overflows, so it is equal on all.

    Dynamic, the largest scale without infinite gradients, or fixed. torch.amp.GradScaler's rule: an overflow
    multiplies the scale by `backoff` and the step is skipped; after `interval` steps without one it is
    multiplied by `growth`.
    """

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self.value = float(scaling.initial)
        self._clean = 0  # steps without an overflow since the last change
        self._left = scaling.hysteresis  # overflows until the next backoff

    def update(self, overflow: bool) -> None:
        """Update after a step. `overflow`: a gradient of any rank was not finite, and the step was
        skipped."""
        if not self._scaling.dynamic:
            return
        if overflow:
            self._clean = 0
            if self._left == 1:
                self.value = max(self.value * self._scaling.backoff, self._scaling.minimum)
            else:
                self._left -= 1
            return
        self._clean += 1
        if self._clean == self._scaling.interval:
            self._clean = 0
            self._left = self._scaling.hysteresis
            if self.value * self._scaling.growth <= LARGEST:
                self.value *= self._scaling.growth

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        return {
            "value": torch.tensor(self.value, dtype=torch.float64),
            "clean": torch.tensor(self._clean),
            "hysteresis_left": torch.tensor(self._left),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, also from a scale with other options. A fixed scale keeps its own
        value. Raises CheckpointError."""
        known = {key: tensor.item() for key, tensor in state.items() if tensor.numel() == 1}
        if known.keys() != self.state().keys() or not is_power_of_two(known["value"]):
            raise CheckpointError(
                "the checkpoint has no valid loss scale",
                given=known,
                expected="a power of two and two counts",
                hint="another checkpoint of an fp16 run",
            )
        if not self._scaling.dynamic:
            return
        self.value = max(known["value"], self._scaling.minimum)
        self._clean = min(max(int(known["clean"]), 0), self._scaling.interval - 1)
        self._left = min(max(int(known["hysteresis_left"]), 1), self._scaling.hysteresis)


class SumLossScale:
    """Loss scale for summed losses. The configured scale is for a mean, so it is divided by `unit`, a power
    of two near the number of targets, determined once from the first micro-batches of all ranks. 1 for other
    precisions."""

    def __init__(self, options: LossScaling | None) -> None:
        self._options = options
        self._scale = LossScale(options) if options is not None else None
        self.unit = 0.0  # 0 until the first loss

    @property
    def value(self) -> float | None:
        """The scale for a mean loss; None for precisions without one."""
        return None if self._scale is None else self._scale.value

    @property
    def factor(self) -> float:
        """The scale for a summed loss."""
        return 1.0 if self._scale is None else self._scale.value / max(1.0, self.unit)

    def scale_loss(self, loss: Tensor, num_targets: float | Tensor | None, ranks: Group) -> Tensor:
        """Scale the loss. `ranks`: the data ranks, which determine the unit together."""
        if self._scale is None:
            return loss
        if not self.unit:
            max_targets = torch.tensor([float(num_targets or 1)], device=loss.device)
            all_reduce(max_targets, ranks, "max")
            self.unit = 2.0 ** round(math.log2(max(1.0, max_targets.item())))
        return loss * self.factor

    def means(
        self, loss_sum: float, num_targets: float, square_sum: float, dtype: torch.dtype
    ) -> tuple[float, float]:
        """The mean loss of a step and the norm of its gradient, unscaled; NaN without targets. The norm is in
        the gradients' `dtype`: the last bits of a float64 sum depend on the sharding."""
        if not num_targets:
            return math.nan, math.nan
        norm = torch.tensor(math.sqrt(square_sum) / num_targets / self.factor, dtype=dtype)
        return loss_sum / num_targets, norm.item()

    def update(self, *, skipped: bool) -> None:
        """Adjust the scale after a step with targets."""
        if self._scale is not None:
            self._scale.update(skipped)

    def state(self) -> dict[str, Tensor]:
        """State to save, by engine state key."""
        if self._scale is None:
            return {}
        state = {f"{_SCALE_KEYS}{key}": value for key, value in self._scale.state().items()}
        return state | {_SCALE_UNIT: torch.tensor(self.unit, dtype=torch.float64)}

    def load(self, keys: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Restore what `state` returned; without such keys, start fresh. Raises CheckpointError."""
        known = [key for key in keys if key.startswith(_SCALE_KEYS)]
        self._scale = LossScale(self._options) if self._options is not None else None
        self.unit = 0.0
        if self._scale is not None and known:
            self._scale.load({key.removeprefix(_SCALE_KEYS): read(key) for key in known})
            self.unit = float(read(_SCALE_UNIT)) if _SCALE_UNIT in keys else 0.0


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


def read_count(source: StateReader, key: str) -> int:
    """Read a counter of an engine. Raises CheckpointError."""
    value = source.read_full(key).item()
    if not isinstance(value, int | float) or not 0 <= value < _MAX_COUNT:
        raise not_engine_state(f"{key} = {value}", "a count", "engine.load with another checkpoint")
    return int(value)
