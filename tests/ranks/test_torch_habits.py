"""Uses of optimizer and parameters in a loop for one device have torch's effect, or are errors."""

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, update_bn
from transformers import get_scheduler

import plait
from plait.errors import PlaitError
from plait.plan import Plan
from plait.server.job import join_job, process_world
from support.pool import Pool

STEPS, SAMPLES, WIDTH = 4, 8, 6
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
Act = Callable[[Any, Any], object]  # of a model and its optimizer
Habit = Callable[[Any], Any]  # a generator: before parallelize, before the first step, after each step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def _data(step: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step)).double()
    return {"x": x, "y": y.tanh()}


def _squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch["y"]).square().sum(), outputs.numel()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": [p for name, p in named.items() if name.endswith(end)]} for end in ("weight", "bias")]


def _in_torch(habit: Habit, *, by_hand: bool) -> dict[str, Tensor]:
    acts = habit(model := _net())
    next(acts)
    acts.send(optimizer := torch.optim.SGD(_groups(model), **SGD))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, count = _squares(model(_data(step)["x"]), _data(step))
        (loss / count).backward()
        if by_hand:
            next(acts)
        optimizer.step()
        if not by_hand and step < STEPS - 1:
            next(acts)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _in_an_engine(plan: str, name: str, world: Any = None) -> dict[str, Tensor] | str:
    """The weights; or the error's fact. The last step finds what was done before it."""
    habit, model = HABITS[name][0], _net()
    how = {"param_groups": _groups(model), "optimizer": torch.optim.SGD, "optimizer_args": SGD}
    how |= {"example_batch": {"x": torch.ones(2, WIDTH).double()}} if "p=2" in plan else {}
    acts = habit(model)
    next(acts)
    try:
        with warnings.catch_warnings(action="error"):
            engine = plait.parallelize(model, plan, loss=_squares, world=world, **how)
            acts.send(engine.optimizer)
            for step in range(STEPS):
                share = engine.shard(_data(step))
                if name in BY_HAND:
                    engine.backward(*engine.loss(share))
                    next(acts)
                    engine.update()
                    continue
                engine.step(share)
                if step < STEPS - 1:
                    next(acts)
            return engine.full_parameters()
    except PlaitError as error:
        has_four_parts = all((error.given, error.expected, error.hint))
        return error.fact if has_four_parts else str(error)


def _after_steps(act: Act) -> Habit:
    def habit(model: nn.Module) -> Any:
        optimizer = yield
        while True:
            yield
            act(model, optimizer)

    return habit


def _scheduled(make: Callable[[Any], Any], *metrics: float) -> Habit:
    def habit(_: nn.Module) -> Any:
        scheduler = make((yield))
        while True:
            yield
            scheduler.step(*metrics)

    return habit


def _warm(optimizer: Any) -> Any:
    parts = schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 5)
    return schedulers.SequentialLR(optimizer, [*parts], [2])


def _masked(model: Any) -> Any:
    """Hooks from before parallelize: one masks a weight's gradient, the other halves a bias's."""
    mask = (torch.arange(WIDTH) % 2).double()
    model.blocks[0].weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))

    def halve(parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.5

    model.blocks[1].bias.register_post_accumulate_grad_hook(halve)
    while True:
        yield


def _averaged(model: Any) -> Any:
    """An average of a list of parameters from before parallelize, which the model is set to at the end."""
    held = list(model.parameters())
    yield
    average = [parameter.detach().clone() for parameter in held]
    yield
    for _ in range(STEPS - 2):
        for mean, parameter in zip(average, held, strict=True):
            if not parameter.is_meta:
                mean.lerp_(parameter.detach().to(mean.dtype), 0.1)
        yield
    for mean, parameter in zip(average, held, strict=True):
        parameter.data.copy_(mean.to(parameter.device))
    yield


def _held(model: Any) -> Any:
    """Data of a weight, held beyond the time for which an engine unshards it."""
    held: list[Any] = []
    model.blocks[0].register_forward_hook(lambda module, *_: held.append(module.weight.data))
    while True:
        yield


def _with_an_older_optimizer(model: Any) -> Any:
    older = torch.optim.SGD(model.parameters(), lr=0.0)
    while True:
        yield
        older.step()


def _hooked_step(_: Any) -> Any:
    optimizer = yield
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda self, *_: self.param_groups[0].update(lr=0.1 * len(seen)))
    while True:
        yield


def _edit(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[1].update(weight_decay=0.1, momentum=0.5)


def _look(model: Any, optimizer: Any) -> None:
    """Reads that change nothing."""
    model.zero_grad()
    model.train()
    assert sum(p.numel() for p in model.parameters())
    assert len(parameters_to_vector(p for p in model.parameters() if not p.is_meta))
    assert [name for name, p in model.named_parameters() if p.grad is None]
    assert not any(p.data.isnan().any() for p in model.parameters() if not p.is_meta)
    assert len(optimizer.param_groups) == 2
    assert optimizer.defaults["momentum"] == 0.9
    assert "lr: " in repr(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


def _copy(model: Any, _: Any) -> None:
    average, other = AveragedModel(model), copy.deepcopy(model)
    average.update_parameters(model)
    update_bn([torch.ones(2, WIDTH).to(next(model.parameters()))], average)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (average.module, other, loaded):
        copied.load_state_dict(model.state_dict())
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        copied(torch.ones(2, WIDTH).to(next(model.parameters()))).sum().backward()
        clip_grad_norm_(copied.parameters(), 1.0)
    model.to(next(model.parameters()).dtype)  # what it has


def _resume(_: Any, optimizer: Any) -> None:
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(torch.load(saved))


def _rescale(_: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def _clamp(parameters: Any) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.2, 0.1)


@torch.no_grad()
def _write(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def _scaled_grad(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def _own_grad(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


IN_TORCH, HANDS = "torch's effect", "the gradients of an engine's parameters are not in .grad"
STEPPED, WRITTEN = "an engine steps its optimizer itself", "a parameter was changed outside the engine"
EXCHANGED = "the groups of an engine's optimizer have been exchanged"
NO_COPY = "a copy of the model would be NaN: its parameters are sharded"
NO_VALUES = "the parameter is sharded: it has no values here"
SHARED = "a parameter in memory that others share was written through .data"
SPLIT = "a hook needs the full gradient of its parameter, which no rank has"

# A habit, what it does, and where that differs: by a part of the plan.
HABITS: dict[str, tuple[Habit, str, dict[str, str]]] = {
    "zero_grad": (_after_steps(lambda _, o: o.zero_grad()), IN_TORCH, {}),
    "zero_grad to zeros": (_after_steps(lambda _, o: o.zero_grad(set_to_none=False)), IN_TORCH, {}),
    "options": (_after_steps(lambda _, o: _edit(o)), IN_TORCH, {}),
    "other groups": (_after_steps(lambda _, o: o.param_groups.reverse()), EXCHANGED, {}),
    "new groups": (
        _after_steps(lambda _, o: setattr(o, "param_groups", [*map(dict, o.param_groups)])),
        EXCHANGED,
        {},
    ),
    "SequentialLR": (_scheduled(_warm), IN_TORCH, {}),
    "ReduceLROnPlateau": (
        _scheduled(lambda o: schedulers.ReduceLROnPlateau(o, patience=0), 1.0),
        IN_TORCH,
        {},
    ),
    "OneCycleLR": (_scheduled(lambda o: schedulers.OneCycleLR(o, 0.7, total_steps=9)), IN_TORCH, {}),
    "get_scheduler": (_scheduled(lambda o: get_scheduler("cosine", o, 1, 9)), IN_TORCH, {}),
    "step hooks": (_hooked_step, IN_TORCH, {}),
    "state_dict": (_after_steps(_resume), IN_TORCH, {}),
    "reads": (_after_steps(_look), IN_TORCH, {"zero=3": NO_VALUES}),
    "copies": (_after_steps(_copy), IN_TORCH, {"zero=3": NO_COPY, "pp=2": "", "tp=2": ""}),
    "masks": (_masked, IN_TORCH, {"tp=2": SPLIT}),
    "held data": (_held, IN_TORCH, {"pp=2": ""}),  # pp: its hooks cannot be traced
    "average": (_averaged, IN_TORCH, {"zero=3": NO_VALUES, "zero=1": SHARED, "tp=2": ""}),
    "clamp": (
        _after_steps(lambda m, _: _clamp(m.parameters())),
        IN_TORCH,
        {"zero=3": NO_VALUES, "zero=1": SHARED},
    ),
    "clamp without effect": (
        _after_steps(lambda m, _: [p.data.clamp_(-9.0, 9.0) for p in m.parameters()]),
        IN_TORCH,
        {"zero=3": NO_VALUES},
    ),
    "clamp groups": (
        _after_steps(lambda _, o: [_clamp(group["params"]) for group in o.param_groups]),
        IN_TORCH,
        {"zero=3": NO_VALUES, "zero=1": SHARED},
    ),
    "step": (_after_steps(lambda _, o: o.step()), STEPPED, {}),
    "step with a closure": (_after_steps(lambda _, o: o.step(lambda: 0.0)), STEPPED, {}),
    "GradScaler": (_after_steps(_rescale), HANDS, {}),
    "older optimizer": (_with_an_older_optimizer, HANDS, {}),
    "add_param_group": (
        _after_steps(lambda m, o: o.add_param_group({"params": m.parameters()})),
        "an engine's optimizer takes no further parameters",
        {},
    ),
    "state": (
        _after_steps(lambda m, o: o.state[next(m.parameters())]),
        "an engine's optimizer has no states by parameter",
        {},
    ),
    "copy of the optimizer": (
        _after_steps(lambda _, o: copy.deepcopy(o)),
        "an engine cannot be pickled or copied",
        {},
    ),
    "late clip_grad_norm_": (_after_steps(lambda m, _: clip_grad_norm_(m.parameters(), 0.1)), HANDS, {}),
    "late clip_grad_value_": (_after_steps(lambda m, _: clip_grad_value_(m.parameters(), 0.1)), HANDS, {}),
    "grad = ": (_after_steps(_own_grad), HANDS, {}),
    "data = ": (
        _after_steps(lambda m, _: setattr(m.blocks[0].weight, "data", m.blocks[0].weight + 1)),
        WRITTEN,
        {"pp=2": ""},
    ),
    "vector_to_parameters": (
        _after_steps(lambda m, _: vector_to_parameters(torch.ones(999).double(), m.parameters())),
        WRITTEN,
        {"pp=2": ""},
    ),
    "no_grad write": (_after_steps(_write), WRITTEN, {"zero=3": ""}),
    "load_state_dict": (_after_steps(lambda m, _: m.load_state_dict(m.state_dict())), WRITTEN, {"p=": ""}),
    "half": (_after_steps(lambda m, _: m.half()), WRITTEN, {"pp=2": ""}),
    "requires_grad_": (
        _after_steps(lambda m, _: m.requires_grad_(False)),
        "requires_grad of a parameter was changed after parallelize",
        {},
    ),
    "clip_grad_norm_": (_after_steps(lambda m, _: clip_grad_norm_(m.parameters(), 0.1)), HANDS, {}),
    "clip_grad_value_": (_after_steps(lambda m, _: clip_grad_value_(m.parameters(), 0.1)), HANDS, {}),
    "grad": (_after_steps(_scaled_grad), HANDS, {}),
    "model.zero_grad": (_after_steps(lambda m, _: m.zero_grad()), HANDS, {}),
}
BY_HAND = ("clip_grad_norm_", "clip_grad_value_", "grad", "model.zero_grad")  # between backward and update
PLANS = {
    "dp=1 precision=fp64": 1,
    "dp=1 precision=bf16": 1,
    "dp=2 offload=cpu precision=fp64": 2,
    "dp=2 zero=1 precision=fp64": 2,
    "dp=2 zero=3 precision=fp64": 2,
    "tp=2 precision=fp64": 2,
    "pp=2 micro=2 schedule=zb-h1 precision=fp64": 2,
}


def _on_servers(names: Sequence[str]) -> dict[str, Any] | None:
    """The weights of a worker; None on the server."""
    plan = "dp=2 servers=1 precision=fp64"
    results = {}
    for name in names:
        world = process_world(join_job(Plan.parse(plan)))
        try:
            results[name] = _in_an_engine(plan, name, world)
        except SystemExit:
            continue
        world.close()
    return results or None


def _all_habits(plan: str) -> dict[str, Any]:
    return {name: _in_an_engine(plan, name) for name in HABITS if not _is_left_out(plan, name)}


def _expected(plan: str, name: str) -> str:
    _, usual, differing = HABITS[name]
    return next((other for part, other in differing.items() if part in plan), usual)


def _is_left_out(plan: str, name: str) -> bool:
    return not _expected(plan, name) or ("pp=2" in plan and name in BY_HAND)


@pytest.fixture(scope="module")
def in_torch() -> dict[str, Any]:
    names = [name for name in HABITS if HABITS[name][1] == IN_TORCH]
    return {name: _in_torch(HABITS[name][0], by_hand=name in BY_HAND) for name in names}


@pytest.mark.parametrize("plan", PLANS)
def test_a_habit_has_torchs_effect_or_is_an_error(pool: Pool, plan: str, in_torch: dict[str, Any]) -> None:
    transport = pool.over("gloo") if "zero=3" in plan else pool  # where ranks share no memory
    problems = {}
    for rank, results in enumerate(transport.run(_all_habits, PLANS[plan], plan)):
        for name, result in results.items():
            expected = _expected(plan, name)
            found = result if isinstance(result, str) else IN_TORCH
            if found != expected:
                problems[name, rank] = found
            elif expected == IN_TORCH and rank == 0:
                differences = [(result[key] - full).abs().max() for key, full in in_torch[name].items()]
                if max(differences) > (2e-2 if "bf16" in plan else 1e-9):
                    problems[name, rank] = f"differs by {max(differences)}"
    assert not problems


def test_habits_have_torchs_effect_under_parameter_servers(pool: Pool, in_torch: dict[str, Any]) -> None:
    names = ("zero_grad", "OneCycleLR", "masks")
    for result in pool.run(_on_servers, 3, names)[:2]:
        for name in names:
            for key, full in in_torch[name].items():
                torch.testing.assert_close(result[name][key], full, rtol=0, atol=1e-9)
