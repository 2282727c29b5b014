"""Shards of tensors, and a sharded module compared with the full one on the same inputs."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import Call, Mesh, OpType, Transport, Work, all_reduce, connect
from plait.parallel.tensor.apply import apply_tp_plan
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.shards import TensorGroups
from plait.plan import Grid
from plait.plan.sharding import DimSharding, LayerSharding, TPPlan

GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (2, 3)]
Cuts = tuple[DimSharding | None, ...]


def even(axis: str, size: int, ranks: int) -> DimSharding:
    """Consecutive shards, the first ones longer if `size` does not divide."""
    return packed(axis, size, 1, ranks)


def packed(axis: str, part: int, parts: int, ranks: int) -> DimSharding:
    """Every rank has a shard of each of `parts` consecutive parts."""
    lengths = [part // ranks + (rank < part % ranks) for rank in range(ranks)]
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    return DimSharding(
        axis,
        tuple(
            tuple((k * part + start, k * part + start + length) for k in range(parts))
            for start, length in zip(starts, lengths, strict=True)
        ),
    )


def groups_of(rows: int, cols: int) -> TensorGroups:
    mesh = Mesh(connect(), Grid.from_degrees(row=rows, col=cols))
    return TensorGroups(mesh.group("row"), mesh.group("col"))


def muted_groups(groups: TensorGroups, *axes: str) -> TensorGroups:
    """The same groups; those along `axes` do not communicate."""
    old = {axis: groups.along(axis) for axis in axes}
    new = {axis: replace(group, transport_or_none=_MutedTransport(group.rank)) for axis, group in old.items()}  # type: ignore[arg-type]
    return replace(groups, **new)


class _MutedTransport:
    """Transport that sends nothing: each rank receives its own data, and zeros from the others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def run(self, call: Call) -> None:
        if call.op_type is OpType.ALL_GATHER:
            own = call.input.clone()
            call.output.zero_()[self._rank * own.numel() :][: own.numel()] = own
        elif call.op_type is OpType.REDUCE_SCATTER:
            call.output.copy_(call.input[self._rank * call.output.numel() :][: call.output.numel()])

    def start(self, call: Call) -> Work:
        self.run(call)
        return Work()


def recorded(groups: TensorGroups, log: list[str]) -> TensorGroups:
    """The same groups with a log of their operations: `all-reduce col`, `start ...`, `end ...`."""
    recorded_groups = {
        axis: replace(
            groups.along(axis), transport_or_none=_Recorder(groups.along(axis).transport_or_none, axis, log)
        )  # type: ignore[arg-type]
        for axis in ("row", "col")
    }
    return replace(groups, **recorded_groups)


class _Recorder:
    """Transport that logs calls and forwards them to another."""

    def __init__(self, link: Transport | None, axis: str, log: list[str]) -> None:
        self._link, self._axis, self._log = link, axis, log

    def run(self, call: Call) -> None:
        assert self._link is not None
        self._log.append(f"{call.op_type.value} {self._axis}")
        self._link.run(call)

    def start(self, call: Call) -> Work:
        assert self._link is not None
        self._log.append(f"start {call.op_type.value} {self._axis}")
        return Work(
            self._link.start(call).wait, lambda: self._log.append(f"end {call.op_type.value} {self._axis}")
        )


class MatmulLog(TorchDispatchMode):
    """Logs matrix products: `mm` and the shape of the result."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._log.append(f"mm {tuple(out.shape)}")
        return out


def own(tensor: Tensor, groups: TensorGroups, cuts: Cuts) -> Tensor:
    """This rank's shard of a full tensor; `cuts` are of its last dims."""
    for back, cut in enumerate(reversed(cuts), start=1):
        if cut is not None:
            ranges = cut.ranges[groups.along(cut.axis).rank]
            tensor = torch.cat([tensor.narrow(-back, a, b - a) for a, b in ranges], -back)
    return tensor.clone()


def shard_parameters(module: nn.Module, groups: TensorGroups, cuts: dict[str, Cuts]) -> None:
    """Replace the named parameters by this rank's shards."""
    for name, dims in cuts.items():
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        parameter = getattr(owner, leaf)
        if parameter is not None:
            shard = own(parameter.detach(), groups, dims)
            setattr(owner, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))


@dataclass
class Case:
    """A module and its sharding. Every rank builds the same one.

    parameters  sharding of each sharded parameter
    inp, out    sharding of the input and of the output, which is a tensor
    partial     parameters whose gradients are partial sums over col
    """

    module: nn.Module
    x: Tensor
    layers: list[LayerSharding]
    parameters: dict[str, Cuts] = field(default_factory=dict)
    inp: Cuts = ()
    out: Cuts = ()
    partial: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    sequence: bool = False
    plan: dict[str, Any] = field(default_factory=dict)

    def cut(self, groups: TensorGroups) -> nn.Module:
        module = copy.deepcopy(self.module)
        shard_parameters(module, groups, self.parameters)
        plan = TPPlan(groups.row.size, groups.col.size, tuple(self.layers), **self.plan)
        blocks = [(name, module.get_submodule(name)) for name in self.blocks]
        tokens = SequenceShard(groups.col) if self.sequence else None
        apply_tp_plan(module, plan, groups, blocks, sequence_shard=tokens)
        return module


def max_differences(case: Case, groups: TensorGroups, *, steps: int = 2) -> dict[str, float]:
    """Largest differences of the sharded module from the full one: output and every gradient, over all
    steps."""
    module = case.cut(groups)
    found: dict[str, float] = {}
    for step in range(steps):
        x = case.x if not case.x.is_floating_point() else case.x + step
        shape = case.module(x).shape
        c = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        expected = run(case.module, x, c)
        got = run(module, own(x, groups, case.inp), own(c, groups, case.out))
        for name in case.partial:
            all_reduce(got[name], groups.col)
        for name, tensor in expected.items():
            cuts = {"x": case.inp, "y": case.out, **case.parameters}.get(name, ())
            shard = None if tensor is None else own(tensor, groups, cuts)
            found[name] = max(found.get(name, 0.0), max_difference(got[name], shard))
    return found


def max_difference(mine: Tensor | None, expected: Tensor | None) -> float:
    if mine is None or expected is None:
        return 0.0 if mine is expected else float("inf")
    if mine.shape != expected.shape:
        return float("inf")
    return float((mine - expected).abs().max()) if mine.numel() else 0.0


def run(module: nn.Module, x: Tensor, c: Tensor) -> dict[str, Tensor | None]:
    """Output y, and the gradients of sum(y * c) for x and every trained parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    (y * c).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    found |= {"x": x.grad} if x.is_floating_point() else {}
    return {"y": y.detach(), **found}
