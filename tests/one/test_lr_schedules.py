"""Learning-rate schedules of a script: torch's schedulers over `engine.optimizer`, saved and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import plait
from plait.errors import CheckpointError
from support import programs

STEPS = 5
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10),
}


def engine_of(**options: Any) -> plait.Engine:
    options.setdefault("optimizer_args", {"lr": 1e-2, "weight_decay": 0.1})
    return plait.parallelize(programs.llama(), "dp=1 precision=fp64", seed=3, **options)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("through", ["a checkpoint", "load_state"])
def test_a_schedule_goes_on_after_a_load_where_it_stopped(name: str, through: str, tmp_path: Path) -> None:
    batches = programs.batches(STEPS + 3)
    first = engine_of()
    scheduler = SCHEDULES[name](first.optimizer)
    for batch in batches[:STEPS]:
        first.step(batch)
        scheduler.step()
    second = engine_of()
    resumed = SCHEDULES[name](second.optimizer)
    if through == "a checkpoint":
        second.load(first.save(tmp_path))
    else:
        second.load_state(first.state())
    resumed.load_state_dict(scheduler.state_dict())
    for batch in batches[STEPS:]:
        assert second.step(batch) == first.step(batch)
        scheduler.step()
        resumed.step()
    assert _options(second) == _options(first)


def _options(engine: plait.Engine) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]


def test_every_number_of_the_groups_is_restored_and_the_choice_of_kernels_is_not() -> None:
    first = engine_of()
    first.optimizer.param_groups[0] |= {"lr": torch.tensor(0.5), "betas": (0.5, 0.25), "weight_decay": 0}
    first.optimizer.param_groups[1] |= {"amsgrad": True, "initial_lr": 0.75}
    second = engine_of(optimizer_args={"lr": 1e-3, "foreach": True})
    second.load_state(first.state())
    decayed, others = second.optimizer.param_groups
    assert (decayed["lr"], decayed["betas"], decayed["weight_decay"]) == (0.5, (0.5, 0.25), 0)
    assert (others["lr"], others["amsgrad"], others["initial_lr"]) == (1e-2, True, 0.75)
    assert decayed["foreach"]
    assert not decayed["fused"]


def test_weights_alone_and_states_without_options_leave_the_engines_own() -> None:
    first = engine_of()
    state = first.state()
    first.optimizer.param_groups[0]["lr"] = 7.0
    older = {key: value for key, value in state.items() if "param_groups" not in key}
    second = engine_of(optimizer_args={"lr": 1e-3})
    second.load_state(older)
    assert second.optimizer.param_groups[0]["lr"] == 1e-3


def test_options_of_other_groups_are_refused_before_anything_changes() -> None:
    first = engine_of()
    model = programs.llama(on_meta=False)
    second = plait.parallelize(model, "dp=1 precision=fp64", param_groups=model.parameters())
    before = second.full_parameters()
    with pytest.raises(CheckpointError, match="2 param_groups, here 1"):
        second.load_state(first.state())
    assert all(torch.equal(before[name], tensor) for name, tensor in second.full_parameters().items())
