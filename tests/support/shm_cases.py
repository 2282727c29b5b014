"""Cases of the host transport's tests: every rank runs the same list and checks its own results.

Expected results are computed by torch from all ranks' inputs, which are seeded by rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import (
    Group,
    World,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_gather,
    start_reduce,
    start_reduce_scatter,
    start_scatter,
)
from support.covering import covering

SMALL_BYTES, CHUNK_BYTES = 32 << 10, 256 << 10  # PL_SMALL and PL_CHUNK of native/group.h
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
REDUCTIONS = ["all_reduce", "reduce_scatter", "reduce"]
COPIES = ["all_gather", "broadcast", "scatter", "gather", "all_to_all"]
# Memory of this rank's tensors. "mixed": owned on every other rank, another half for each root.
PLACES = ["owned", "foreign", "mixed", "strided"]


@dataclass(frozen=True)
class Case:
    """`numel`: elements of a shard; for all_reduce, reduce and broadcast: of the tensor."""

    verb: str
    dtype: torch.dtype
    op: str
    numel: int
    place: str
    starts: bool = False  # use the start_ form, then wait

    def __str__(self) -> str:
        return f"{self.verb} {self.op} {self.numel} x {self.dtype}, {self.place}, starts={self.starts}"


def ops_of(verb: str, dtype: torch.dtype) -> list[str]:
    if verb in COPIES:
        return [""]
    if dtype is torch.bool:
        return ["max", "min"]
    return ["sum", "max", "min", "prod"] + (["mean"] if dtype.is_floating_point else [])


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A rank's input, the same on every rank that computes it."""
    generator = torch.Generator().manual_seed(1000 * rank + numel % 997)
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator) * 3).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """Reduce in rank order; bf16 and fp16 in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        other = part.to(wide)
        if op in ("sum", "mean"):
            total = total + other
        elif op == "prod":
            total = total * other
        else:
            total = torch.maximum(total, other) if op == "max" else torch.minimum(total, other)
    if op == "mean":
        total = total * torch.tensor(1 / len(parts), dtype=wide)
    return total.to(dtype)


class Memory:
    """Allocates a rank's tensors in the memory that the case selects."""

    def __init__(self, world: World, group: Group, case: Case) -> None:
        self._world, self._case = world, case
        self._owns = case.place == "owned" or (case.place == "mixed" and (group.rank + case.numel) % 2 == 0)

    def holding(self, source: Tensor) -> Tensor:
        if self._owns:
            return self._world.empty(source.numel(), source.dtype).copy_(source)
        if self._case.place == "strided":
            return torch.empty(source.numel(), 2, dtype=source.dtype)[:, 0].copy_(source)
        return source.clone()

    def blank(self, numel: int) -> Tensor:
        return self.holding(torch.full((numel,), 77, dtype=torch.int64).to(self._case.dtype))


def run_case(case: Case, world: World, group: Group) -> Tensor:
    """Run a case, check all of this rank's tensors against torch, and return its result."""
    memory = Memory(world, group, case)
    root = case.numel % group.size
    size, rank = group.size, group.rank
    inputs = [values(rank, case.numel, case.dtype) for rank in group.ranks]
    if case.verb in ("all_reduce", "reduce", "broadcast"):
        tensor = memory.holding(inputs[rank])
        if case.verb == "broadcast":
            do = start_broadcast if case.starts else broadcast
            _done(do(tensor, group, root))
            return _checked(case, tensor, inputs[root])
        if case.verb == "reduce":
            do = start_reduce if case.starts else reduce
            _done(do(tensor, group, root, case.op))
            return _checked(case, tensor, reduced(inputs, case.op) if rank == root else inputs[rank])
        do = start_all_reduce if case.starts else all_reduce
        _done(do(tensor, group, case.op))
        return _checked(case, tensor, reduced(inputs, case.op))
    if case.verb in ("all_gather", "gather"):
        shard = memory.holding(inputs[rank])
        out = memory.blank(size * case.numel) if case.verb == "all_gather" or rank == root else None
        if case.verb == "all_gather":
            _done((start_all_gather if case.starts else all_gather)(out, shard, group))
        else:
            _done((start_gather if case.starts else gather)(out, shard, group, root))
        _checked(case, shard, inputs[rank])
        return shard if out is None else _checked(case, out, torch.cat(inputs))
    return _spread(case, memory, group, root)


def _spread(case: Case, memory: Memory, group: Group, root: int) -> Tensor:
    """Run a collective whose input has a range for every rank."""
    size, rank = group.size, group.rank
    wholes = [values(rank, size * case.numel, case.dtype) for rank in group.ranks]
    mine = slice(rank * case.numel, (rank + 1) * case.numel)
    whole = memory.holding(wholes[rank])
    if case.verb == "all_to_all":
        out = memory.blank(size * case.numel)
        _done((start_all_to_all if case.starts else all_to_all)(out, whole, group))
        expected = torch.cat([other[mine] for other in wholes])
    else:
        out = memory.blank(case.numel)
        if case.verb == "scatter":
            do = start_scatter if case.starts else scatter
            _done(do(out, whole if rank == root else None, group, root))
            expected = wholes[root][mine]
        else:
            do = start_reduce_scatter if case.starts else reduce_scatter
            _done(do(out, whole, group, case.op))
            expected = reduced([other[mine] for other in wholes], case.op)
    _checked(case, whole, wholes[rank])
    return _checked(case, out, expected)


def _done(pending: object) -> None:
    if pending is not None:
        pending.wait()  # type: ignore[attr-defined]


def _checked(case: Case, found: Tensor, expected: Tensor) -> Tensor:
    assert_bits(found.contiguous(), expected, str(case))
    return found


def assert_bits(found: Tensor, expected: Tensor, what: str) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    wrong = (found.view(bits) != expected.view(bits)).nonzero().flatten()
    assert not wrong.numel(), (
        f"{what}: {wrong.numel()} wrong, the first at {wrong[0].item()}: "
        f"{found[wrong[0]].item()} instead of {expected[wrong[0]].item()}"
    )


def product(ranks: int) -> list[Case]:
    """All combinations of collective, dtype, op, size, memory and form."""
    return [
        Case(verb, dtype, op, numel, place, starts)
        for verb in REDUCTIONS + COPIES
        for dtype in [*FLOATS, *INTEGERS, torch.bool]
        for op in ops_of(verb, dtype)
        for numel in sizes(verb, dtype, ranks)
        for place in PLACES
        for starts in (False, True)
    ]


def sizes(verb: str, dtype: torch.dtype, ranks: int) -> list[int]:
    """Sizes around the thresholds of native/group.h: small calls, chunks, and more chunks than slots."""
    ranges = ranks if verb in ("reduce_scatter", "scatter", "all_to_all") else 1
    small, chunk = (most // dtype.itemsize // ranges for most in (SMALL_BYTES, CHUNK_BYTES))
    edges = [edge + step for edge in (small, chunk) for step in (-1, 0, 1)]
    return [0, 1, 7, 1000, *edges, 3 * chunk + 5, 5 * chunk + 1]


def in_pairs(ranks: int, seed: int) -> list[Case]:
    """A few cases that cover every pair of options."""
    found = {}
    for case in product(ranks):
        size = str(sizes(case.verb, case.dtype, ranks).index(case.numel))
        options = {"verb": case.verb, "dtype": str(case.dtype), "op": case.op, "size": size}
        options |= {"place": case.place, "starts": str(case.starts)}
        found[tuple(options.items())] = case
    return [found[tuple(chosen.items())] for chosen in covering([dict(each) for each in found], seed=seed)]
