"""Parts of expert parallelism without which the numbers are not those of one process."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from plait.parallel.experts import dispatch
from plait.parallel.tensor.shards import TokenShards
from plait.parallel.zero.rank_context import UnitGroups
from plait.plan.axes import Roles, UnitKind
from support import hf_models, programs
from support.pool import Pool

EXCHANGE = dispatch._Exchange


def _not_sent(outs: Any, parts: Any, group: Any, *, label: str) -> None:
    if label.startswith("counts"):
        _list(outs, parts, group, label=label)
        return
    for rank, (out, part) in enumerate(zip(outs, parts, strict=True)):
        out.copy_(part) if rank == group.rank else out.zero_()


def _own_gradients(ctx: Any, *gradients: Tensor) -> Any:
    with mock.patch.object(dispatch, "all_to_all_list", _not_sent):
        return _backward(ctx, *gradients)


def _divided_gradients(ctx: Any, *gradients: Tensor) -> Any:
    gradient, *others = _backward(ctx, *gradients)
    return gradient / ctx.group.size, *others


def _without_kind(self: Roles, _: UnitKind = UnitKind.DENSE) -> Any:
    return _replicas(self)


def _without_replicas(self: Roles, kind: UnitKind = UnitKind.DENSE) -> Any:
    return () if kind is UnitKind.EXPERT else _replicas(self, kind)


def _all_counted(cls: Any, mesh: Any, plan: Any, kind: UnitKind) -> UnitGroups:
    return replace(_build(mesh, plan, kind), counts=True)


def _own_tokens(x: Tensor, tokens: TokenShards) -> Tensor:
    return tokens.shard(x)


def _own_norm(self: Roles) -> Any:
    return ("pp", *self.states(), "row", "col")


_backward, _replicas, _build = EXCHANGE.backward, Roles.replicas, UnitGroups.build
_list = dispatch.all_to_all_list
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows not sent": (dispatch, "all_to_all_list", _not_sent),
    "gradients not sent back": (EXCHANGE, "backward", staticmethod(_own_gradients)),
    "gradients divided by the ranks of ep": (EXCHANGE, "backward", staticmethod(_divided_gradients)),
    "gradients of other experts added": (Roles, "replicas", _without_kind),
    "gradients of the same experts not added": (Roles, "replicas", _without_replicas),
    "dense units counted by all ranks of ep": (UnitGroups, "build", classmethod(_all_counted)),
    "norm of this rank's experts": (Roles, "one_copy", property(_own_norm)),
    "gradients of other columns' tokens not gathered": (dispatch, "split", _own_tokens),
}
ON_FOUR_RANKS = {
    "gradients of the same experts not added": "dp=4",
    "gradients of other columns' tokens not gathered": "dp=2 tp=2",
}


def _train(task: programs.Task, plan: str, mutation: str) -> programs.Trace:
    with mock.patch.object(*MUTATIONS[mutation]):
        return programs.train_task(task, plan)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_changes_the_numbers(pool: Pool, mutation: str) -> None:
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True, steps=2)
    num_ranks, words = (4, ON_FOUR_RANKS[mutation]) if mutation in ON_FOUR_RANKS else (2, "dp=2")
    ours, *_ = pool.run(_train, num_ranks, task, f"{words} ep=2 precision=fp64", mutation)
    expected = programs.one_process_task(task, ours.first_weights, 1)
    with pytest.raises(AssertionError):
        programs.assert_same(ours, expected)
