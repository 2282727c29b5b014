"""Pieces of whole tensors, and a cut module beside the whole one on the same numbers."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import Call, Mesh, OpType, Transport, Work, all_reduce, connect
from plait.parallel.tensor import TensorGroups, apply_tp_plan
from plait.plan import Grid
from plait.plan.sharding import DimSharding, LayerSharding, TPPlan

GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (2, 3)]
Cuts = tuple[DimSharding | None, ...]


def even(axis: str, size: int, ranks: int) -> DimSharding:
    """Consecutive pieces, the first ones longer where `size` does not divide."""
    return packed(axis, size, 1, ranks)


def packed(axis: str, part: int, parts: int, ranks: int) -> DimSharding:
    """Every rank has a piece of each of `parts` parts that lie one after the other."""
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


def silent(groups: TensorGroups, *axes: str) -> TensorGroups:
    """The same groups, of which those along `axes` say nothing to each other."""
    old = {axis: groups.along(axis) for axis in axes}
    new = {axis: replace(group, link=_Silent(group.rank)) for axis, group in old.items()}  # type: ignore[arg-type]
    return replace(groups, **new)


class _Silent:
    """A transport on which nothing is sent: each rank gets what it gave itself, and zeros of the others."""

    def __init__(self, place: int) -> None:
        self._place = place

    def run(self, call: Call) -> None:
        if call.verb is OpType.ALL_GATHER:
            own = call.given.clone()
            call.taken.zero_()[self._place * own.numel() :][: own.numel()] = own
        elif call.verb is OpType.REDUCE_SCATTER:
            call.taken.copy_(call.given[self._place * call.taken.numel() :][: call.taken.numel()])

    def start(self, call: Call) -> Work:
        self.run(call)
        return Work()


def recorded(groups: TensorGroups, log: list[str]) -> TensorGroups:
    """The same groups, which write down what they do: `all-reduce col`, `start ...`, `end ...`."""
    told = {
        axis: replace(groups.along(axis), link=_Recorder(groups.along(axis).link, axis, log))  # type: ignore[arg-type]
        for axis in ("row", "col")
    }
    return replace(groups, **told)


class _Recorder:
    """A transport in front of another."""

    def __init__(self, link: Transport | None, axis: str, log: list[str]) -> None:
        self._link, self._axis, self._log = link, axis, log

    def run(self, call: Call) -> None:
        assert self._link is not None
        self._log.append(f"{call.verb.value} {self._axis}")
        self._link.run(call)

    def start(self, call: Call) -> Work:
        assert self._link is not None
        self._log.append(f"start {call.verb.value} {self._axis}")
        return Work(
            self._link.start(call).wait, lambda: self._log.append(f"end {call.verb.value} {self._axis}")
        )


class Products(TorchDispatchMode):
    """Writes down products: `mm` and the shape of what comes out."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._log.append(f"mm {tuple(out.shape)}")
        return out


def own(tensor: Tensor, groups: TensorGroups, cuts: Cuts) -> Tensor:
    """This rank's box of a whole tensor; `cuts` are of its last dims."""
    for back, cut in enumerate(reversed(cuts), start=1):
        if cut is not None:
            ranges = cut.ranges[groups.along(cut.axis).rank]
            tensor = torch.cat([tensor.narrow(-back, a, b - a) for a, b in ranges], -back)
    return tensor.clone()


def localise(module: nn.Module, groups: TensorGroups, cuts: dict[str, Cuts]) -> None:
    """Replaces the named parameters by this rank's pieces."""
    for name, dims in cuts.items():
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        parameter = getattr(owner, leaf)
        if parameter is not None:
            piece = own(parameter.detach(), groups, dims)
            setattr(owner, leaf, nn.Parameter(piece, requires_grad=parameter.requires_grad))


@dataclass
class Case:
    """A module, and how it is cut. Every rank makes the same one.

    parameters  the cut of each parameter that is not whole
    inp, out    of the input and of the output, which is a tensor
    partial     parameters whose gradients are parts of a sum over col
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
        localise(module, groups, self.parameters)
        plan = TPPlan(groups.row.size, groups.col.size, tuple(self.layers), **self.plan)
        blocks = [(name, module.get_submodule(name)) for name in self.blocks]
        apply_tp_plan(module, plan, groups, blocks, sequence=self.sequence)
        return module


def gaps(case: Case, groups: TensorGroups, *, steps: int = 2) -> dict[str, float]:
    """How far the cut module is from the whole one: its output and every gradient, the worst of the steps."""
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
            piece = None if tensor is None else own(tensor, groups, cuts)
            found[name] = max(found.get(name, 0.0), gap(got[name], piece))
    return found


def gap(mine: Tensor | None, expected: Tensor | None) -> float:
    if mine is None or expected is None:
        return 0.0 if mine is expected else float("inf")
    if mine.shape != expected.shape:
        return float("inf")
    return float((mine - expected).abs().max()) if mine.numel() else 0.0


def run(module: nn.Module, x: Tensor, c: Tensor) -> dict[str, Tensor | None]:
    """The output y, and the gradients of sum(y * c): of x and of every parameter that needs one."""
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    (y * c).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    found |= {"x": x.grad} if x.is_floating_point() else {}
    return {"y": y.detach(), **found}
