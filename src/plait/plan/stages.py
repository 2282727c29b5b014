"""The split of a model into pipeline stages: which blocks and parameters each stage has."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

from plait.plan.layout import UnitInfo

# The loss and its backward read the logits a few times in float32. In multiplications, as all costs are,
# that equals the head's cost for this many additional hidden units.
LOSS_AS_HIDDEN_UNITS = 16


def stage_of_gap(blocks: Sequence[tuple[int, int]], gap: int) -> int:
    """The stage, of those with blocks [start, stop), that runs block `gap` and the modules between it and the
    block before; the first one for -1, the last one for those after the last block."""
    return next((stage for stage, (_, stop) in enumerate(blocks) if gap < stop), len(blocks) - 1)


@dataclass(frozen=True)
class StageAssignment:
    """The stages of a model, in forward order. Stage s has blocks [start, stop), at least one; the first and
    the last stage may have none.

    Modules from which the first block's input is computed belong to the first stage; between two blocks, to
    the second one's stage; after the last block, to the last stage.

    shared      parameters outside blocks, or of blocks of several stages, by name: the stages that compute
                with them, in order. All others belong to one stage
    owner       every parameter and buffer of the model, by name: the stage that counts it, and whose value of
                a buffer is the model's
    changing    names of attributes of blocks that their forwards set, and that other stages cannot read
    skips       (k, g): what runs before block g reads the output of block k, though other blocks are between
                them. Stages pass it on
    is_traced   the use of parameters was traced in a run, not guessed from the order of their registration
    """

    blocks: tuple[tuple[int, int], ...]
    owner: Mapping[str, int]
    shared: Mapping[str, tuple[int, ...]]
    changing: frozenset[str] = frozenset()
    skips: frozenset[tuple[int, int]] = frozenset()
    is_traced: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.blocks)

    def stages_with(self, parameter: str) -> tuple[int, ...]:
        """The stages that compute with a parameter."""
        return self.shared.get(parameter, (self.owner[parameter],))

    def carried_into(self, stage: int) -> tuple[int, ...]:
        """The blocks whose outputs the stage receives in addition to that of the block before its first."""
        start, _ = self.blocks[stage]
        needed = {k for k, gap in self.skips if k < start - 1 and stage_of_gap(self.blocks, gap) >= stage}
        return tuple(sorted(needed))

    def units_of(self, stage: int, units: Iterable[UnitInfo]) -> tuple[UnitInfo, ...]:
        """The units of a stage, out of the model's. Parameters shared with other stages form one unit per set
        of stages: first in order if this stage is the first of the set, else last."""
        unshared: list[UnitInfo] = []
        shared: dict[tuple[int, ...], UnitInfo] = {}
        for unit in units:
            own = []
            for tensor in unit.tensors:
                stages = self.stages_with(tensor.name)
                if stages == (stage,):
                    own.append(tensor)
                elif stage in stages:
                    before = shared.get(stages, UnitInfo(shared_unit_name(stages), ()))
                    shared[stages] = replace(before, tensors=(*before.tensors, tensor))
            if own:
                unshared.append(replace(unit, tensors=tuple(own)))
        first = [unit for stages, unit in shared.items() if stages[0] == stage]
        return (*first, *unshared, *(unit for stages, unit in shared.items() if stages[0] != stage))

    def counted_on_other_stage(self, stage: int) -> frozenset[str]:
        """Parameters that this stage shares with an earlier one, which counts them."""
        return frozenset(name for name, stages in self.shared.items() if stage in stages[1:])

    @property
    def shared_units(self) -> dict[str, tuple[int, ...]]:
        """The units that several stages have, with those stages."""
        return {shared_unit_name(stages): stages for stages in sorted(set(self.shared.values()))}


def single_stage(names: Iterable[str], num_blocks: int) -> StageAssignment:
    """The assignment of everything to one stage."""
    return StageAssignment(((0, num_blocks),), dict.fromkeys(names, 0), {})


def shared_unit_name(stages: Sequence[int]) -> str:
    """The name of the unit of parameters that these stages share."""
    return f"shared by stages {', '.join(map(str, stages))}"


def balance_blocks(
    costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    ranks: Sequence[int] | None = None,
    bare_ends: bool = False,
) -> tuple[int, ...]:
    """Choose the number of consecutive blocks of each stage so that the slowest rank is as fast as possible.

    `costs`: of each block, in any unit. `first`, `last`: additional cost of the first and the last stage.
    `ranks`: the rank of every stage; None: one stage per rank. With several stages per rank the result is a
    local optimum: the best split for stages, or for one stage per rank, improved by moving single blocks.
    `bare_ends`: the first and the last stage may have no block, if no other split is as fast.

    [Note: heavy stages first]
    With M micro-batches under 1F1B on two ranks whose stages take a and b, a step takes (M-1) a + 2 b if
    the first is slower, M b + a if the second is. Of two equally slow splits, the one with the slow stage
    first is better.
    """
    assert 1 <= num_stages <= len(costs) + 2 * bare_ends, f"{len(costs)} blocks on {num_stages} stages"
    sums, extra = [0.0, *accumulate(costs)], [0.0] * num_stages
    extra[0] += first
    extra[-1] += last

    rank_of = range(num_stages) if ranks is None else ranks

    def loads_of(numbers: tuple[int, ...]) -> tuple[list[float], dict[int, float]]:
        stops = tuple(accumulate(numbers))
        loads = [
            sums[stop] - sums[stop - n] + more for n, stop, more in zip(numbers, stops, extra, strict=True)
        ]
        of_ranks = dict.fromkeys(rank_of, 0.0)
        for rank, load in zip(rank_of, loads, strict=True):
            of_ranks[rank] += load
        return loads, of_ranks

    def objective(numbers: tuple[int, ...]) -> tuple[float, float, int, float]:
        loads, of_ranks = loads_of(numbers)
        return max(of_ranks.values()), max(loads), loads.index(max(loads)), sum(load**2 for load in loads)

    def holds_up(numbers: tuple[int, ...], stage: int) -> bool:
        """Return whether the stage has none, or one block on the slowest rank: then none may be better."""
        _, of_ranks = loads_of(numbers)
        slowest = of_ranks[rank_of[stage]] == max(of_ranks.values())
        return not numbers[stage] or (numbers[stage] == 1 and slowest)

    best: tuple[int, ...] = ()
    for start, end in product((0, 1), (0, 1)) if bare_ends else [(0, 0)]:  # bare ones: first, last
        inner, bare = extra[start : num_stages - end], [0] * start + [num_stages - 1] * end
        if not 1 <= len(inner) <= len(costs) or (best and not all(holds_up(best, each) for each in bare)):
            continue
        numbers = _improved((0,) * start + _min_max_split(sums, inner) + (0,) * end, objective)
        if not best or objective(numbers)[0] < objective(best)[0] * (1 - 1e-9):
            best = numbers
    if ranks is not None and num_stages <= len(costs):  # another local optimum
        alone = _improved(balance_blocks(costs, num_stages, first=first, last=last), objective)
        return alone if objective(alone)[0] < objective(best)[0] * (1 - 1e-9) else best
    return best


def _improved(numbers: tuple[int, ...], objective: Callable[[tuple[int, ...]], Any]) -> tuple[int, ...]:
    """Move single blocks between neighbouring stages as long as that lowers the objective."""
    while True:
        best = min([numbers, *_moves(numbers)], key=objective)
        if objective(best) >= objective(numbers):
            return numbers
        numbers = best


def _min_max_split(sums: Sequence[float], extra: Sequence[float]) -> tuple[int, ...]:
    """Dynamic program: for the first `stop` blocks on the stages so far, the slowest stage, the sum of
    squares, the block counts. No stage of the result is slower than the slowest of equally many blocks."""
    num_blocks, num_stages = len(sums) - 1, len(extra)
    edges = pairwise([stage * num_blocks // num_stages for stage in range(num_stages + 1)])
    limit = max(sums[stop] - sums[start] + more for (start, stop), more in zip(edges, extra, strict=True))
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (cost, cost**2, (stop,))
        for stop in range(1, num_blocks + 1)
        if (cost := sums[stop] - sums[0] + extra[0]) <= limit
    }
    for stage in range(1, num_stages):
        longer = {}
        last_stop = num_blocks - (num_stages - stage - 1)  # leaves a block for each later stage
        for stop in range(stage + 1, last_stop + 1):
            options = []
            for start in range(stop - 1, stage - 1, -1):
                cost = sums[stop] - sums[start] + extra[stage]
                if cost > limit:
                    break
                if start in best:
                    slowest, squares, numbers = best[start]
                    options.append((max(slowest, cost), squares + cost**2, numbers, stop - start))
            if options:
                slowest, squares, numbers, last = min(options)
                longer[stop] = slowest, squares, (*numbers, last)
        best = longer
    return best[num_blocks][2]


def _moves(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the splits with one block moved to a neighbouring stage. Bare ends stay bare."""
    for stage in range(len(numbers) - 1):
        for step in (1, -1):
            moved = list(numbers)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(numbers[stage : stage + 2]) and min(moved[stage : stage + 2]):
                yield tuple(moved)
