"""Ranks of a row x col grid as threads of one process: a second, slow implementation of tensor plans.

The embedding, the head and norms over rows get full features here, and keep full weights.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models import blocks_of
from plait.parallel.tensor.other_layers import slice_head_arguments
from plait.plan.sharding import DimSharding, LayerSharding, ParamSharding, Range, Style, TPPlan, split
from support.tensor_models import LENGTH, coordinates, loss_of, shard_of

TOKENS = torch.randint(3, 101, (2, LENGTH), generator=torch.Generator().manual_seed(2))

Gradients = dict[str, Tensor]


class Exchange:
    """All-gather between threads: each passes a tensor and receives all of them in rank order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def all(self, rank: int, local: Tensor) -> list[Tensor]:
        self._slots[rank] = local.detach()
        self._barrier.wait()
        found = [tensor for tensor in self._slots if tensor is not None]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class AxisPeers:
    """The ranks along an axis, and this one's index."""

    exchange: Exchange
    rank: int

    def all(self, local: Tensor) -> list[Tensor]:
        return self.exchange.all(self.rank, local)


class _Sum(torch.autograd.Function):
    """Sum over columns in forward, or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: AxisPeers, is_forward: bool) -> Tensor:
        ctx.backward_sum = None if is_forward else peers
        return sum(peers.all(x)) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.backward_sum is not None:
            grad = sum(ctx.backward_sum.all(grad))
        return grad, None, None


class _Gather(torch.autograd.Function):
    """Gather shards of the last dim in forward and take the own shard of the gradient in backward; or
    reversed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranges: tuple[tuple[Range, ...], ...],
        peers: AxisPeers,
        gathers: bool,
    ) -> Tensor:
        ctx.rest = (ranges, peers, gathers)
        return _unshard(peers.all(x), ranges) if gathers else _shard(x, ranges[peers.rank])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ranges, peers, gathers = ctx.rest
        grad = _shard(grad, ranges[peers.rank]) if gathers else _unshard(peers.all(grad), ranges)
        return grad, None, None, None


class _Tokens(torch.autograd.Function):
    """Gather the columns' tokens in forward and take the own shard of the gradient in backward; or reversed.

    `sums`: shards are taken of the sum over columns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: AxisPeers, gathers: bool, sums: bool) -> Tensor:
        ctx.rest = (peers, gathers, sums)
        return _Tokens._move(x, peers, gathers, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        peers, gathers, sums = ctx.rest
        return _Tokens._move(grad, peers, not gathers, sums), None, None, None

    @staticmethod
    def _move(x: Tensor, peers: AxisPeers, gathers: bool, sums: bool) -> Tensor:
        dim = 0 if x.ndim == 2 else 1
        if gathers:
            return torch.cat(peers.all(x), dim)
        full = sum(peers.all(x)) if sums else x
        batch = x.shape[0] // LENGTH if x.ndim == 2 else 1  # for blocks that fold the batch into the tokens
        sizes = [batch * (stop - start) for start, stop in split(LENGTH, peers.exchange.size)]
        return full.split(sizes, dim)[peers.rank].clone()  # falcon adds to it in place


@dataclass
class Stream:
    """A block or region with sharded tokens: gathers or shards its input, or its output."""

    inner: Callable[..., Any]
    peers: AxisPeers
    gathers: bool
    sums: bool = False
    at_end: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def move(x: Tensor) -> Tensor:
            return _Tokens.apply(x, self.peers, self.gathers, self.sums)

        if self.at_end:
            found = self.inner(*args, **kwargs)
            return (move(found[0]), *found[1:]) if isinstance(found, tuple) else move(found)
        if not args:
            return self.inner(**{**kwargs, "hidden_states": move(kwargs["hidden_states"])})
        return self.inner(move(args[0]), *args[1:], **kwargs)


def _shard(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    return torch.cat([x[..., start:stop] for start, stop in ranges], -1)


def _unshard(shards: list[Tensor], ranges: tuple[tuple[Range, ...], ...]) -> Tensor:
    """Join shards of the last dim at their ranges."""
    size = max(stop for found in ranges for _, stop in found)
    full = shards[0].new_full((*shards[0].shape[:-1], size), float("nan"))
    for local, found in zip(shards, ranges, strict=True):
        at = 0
        for start, stop in found:
            full[..., start:stop] = local[..., at : at + stop - start]
            at += stop - start
    return full


@dataclass
class Layer:
    """A layer's forward on one rank.

    tokens: whole; cut (sharded); or pure: sharded, and its region sums the gradient of its input
    """

    cut: LayerSharding
    module: nn.Module
    rows: AxisPeers
    cols: AxisPeers
    tokens: str

    def __post_init__(self) -> None:
        self.inner = self.module.forward

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self.cut
        if cut.style is Style.COLUMN and not cut.head:
            found = self._linear(x if self.tokens == "pure" else _Sum.apply(x, self.cols, False))
            found = self._biased(_Sum.apply(found, self.rows, True))
            return _gather(found, cut.out, self.cols, True) if cut.gathers else found
        if cut.style is Style.ROW:
            x = _gather(x, cut.inp, self.cols, False) if cut.splits else x
            found = self._linear(_Sum.apply(x, self.rows, False))
            if self.tokens == "whole" or cut.summed:
                found = self._biased(_Sum.apply(found, self.cols, True))
                return _Sum.apply(found, self.cols, False) if cut.summed else found
            return self._biased(_Tokens.apply(found, self.cols, False, True))
        if cut.style is Style.EXPERTS:
            args = tuple(_Sum.apply(a, self.cols, False) if a.is_floating_point() else a for a in args)
            return _Sum.apply(self.inner(_Sum.apply(x, self.cols, False), *args, **kwargs), self.cols, True)
        if cut.style is Style.MLA_LATENT:
            found = self.inner(x).clone()
            for start, stop in cut.summed:
                found[..., start:stop] = _Sum.apply(found[..., start:stop].clone(), self.cols, False)
            return found
        return self._with_whole_features(x, *args, **kwargs)

    def _with_whole_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut, reads = self.cut, self.cut.out if self.cut.style is Style.NORM else self.cut.inp
        if cut.style is not Style.VOCABULARY:
            x = _gather(x, reads, self.rows, True)
        found = self.inner(x, *args, **kwargs)
        return found if cut.head else _gather(found, cut.out, self.rows, False)

    def _linear(self, x: Tensor) -> Tensor:
        weight = self.module.weight
        return F.linear(x, weight.mT if self.cut.transposed else weight)

    def _biased(self, x: Tensor) -> Tensor:
        return x if self.module.bias is None else x + self.module.bias


def _gather(x: Tensor, along: DimSharding | None, peers: AxisPeers, gathers: bool) -> Tensor:
    return x if along is None else _Gather.apply(x, along.ranges, peers, gathers)


def replicated_ids(model: nn.Module, plan: TPPlan) -> set[int]:
    """Ids of the parameters that keep full weights here."""
    kept = [cut.module for cut in plan.layers if cut.head or cut.style in (Style.VOCABULARY, Style.NORM)]
    return {id(p) for name in kept for p in model.get_submodule(name).parameters()}


def rank_of(model: nn.Module, plan: TPPlan, rows: AxisPeers, cols: AxisPeers, *, sequence: bool) -> nn.Module:
    """Build a rank's model."""
    local = copy.deepcopy(model)
    kept, cuts = replicated_ids(local, plan), {cut.name: cut for cut in plan.parameters}
    for name, parameter in local.named_parameters():
        if name in cuts and id(parameter) not in kept:
            parameter.data = shard_of(parameter.data, cuts[name], rows.rank, cols.rank).clone()
    for module, key, values in plan.attributes:
        assert isinstance(getattr(local.get_submodule(module), key), int)
        setattr(local.get_submodule(module), key, values[cols.rank])
    slice_head_arguments(local, plan, cols.rank)
    for cut in plan.layers:
        if cut.style not in (Style.FEATURE_EMBEDDING, Style.PER_HEAD_NORM, Style.DEPTHWISE):
            layer = local.get_submodule(cut.module)
            region = next((r for r in plan.regions if f"{cut.module}.".startswith(f"{r}.")), None)
            tokens = "whole" if not sequence else "pure" if region in plan.pure else "cut"
            layer.forward = Layer(cut, layer, rows, cols, tokens)
    if sequence:
        _shard_tokens(local, plan, cols)
    return local


def _shard_tokens(local: nn.Module, plan: TPPlan, cols: AxisPeers) -> None:
    for name in plan.regions:
        region = local.get_submodule(name)
        region.forward = Stream(region.forward, cols, True, sums=name in plan.pure)
    blocks = [block for _, block in blocks_of(local)]
    blocks[0].forward = Stream(blocks[0].forward, cols, False)
    blocks[-1].forward = Stream(blocks[-1].forward, cols, True, at_end=True)


def trained(
    model: nn.Module, plan: TPPlan, tokens: Tensor, *, sequence: bool = False
) -> dict[tuple[int, int], tuple[float, Gradients]]:
    """Loss and gradients by parameter of every rank; partial gradients are not summed."""
    over_cols = [Exchange(plan.cols) for _ in range(plan.rows)]
    over_rows = [Exchange(plan.rows) for _ in range(plan.cols)]

    def run(row: int, col: int) -> tuple[float, Gradients]:
        try:
            rows, cols = AxisPeers(over_rows[col], row), AxisPeers(over_cols[row], col)
            local = rank_of(model, plan, rows, cols, sequence=sequence)
            loss = loss_of(local, tokens)
            loss.backward()
            return loss.item(), {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
        except BaseException:
            for exchange in (*over_cols, *over_rows):  # no rank waits for one that failed
                exchange.abort()
            raise

    with _one_thread_each(), ThreadPoolExecutor(plan.rows * plan.cols) as threads:
        futures = {(row, col): threads.submit(run, row, col) for row, col in coordinates(plan)}
    for future in futures.values():
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return {rank: future.result() for rank, future in futures.items()}


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differences(
    model: nn.Module, plan: TPPlan, tokens: Tensor = TOKENS, *, sequence: bool = False
) -> dict[str, float]:
    """Parameters whose gradient is not the whole model's, parts summed as the plan says, and by how much."""
    model.zero_grad()
    whole = loss_of(model, tokens)
    whole.backward()
    ranks = trained(model, plan, tokens, sequence=sequence)
    furthest = max(abs(loss - whole.item()) for loss, _ in ranks.values())
    found = {"loss": furthest} if furthest > 1e-6 else {}
    cuts, stays = {cut.name: cut for cut in plan.parameters}, replicated_ids(model, plan)
    grads = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    least = 1e-3 * max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        unsharded = ParamSharding(name, (None,) * grad.ndim, name in cuts and cuts[name].partial)
        cut = unsharded if id(model.get_parameter(name)) in stays else cuts.get(name, unsharded)
        for row, col in ranks:
            mine = sum(ranks[row, c][1][name] for c in cut.sharers(plan.cols, col) or (col,))
            # Norms and rotary tables compute in float32; a bias of keys alone has no gradient.
            scale = max(float(grad.abs().max()), least)
            error = float((mine - shard_of(grad, cut, row, col)).abs().max()) / scale
            if not error < 1e-4:
                found[name] = error
    return found
