"""Defects of losses over all tokens: each changes the numbers, or the loads that biases follow."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import routers
from plait.engine.routers import Pass, StageRouters, Tap
from support import programs, router_models
from support.pool import Pool

_watching, _added, _close, _z_sum = StageRouters.watching, StageRouters.added, Tap.close, routers.z_sum


def _without_counts(self: StageRouters, outputs: Any) -> Any:
    return outputs, self._sums * torch.tensor([[0.0], [1.0]])


def _detached(self: StageRouters, outputs: Any) -> Any:
    return outputs, self._sums.detach()


def _divided(self: StageRouters, total: Tensor, *given: Any) -> Tensor:
    return total + (_added(self, total, *given) - total) / self._group.size


def _kept_open(self: Tap) -> tuple[Tensor, ...]:
    seen = _close(self)
    self.is_open = True
    return seen


def _added_again(self: Tap) -> tuple[Tensor, ...]:
    *recomputed, own = _kept_open(self)
    return (*(logits.detach() for logits in recomputed), own)


def _in_evaluation(self: StageRouters, micro: Any, kind: Pass) -> Any:
    return _watching(self, micro, kind._replace(trains=True))


def _forgotten(self: StageRouters) -> None:
    self._of_step = None


STEP = "dp=2 micro=2 router_balance=step"
OF_LOSSES: dict[str, tuple[str, Any, str, Any]] = {
    "counts not summed over stages": ("pp=2 micro=2", StageRouters, "message", _without_counts),
    "no gradient sent back to stages": ("pp=2 micro=2", StageRouters, "message", _detached),
    "mean of local losses": ("dp=2", routers, "all_reduce", lambda *_, **__: None),
    "auxiliary loss divided by dp": ("dp=2 ep=2", StageRouters, "added", _divided),
    "padding counted": ("dp=2", routers, "_mask", lambda _: None),
    "z loss multiplied by dp": ("dp=2", routers, "z_sum", lambda *given: 2 * _z_sum(*given)),
    "logits of recomputed blocks added": ("dp=2 micro=2 recompute=full", Tap, "close", _added_again),
    "step's counts of the rank alone": (STEP, StageRouters, "end_first_pass", lambda _: None),
    "counts of micro-batches": (STEP, StageRouters, "end_first_pass", _forgotten),
}
OF_LOADS: dict[str, tuple[str, Any, str, Any]] = {
    "recomputed blocks counted": ("dp=2 micro=2 recompute=full", Tap, "close", _kept_open),
    "evaluation counted": ("dp=2", StageRouters, "watching", _in_evaluation),
    "loads of earlier steps counted": ("tp=2", StageRouters, "take_totals", lambda self: self.totals),
}


def _train(task: programs.Task, plan: str, defect: str) -> programs.Trace:
    with mock.patch.object(*OF_LOSSES[defect][1:]):
        return programs.train_task(task, plan)


@pytest.mark.parametrize("defect", OF_LOSSES)
def test_a_defect_changes_the_numbers(pool: Pool, defect: str) -> None:
    task = router_models.task_of("mixtral", router_models.padded, z_loss=router_models.Z_LOSS)
    plan = plait.Plan.parse(f"{OF_LOSSES[defect][0]} precision=fp64")
    ours, *_ = pool.run(_train, 2, task, str(plan), defect)
    with pytest.raises(AssertionError):
        programs.assert_same(ours, router_models.one_process(task, plan, ours.first_weights))


def _loads(words: str, defect: str) -> list[Any]:
    with mock.patch.object(*OF_LOADS[defect][1:]):
        return router_models.biased(words)[0]


@pytest.mark.parametrize("defect", OF_LOADS)
def test_a_defect_changes_the_loads(pool: Pool, defect: str) -> None:
    ((expected, *_),) = pool.run(router_models.biased, 1, "dp=1")
    ours, *_ = pool.run(_loads, 2, OF_LOADS[defect][0], defect)
    assert ours != expected
