"""Ranks that hold the same weights hold the same bits of them: looked at now and then, by digests.

[Note: what is compared]
What the model computes with, and master weights where those are tensors of their own. Copies are on the ranks
along `replicate`; on those along `shard`, where each has whole parameters in a memory of its own; on those
of a grid, where no axis cuts a tensor; and on stages that share a parameter. `ShardMap` says who holds which
boxes of what, so all of them are one case: the same boxes of the same tensor. The ranks along `shard` add up
their digests of what is cut over it first.

[Note: digests]
The bits, taken for integers of 64, each multiplied by an odd number that follows from its place in the piece,
and added up modulo 2 ** 64. A change of one of them is found for certain; sums over parts can be added.
Nothing is copied but a block at a time, which stays in cache.

[Note: one message]
A table with a line for every tensor that has copies: of its digest d and of ~d the largest over all ranks.
They are each other's complement just where all d are equal, so every rank finds the same. Only then is asked
who differs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Mesh, all_gather, all_reduce
from plait.errors import RunError
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig
from plait.parallel.zero.groups import DataGroups
from plait.parallel.zero.shard_map import ShardMap
from plait.plan import Boxes, Grid
from plait.plan.layout import ALIGNMENT

_NOTHING = -(2**63)  # what a rank says of that which it does not hold
_BLOCK = 2**15  # integers; on a CPU they and their factors stay in cache
_BLOCK_GPU = 2**21  # each costs a few launches
_ODD = 0x9E3779B97F4A7C15
_MOST_RANKS = 8  # that a letter names


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor of which several ranks may have the same boxes."""

    kind: str  # weights or master weights
    name: str
    boxes: Boxes


@dataclass(frozen=True)
class _Part:
    """Of one on this rank: flat, and where it begins in its piece. `is_range`: peers along `shard` have the
    rest."""

    of: ReplicatedTensor
    flat: Tensor
    start: int
    is_range: bool


class ReplicaCheck:
    """The units of all stages that a rank has, and who else has what of them."""

    def __init__(
        self,
        units: Sequence[FlatParam],
        cut: FlatParamConfig,
        shard_map: ShardMap,
        groups: DataGroups,
        mesh: Mesh,
    ) -> None:
        self._units = units
        self._groups = groups
        self._grid = mesh.grid
        self._device = mesh.world.device
        self._has_wholes = cut.whole_parameters and cut.share is None
        data_copies = groups.all.size if self._has_wholes else groups.replicate.size
        copies: Counter[ReplicatedTensor] = Counter()
        for layouts in shard_map.layouts:
            for unit in (unit for layout in layouts.values() for unit in layout.units):
                for piece in unit.params:
                    copies[ReplicatedTensor("weights", piece.name, piece.boxes)] += data_copies
                    if cut.has_masters and unit.trains:
                        copies[ReplicatedTensor("master weights", piece.name, piece.boxes)] += (
                            groups.replicate.size
                        )
        several = (copied for copied, number in copies.items() if number > 1)
        self._line_of = {copied: line for line, copied in enumerate(several)}

    def check(self) -> None:
        """Raises RunError, on all ranks alike, when copies differ. Every rank must call it, between steps."""
        if not self._line_of:
            return
        size = len(self._line_of)
        mine = [_NOTHING] * (2 * size)
        for copied, digest in self._digests():
            line = self._line_of[copied]
            mine[line] = max(mine[line], digest)
            mine[size + line] = max(mine[size + line], ~digest)
        table = torch.tensor(mine, device=self._device)
        all_reduce(table, self._groups.everyone, "max", label="digests of weights")
        found = table.tolist()
        differing = [copied for copied, line in self._line_of.items() if found[line] != ~found[size + line]]
        if differing:
            line = self._line_of[differing[0]]
            raise _letter(differing, self._by_value(mine[line], mine[size + line]), self._grid)

    def _digests(self) -> Iterator[tuple[ReplicatedTensor, int]]:
        """Of what this rank holds and others may."""
        digester = Digest()
        parts = [(part, digester.of(part.flat, part.start).to(self._device)) for part in self._parts()]
        if not parts:
            return
        found = torch.stack([digest for _, digest in parts])
        is_range = torch.tensor([part.is_range for part, _ in parts], device=self._device)
        summed = torch.where(is_range, found, 0)
        all_reduce(summed, self._groups.gathers, label="digests of weights")
        for (part, _), digest in zip(parts, torch.where(is_range, summed, found).tolist(), strict=True):
            yield part.of, digest

    def _parts(self) -> Iterator[_Part]:
        """The same ones on all ranks along `shard`: of a piece of which this one has nothing, nothing."""
        for unit in self._units:
            whole = (0, unit.layout.numel)
            own = (unit.start, unit.stop)
            if self._has_wholes:
                yield from self._of("weights", unit, unit.storage, *whole)
            else:
                yield from self._of("weights", unit, unit.piece, *own)
            if unit.master is not unit.piece:
                yield from self._of("master weights", unit, unit.master, *own)
                unit.cut.masters.forget(unit.master)

    def _of(self, kind: str, unit: FlatParam, flat: Tensor, start: int, stop: int) -> Iterator[_Part]:
        """What lies in `flat`, which is [start, stop) of the unit's storage."""
        overlaps = {overlap.shard.name: overlap for overlap in unit.layout.overlaps(start, stop)}
        for piece in unit.layout.params:
            copied = ReplicatedTensor(kind, piece.name, piece.boxes)
            if copied not in self._line_of:
                continue
            overlap = overlaps.get(piece.name)
            if overlap is None:
                yield _Part(copied, flat[:0], 0, is_range=True)
                continue
            numel = -(-(overlap.stop - overlap.start) // ALIGNMENT) * ALIGNMENT  # behind a piece are zeros
            part = flat[overlap.at : overlap.at + numel]
            yield _Part(copied, part, overlap.start, is_range=stop - start < unit.layout.numel)

    def _by_value(self, high: int, low: int) -> dict[tuple[int, int], list[int]]:
        """The ranks that hold a tensor, by what they hold, the first rank's first. `low`: the largest of this
        rank's complements; it has several digests where it has several stages."""
        group = self._groups.everyone
        table = torch.empty(2 * group.size, dtype=torch.long, device=self._device)
        all_gather(table, torch.tensor([high, low], device=self._device), group, label="digests of weights")
        found: dict[tuple[int, int], list[int]] = {}
        for rank, (its_high, its_low) in enumerate(table.view(-1, 2).tolist()):
            if (its_high, its_low) != (_NOTHING, _NOTHING):
                found.setdefault((its_high, its_low), []).append(rank)
        return found


class Digest:
    """See [Note: digests]."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def of(self, flat: Tensor, start: int) -> Tensor:
        """Of elements that begin at `start` of what they are part of; an int64 scalar where they are."""
        words = flat.view(torch.long)
        factors, scratch = self._on(flat.device)
        at = start * flat.itemsize // 8
        total = torch.zeros((), dtype=torch.long, device=flat.device)
        while words.numel():
            number, place = divmod(at, len(factors))
            size = min(len(factors) - place, words.numel())
            torch.mul(words[:size], factors[place : place + size], out=scratch[:size])
            total += scratch[:size].sum() * _signed(pow(_ODD, number + 1, 2**64))
            words, at = words[size:], at + size
        return total

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Odd factors of a block, the same on all devices of a kind, and memory for a block."""
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)
            size = _BLOCK_GPU if device.type == "cuda" else _BLOCK
            factors = torch.randint(-(2**62), 2**62, (size,), generator=generator).mul_(2).add_(1).to(device)
            self._factors[device] = factors, torch.empty_like(factors)
        return self._factors[device]


def _signed(value: int) -> int:
    """The same bits as an integer with a sign."""
    return value - 2**64 if value >= 2**63 else value


def _letter(
    differing: Sequence[ReplicatedTensor], by_value: Mapping[tuple[int, int], list[int]], grid: Grid
) -> RunError:
    first = differing[0]
    most = max(by_value.values(), key=len)  # of several the one with the first rank
    others = sorted(rank for ranks in by_value.values() if ranks is not most for rank in ranks)
    names = list(dict.fromkeys(copied.name for copied in differing))
    more = f"; and of {len(names) - 1} other parameters" if len(names) > 1 else ""
    given = f"{first.kind}: other bits on {_ranks(others, grid)} than on {_ranks(most, grid)}{more}"
    if not others:  # one rank has copies of two stages, which differ
        given = f"{first.kind}: other bits on two stages of {_ranks(most, grid)}{more}"
    return RunError(
        f"copies of {first.name} are no longer the same",
        given=given,
        expected="the same bits on all ranks that hold a weight, step after step",
        hint="go on from a state that was saved before; a rank that differs again may have faulty hardware",
    )


def _ranks(ranks: Sequence[int], grid: Grid) -> str:
    """By number, a single one with its place."""
    if len(ranks) == 1:
        place = " ".join(f"{axis}={at}" for axis, at in grid.coord(ranks[0]).items() if grid.degree(axis) > 1)
        return f"rank {ranks[0]} ({place})"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"ranks {shown}{f' and {len(ranks) - _MOST_RANKS} more' if len(ranks) > _MOST_RANKS else ''}"
