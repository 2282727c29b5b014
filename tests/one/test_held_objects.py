"""The optimizer and the parameters that a script holds: see also tests/ranks/test_torch_habits.py."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import CheckpointError, ModelError, PlaitError, PlanError

BATCH = {"input": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}


def summed(outputs: Tensor, _: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def net(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def engine_of(model: nn.Module, plan: str = "dp=1", **options: Any) -> plait.Engine:
    return plait.parallelize(model, plan, loss=summed, optimizer_args={"lr": 0.1}, **options)


def changes(before: dict[str, Tensor], engine: plait.Engine) -> list[str]:
    return [name for name, full in engine.full_parameters().items() if not torch.equal(full, before[name])]


def test_zero_grad_between_backward_and_update_drops_the_gradients() -> None:
    engine = engine_of(net(), "dp=1 micro=2")
    once, before = engine_of(net()), engine.full_parameters()
    half = {"input": BATCH["input"][:3]}
    engine.backward(*engine.loss({"input": BATCH["input"][3:]}))
    engine.optimizer.zero_grad()
    with pytest.raises(PlanError, match="update without a gradient"):
        engine.update()
    assert not changes(before, engine)
    engine.backward(*engine.loss(half))
    engine.update()
    once.step(half)
    assert not changes(once.full_parameters(), engine)


def test_a_scheduler_warns_only_if_it_steps_before_the_engine() -> None:
    engine = engine_of(net())
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()
    engine = engine_of(net())
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    with warnings.catch_warnings(action="error"):
        assert engine.step({"input": torch.full((2, 4), torch.inf)}).skipped
        scheduler.step()


def test_a_state_dict_of_another_plan_or_optimizer_is_refused_before_anything_changes() -> None:
    engine = engine_of(net())
    engine.step(BATCH)
    group = engine.optimizer.param_groups[0]
    others = [
        engine_of(net(), "dp=1 precision=bf16").optimizer.state_dict(),
        engine_of(net(), optimizer=torch.optim.SGD).optimizer.state_dict(),
        torch.optim.AdamW(net().parameters()).state_dict(),
    ]
    for other in others:
        group["lr"] = 0.25
        with pytest.raises(CheckpointError, match="the state dict is not of this engine's optimizer"):
            engine.optimizer.load_state_dict(other)
        assert group["lr"] == 0.25


@pytest.mark.parametrize("plan", ["dp=1", "dp=1 optim_dtype=bf16", "dp=1 precision=bf16 offload=disk"])
def test_a_loop_resumes_with_the_state_dicts_of_model_and_optimizer(plan: str, tmp_path: Path) -> None:
    where = {"offload_dir": tmp_path} if "disk" in plan else {}
    straight = engine_of(net(), plan, **where)
    straight.step(BATCH)
    weights, states = straight.full_parameters(), straight.optimizer.state_dict()
    torch.save(states, tmp_path / "states")
    straight.step(BATCH)
    (model := net()).load_state_dict(weights)
    resumed = engine_of(model, plan, **where)
    resumed.optimizer.load_state_dict(torch.load(tmp_path / "states"))
    resumed.num_steps = 1  # the seed of bf16's rounding
    resumed.step(BATCH)
    assert not changes(straight.full_parameters(), resumed)


def test_a_models_parameter_objects_and_what_holds_them_stay() -> None:
    model = net()
    held, moments = list(model.parameters()), {p: p.detach().clone() for p in model.parameters()}
    engine = engine_of(model)
    engine.step(BATCH)
    assert all(mine is its for mine, its in zip(held, engine.model.parameters(), strict=True))
    assert all(not torch.equal(p, moments[p]) for p in engine.model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_from_before_parallelize_run_once_in_the_newest_engine(device: str) -> None:
    model, calls = net(device), []
    model[0].weight.register_hook(lambda gradient: calls.append(1) or gradient * 0)  # type: ignore[func-returns-value]
    for count in (1, 2):
        engine = engine_of(model)
        before = engine.full_parameters()
        engine.optimizer.param_groups[0]["weight_decay"] = 0.0
        engine.step(BATCH)
        assert len(calls) == count
        assert changes(before, engine) == ["0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    "plan", ["dp=1 precision=bf16", "dp=1 offload=cpu", "dp=1 offload=disk precision=bf16"]
)
def test_writes_through_data_reach_the_master_weights(plan: str, tmp_path: Path) -> None:
    engine = engine_of(net(), plan, **({"offload_dir": tmp_path} if "disk" in plan else {}))
    engine.step(BATCH)
    weight: Tensor = engine.model[0].weight
    held, rows = weight.data, weight.data[1:]
    held[0, :2] = 0.5
    before = engine.full_parameters()["0.weight"]
    assert before[0, :2].tolist() == [0.5, 0.5]
    assert before[0, 2:].bfloat16().tolist() == weight[0, 2:].bfloat16().tolist()
    del held
    engine.step(BATCH)
    rows[0] = 0.25  # a view of the data that was read before the step
    assert engine.full_parameters()["0.weight"][1].tolist() == [0.25] * 4
    engine.step(BATCH)
    assert (engine.full_parameters()["0.weight"][1] - 0.25).abs().max() < 0.2


def test_a_gradient_is_in_grad_for_hooks_of_its_parameter_only() -> None:
    engine = engine_of(net())
    norms: list[float] = []
    weight = engine.model[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    engine.step(BATCH)
    assert norms[0] > 0
    assert weight.grad is None
    engine.backward(*engine.loss(BATCH))
    with pytest.raises(ModelError, match=r"not in \.grad"):
        _ = weight.grad
    engine.update()
    assert weight.grad is None


def test_errors_name_the_reader() -> None:
    engine = engine_of(net())
    with pytest.raises(PlaitError) as caught:
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)
    assert "0.weight.grad is read in torch.nn.utils.clip_grad" in str(caught.value)
    assert "clip_norm=" in str(caught.value)
