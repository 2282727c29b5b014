"""Inside of state-space and recurrent mixers: features that all columns read, channels of convolutions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.tensor.functional import gather_summed
from plait.parallel.tensor.groups import ShardedDim
from plait.plan.sharding import DimSharding, Range


@dataclass(frozen=True)
class UsedFeatures:
    """The features of a layer's output that the code of a column reads: `own` ones, and ranges that all
    columns read, of which each column computes some."""

    own: ShardedDim
    used: DimSharding

    def __call__(self, y_o: Tensor) -> Tensor:
        """Return (..., features that are read) of (..., own features)."""
        shards = dict(
            zip(
                self._own_ranges,
                y_o.split([stop - start for start, stop in self._own_ranges], -1),
                strict=True,
            )
        )
        shared, sizes = self._shared, [stop - start for start, stop in self._shared]
        own = torch.cat(
            [shard for (start, _), shard in shards.items() if _position(start, shared) is not None], -1
        )
        full = dict(zip(shared, gather_summed(own, self._gathered).split(sizes, -1), strict=True))
        return torch.cat([full[r] if r in full else shards[r] for r in self.used.ranges[self.own.coord]], -1)

    @cached_property
    def _own_ranges(self) -> tuple[Range, ...]:
        return self.own.sharding.ranges[self.own.coord]

    @cached_property
    def _shared(self) -> tuple[Range, ...]:
        """The ranges that every column reads."""
        first, *others = self.used.ranges
        return tuple(found for found in first if all(found in ranges for ranges in others))

    @cached_property
    def _gathered(self) -> ShardedDim:
        """How the columns shard these, put one after another."""
        ranges = tuple(
            tuple(
                (at, at + stop - start)
                for start, stop in own
                if (at := _position(start, self._shared)) is not None
            )
            for own in self.own.sharding.ranges
        )
        return ShardedDim(DimSharding(self.own.sharding.axis, ranges), self.own.group)


def _position(feature: int, ranges: tuple[Range, ...]) -> int | None:
    """The position of a feature in concatenated ranges; None if it is in none of them."""
    position = 0
    for start, stop in ranges:
        if start <= feature < stop:
            return position + feature - start
        position += stop - start
    return None


@dataclass(frozen=True)
class UnfusedForward:
    """Forward of a mixer, as when it is evaluated.

    [Note: fused kernels of mixers]
    While training, mixers call a fused kernel if one is installed. It reads the weights of several layers and
    leaves out their forwards, and with them the sums over columns. Mixers tell training by their own flag,
    and have no dropout. Kernels of single steps (convolution, scan) get tensors of this column's channels.
    """

    forward: Callable[..., Any]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        training, module.training = module.training, False
        try:
            return self.forward(module, *args, **kwargs)
        finally:
            module.training = training


def read_own_channels(module: nn.Module, channels: tuple[Range, ...]) -> None:
    """Make a module with all weights read as one with those of some channels."""
    cls = type(module)
    properties = {key: property(_OwnChannels(key)) for key in ("weight", "bias")}
    own_class = _CLASSES.get(cls) or type(cls.__name__, (cls,), properties)
    module.plait_channels = channels  # type: ignore[assignment]
    module.__class__ = _CLASSES[cls] = own_class


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # by original class


@dataclass(frozen=True)
class _OwnChannels:
    key: str

    def __call__(self, module: Any) -> Tensor | None:
        full = module._parameters[self.key]
        return (
            None if full is None else torch.cat([full[start:stop] for start, stop in module.plait_channels])
        )
