"""Check that replicated weights are bitwise equal on all ranks, by comparing digests.

[Note: compared tensors]
The parameters that the model computes with, and master weights if those are separate tensors. Copies are on
the ranks along `replicate`; along `shard` if each has unsharded parameters in its own memory; on a
tensor-parallel grid if no axis shards a tensor; and on stages that share a parameter. `ShardMap` contains the
boxes of every rank, so all of these are one case: equal boxes of one tensor. The ranks along `shard` first
sum their digests of tensors that are sharded over it.

Under local steps, the weights of an island have copies on its own ranks only; global weights and the outer
momentum have copies on all islands.

[Note: copies computed apart]
Copies along `replicate` and `shard` get the same reduced gradient, bit for bit. On a tensor-parallel grid
each rank computes the gradient of its copy itself, from the same inputs. A GPU's kernels may add in a
different order on each, so that copies drift apart by rounding errors, without a fault. So on GPUs a
difference that is not between data ranks is a warning, given once, unless the plan has deterministic=true.

[Note: digests]
The bits are read as 64-bit integers, each multiplied by an odd factor that depends on its position in the
tensor, and summed modulo 2 ** 64. A change of a single integer is always detected; digests of parts can be
added. Memory is read one block at a time, which stays in cache.

[Note: one collective]
A table with a row for each tensor that has copies: the maximum over all ranks of its digest d, and of ~d. The
two are complements exactly if all d are equal, so every rank gets the same result. Only on a difference are
the ranks' digests gathered.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, all_gather, all_reduce
from plait.errors import RunError
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.shard_map import ShardMap
from plait.plan import Boxes, Grid
from plait.plan.axes import UnitKind
from plait.plan.layout import ALIGNMENT

_NOT_HELD = -(2**63)  # the digest of a tensor that a rank does not have
_BLOCK = 2**15  # integers; on a CPU they and their factors stay in cache
_BLOCK_GPU = 2**21  # each costs a few launches
_ODD = 0x9E3779B97F4A7C15
_MAX_SHOWN = 8  # in a message


@dataclass(frozen=True)
class ReplicatedTensor:
    """Boxes of a tensor that several ranks may have."""

    kind: str  # weights, master weights, global weights or outer momentum
    name: str
    boxes: Boxes
    island: int | None  # the only one that has copies; None: all have


@dataclass(frozen=True)
class _ComparedPart:
    """This rank's part of one: flat, from element `start` of its boxes. `is_range`: peers along `shard` have
    the rest."""

    tensor: ReplicatedTensor
    kind: UnitKind
    flat: Tensor
    start: int
    is_range: bool


class ReplicaCheck:
    """The units of this rank's stages, and the number of copies of their tensors."""

    def __init__(
        self,
        units: Sequence[FlatParam],
        context: RankContext,
        shard_map: ShardMap,
        common: Mapping[str, Sequence[tuple[FlatParam, Tensor]]],
    ) -> None:
        """`common`: states that all islands have, by kind, for the ranges of units that this rank owns. All
        ranks have the same kinds."""
        self._units = units
        self._common = common
        self._groups = groups = context.groups
        self._world = context.mesh.world.group
        self._grid = context.mesh.grid
        self._device = context.device
        # See [Note: copies computed apart]
        self.expects_equal_grids = context.device.type != "cuda" or context.plan.deterministic
        self._has_warned = False
        self._has_unsharded = context.keeps_params_unsharded and not context.shares_params
        islands = [*range(groups.islands.size)] if context.plan.local_steps else [None]
        self._island = groups.islands.rank if context.plan.local_steps else None
        copies: Counter[ReplicatedTensor] = Counter()
        for _, _, by_rank in shard_map.units():
            for unit in by_rank.values():
                over = groups.units[unit.kind]
                num_unsharded = over.gradient_sum.size
                own = {"weights": num_unsharded if self._has_unsharded else over.replicate.size}
                if context.has_masters and unit.trains:
                    own["master weights"] = over.replicate.size
                for shard in unit.params:
                    for (kind, num), island in itertools.product(own.items(), islands):
                        copies[ReplicatedTensor(kind, shard.name, shard.boxes, island)] += num
                    for kind in common if unit.trains else ():
                        copies[ReplicatedTensor(kind, shard.name, shard.boxes, None)] += groups.islands.size
        replicated = (tensor for tensor, num_copies in copies.items() if num_copies > 1)
        self._row_of = {tensor: row for row, tensor in enumerate(replicated)}

    def check(self) -> None:
        """Raise RunError on all ranks if copies differ. Every rank must call it, between steps. On GPUs, warn
        on rank 0 if they differ only over a tensor-parallel grid."""
        if not self._row_of:
            return
        num_rows = len(self._row_of)
        local = [_NOT_HELD] * (2 * num_rows)
        for tensor, digest in self._digests():
            row = self._row_of[tensor]
            local[row] = max(local[row], digest)
            local[num_rows + row] = max(local[num_rows + row], ~digest)
        differing = self._differing(local, self._world)
        if not differing:
            return
        if not self.expects_equal_grids and not self._differ_between_data_ranks(local):
            self._warn(differing)
            return
        row = self._row_of[differing[0]]
        raise _replica_error(differing, self._ranks_by_value(local[row], local[num_rows + row]), self._grid)

    def _differing(self, local: list[int], group: Group) -> list[ReplicatedTensor]:
        """The tensors of which two ranks of the group have different copies. See [Note: one collective]."""
        table = torch.tensor(local, device=self._device)
        all_reduce(table, group, "max", label="digests of weights")
        highest, num_rows = table.tolist(), len(self._row_of)
        return [
            tensor
            for tensor, row in self._row_of.items()
            if highest[row] != _NOT_HELD and highest[row] != ~highest[num_rows + row]
        ]

    def _differ_between_data_ranks(self, local: list[int]) -> bool:
        """True, on all ranks, if any two ranks at the same place of the model have different copies."""
        any_differs = torch.tensor([len(self._differing(local, self._groups.tokens))], device=self._device)
        all_reduce(any_differs, self._world, "max", label="digests of weights")
        return bool(any_differs.item())

    def _warn(self, differing: Sequence[ReplicatedTensor]) -> None:
        if self._world.rank == 0 and not self._has_warned:
            warnings.warn(
                f"copies of {differing[0].name} differ in bits between ranks of a tensor-parallel grid: "
                "kernels add in different orders. deterministic=true keeps copies equal, and is slower",
                stacklevel=2,
            )
        self._has_warned = True

    def _digests(self) -> Iterator[tuple[ReplicatedTensor, int]]:
        """Digests of the replicated tensors that this rank has."""
        digest_of = Digest()
        parts = [(part, digest_of.compute(part.flat, part.start).to(self._device)) for part in self._parts()]
        for kind in UnitKind:
            of_kind = [(part, digest) for part, digest in parts if part.kind is kind]
            if not of_kind:
                continue
            local = torch.stack([digest for _, digest in of_kind])
            is_range = torch.tensor([part.is_range for part, _ in of_kind], device=self._device)
            summed = torch.where(is_range, local, 0)
            all_reduce(summed, self._groups.units[kind].all_gather, label="digests of weights")
            digests = torch.where(is_range, summed, local).tolist()
            yield from ((part.tensor, digest) for (part, _), digest in zip(of_kind, digests, strict=True))

    def _parts(self) -> Iterator[_ComparedPart]:
        """The same tensors on all ranks along `shard`; an empty part if this rank has nothing of one."""
        for unit in self._units:
            full_range = (0, unit.layout.numel)
            own_range = (unit.start, unit.stop)
            if unit.layout.format:
                yield from self._parts_of("weights", unit, unit.own_values, *own_range)
                continue
            if self._has_unsharded:
                yield from self._parts_of("weights", unit, unit.storage, *full_range)
            else:
                yield from self._parts_of("weights", unit, unit.shard, *own_range)
            if unit.master is not unit.shard:
                yield from self._parts_of("master weights", unit, unit.master, *own_range)
                unit.context.masters.evict(unit.master)
        for kind, states in self._common.items():
            for unit, flat in states:
                yield from self._parts_of(kind, unit, flat, unit.start, unit.stop, is_common=True)

    def _parts_of(
        self, kind: str, unit: FlatParam, flat: Tensor, start: int, stop: int, *, is_common: bool = False
    ) -> Iterator[_ComparedPart]:
        """The parts in `flat`, which is [start, stop) of the unit's storage."""
        island = None if is_common else self._island
        overlaps = {overlap.shard.name: overlap for overlap in unit.layout.overlaps(start, stop)}
        for shard in unit.layout.params:
            tensor = ReplicatedTensor(kind, shard.name, shard.boxes, island)
            if tensor not in self._row_of:
                continue
            overlap = overlaps.get(shard.name)
            if overlap is None:
                yield _ComparedPart(tensor, unit.layout.kind, flat[:0], 0, is_range=True)
                continue
            # Parameters are followed by zeros.
            numel = -(-(overlap.stop - overlap.start) // ALIGNMENT) * ALIGNMENT
            part = flat[overlap.at : overlap.at + numel]
            is_range = stop - start < unit.layout.numel
            yield _ComparedPart(tensor, unit.layout.kind, part, overlap.start, is_range)

    def _ranks_by_value(self, high: int, low: int) -> dict[tuple[int, int], list[int]]:
        """Gather a tensor's digests and group the ranks that have it by them, in rank order. `high`, `low`:
        the maxima of this rank's digests and of their complements; with several stages it may have
        several."""
        group = self._world
        table = torch.empty(2 * group.size, dtype=torch.long, device=self._device)
        all_gather(table, torch.tensor([high, low], device=self._device), group, label="digests of weights")
        ranks: dict[tuple[int, int], list[int]] = {}
        for rank, (rank_high, rank_low) in enumerate(table.view(-1, 2).tolist()):
            if (rank_high, rank_low) != (_NOT_HELD, _NOT_HELD):
                ranks.setdefault((rank_high, rank_low), []).append(rank)
        return ranks


class Digest:
    """Computes digests. See [Note: digests]."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def compute(self, flat: Tensor, start: int) -> Tensor:
        """The digest of the elements from `start` on of some tensor; an int64 scalar on their device."""
        words = flat.view(torch.long)
        factors, scratch = self._factors_on(flat.device)
        at = start * flat.itemsize // 8
        total = torch.zeros((), dtype=torch.long, device=flat.device)
        while words.numel():
            block, offset = divmod(at, len(factors))
            size = min(len(factors) - offset, words.numel())
            torch.mul(words[:size], factors[offset : offset + size], out=scratch[:size])
            total += scratch[:size].sum() * _signed(pow(_ODD, block + 1, 2**64))
            words, at = words[size:], at + size
        return total

    def _factors_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The odd factors of a block, equal on all devices of a kind, and scratch for a block."""
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)
            size = _BLOCK_GPU if device.type == "cuda" else _BLOCK
            factors = torch.randint(-(2**62), 2**62, (size,), generator=generator).mul_(2).add_(1).to(device)
            self._factors[device] = factors, torch.empty_like(factors)
        return self._factors[device]


def _signed(value: int) -> int:
    """The same bits as a signed integer."""
    return value - 2**64 if value >= 2**63 else value


def _replica_error(
    differing: Sequence[ReplicatedTensor], by_value: Mapping[tuple[int, int], list[int]], grid: Grid
) -> RunError:
    first = differing[0]
    most = max(by_value.values(), key=len)  # of several, the one with the lowest rank
    others = sorted(rank for ranks in by_value.values() if ranks is not most for rank in ranks)
    names = list(dict.fromkeys(tensor.name for tensor in differing))
    more = f"; and of {len(names) - 1} other parameters" if len(names) > 1 else ""
    given = f"{first.kind}: different bits on {_ranks(others, grid)} than on {_ranks(most, grid)}{more}"
    if not others:  # one rank has copies of two stages, which differ
        given = f"{first.kind}: different bits on two stages of {_ranks(most, grid)}{more}"
    return RunError(
        f"copies of {first.name} are no longer the same",
        given=given,
        expected="the same bits on all ranks that have a weight, after every step",
        hint="resume from an earlier checkpoint; a rank that differs again may have faulty hardware",
    )


def _ranks(ranks: Sequence[int], grid: Grid) -> str:
    """Rank numbers for a message; a single one with its coordinates."""
    if len(ranks) == 1:
        coord = " ".join(f"{axis}={at}" for axis, at in grid.coord(ranks[0]).items() if grid.degree(axis) > 1)
        return f"rank {ranks[0]} ({coord})"
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"ranks {shown}{f' and {len(ranks) - _MAX_SHOWN} more' if len(ranks) > _MAX_SHOWN else ''}"
