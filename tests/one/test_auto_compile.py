"""compile=auto on one rank: what is measured, kept and said, and a state that trial steps leave as it was."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint import newest
from plait.comm import World
from plait.engine import auto_compile
from plait.engine.runner import MicrobatchRunner
from plait.parallel.compile import CompiledForward, check_compiler
from plait.plan import compile_choice
from plait.train.prepare import prepare
from plait.train.trainer import train
from support import programs
from support.compilers import compiles

IDS = (torch.arange(128) % programs.VOCABULARY).view(4, 32)
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Times are in a folder of the test; all runs are long enough; graphs are not compiled in C++."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_choice, "MIN_RUN_S", 0.0)
    torch._dynamo.reset()
    with compiles(in_cpp=False):
        yield


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is compiled counts as faster."""
    monkeypatch.setattr(compile_choice, "MIN_GAIN", -1e9)


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return programs.llama(on_meta=False, exact=False)


def engine_of(plan: str, model: nn.Module | None = None, **options: Any) -> plait.Engine:
    options = {"optimizer_args": programs.ADAMW, "seed": 3, **options}
    return plait.parallelize(model or small_llama(), plan, **options)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.quick
def test_the_choice_is_that_of_measured_times_with_torchs_own_compiler(tmp_path: Path) -> None:
    with compiles(in_cpp=True):
        engine = engine_of("compile=auto")
        choice = engine.choose_compile(BATCH)
    assert choice is not None
    assert " a step instead of " in str(choice)
    (file,) = (tmp_path / "cache" / "plait" / "compile").iterdir()
    times = compile_choice.CompileTimes(**json.loads(file.read_text()))
    assert min(vars(times).values()) > 0
    assert choice.is_on == (times.gain_s > 0)
    assert f"{times.compiled_s:.3g} s a step instead of {times.eager_s:.3g} s" in str(choice)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_trial_steps_leave_no_trace_in_training(how: str) -> None:
    """The first step chooses by itself. Dropout and the loss are those of a run that was compiled at once."""

    def run(words: str) -> tuple[list[float], dict[str, Tensor]]:
        engine = engine_of(f"recompute={how} micro=2 precision=fp64 {words}")
        found = [engine.step(BATCH) for _ in range(2)]
        assert engine.num_steps == 2
        return [n for each in found for n in (each.loss, each.grad_norm)], engine.full_parameters()

    plain, expected = run("")
    before = num_graphs()
    numbers, found = run("compile=auto")
    assert num_graphs() > before
    assert numbers == pytest.approx(plain, rel=1e-9)
    assert programs.largest_difference(found, expected)[0] < 1e-9


class WithCounts(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x))
        return normed


@pytest.mark.usefixtures("faster")
def test_running_statistics_do_not_count_trial_steps() -> None:
    model = nn.Sequential(WithCounts(), WithCounts())
    loss = lambda outputs, _: (outputs.square().sum(), outputs.numel())  # noqa: E731
    engine = engine_of("compile=auto", model, loss=loss, optimizer_args={"lr": 0.1})
    before = {name: value.clone() for name, value in model.named_buffers()}
    choice = engine.choose_compile({"input": torch.arange(24.0).view(6, 4)})
    assert choice is not None
    assert choice.is_on
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_trial_that_fails_leaves_buffers_and_blocks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = nn.Sequential(WithCounts(), WithCounts()), 0

    def loss(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        if calls == 3:  # after two uncompiled trials
            raise ValueError("no loss")
        return outputs.square().sum(), outputs.numel()

    engine = engine_of("compile=auto", model, loss=loss, optimizer_args={"lr": 0.1})
    batch = {"input": torch.arange(24.0).view(6, 4)}
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(ValueError, match="no loss"):
        engine.choose_compile(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    monkeypatch.setattr(compile_choice, "MIN_RUN_S", 1e6)
    choice = engine.choose_compile(batch, 1)
    assert choice is not None
    assert not choice.is_on
    for block in model:
        forward: Any = block.compiled_forward
        assert forward._run == forward.eager


def test_a_block_that_the_first_trial_leaves_out_runs_uncompiled_if_it_has_to() -> None:
    forward = CompiledForward("Untraceable", Untraceable().forward, True, None, later=True)
    for on in (True, False, True):
        forward.turn(on=on)
    assert forward(torch.ones(3, 4)).shape == (3, 4)
    assert "graph break" in forward.problem


def test_times_are_measured_once_for_a_model_plan_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    passes = MicrobatchRunner.train

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return passes(*args, **kwargs)

    monkeypatch.setattr(MicrobatchRunner, "train", counted)
    monkeypatch.setattr(compile_choice, "MIN_GAIN", 1.0)  # nothing counts as faster
    shorter = {key: value[:, :16] for key, value in BATCH.items()}
    found = []
    for plan, batch in (
        ("compile=auto", BATCH),
        ("compile=auto", BATCH),
        ("compile=auto", shorter),
        ("compile=auto recompute=full", BATCH),
    ):
        steps = 0
        choice = engine_of(plan).choose_compile(batch)
        assert choice is not None
        assert not choice.is_on
        found.append(steps)
    assert found == [9, 0, 9, 9]


def test_a_short_run_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_choice, "MIN_RUN_S", 1e6)
    before, engine = num_graphs(), engine_of("compile=auto")
    choice = engine.choose_compile(BATCH, 100)
    assert choice is not None
    assert "off: 100 steps of" in str(choice)
    engine.step(BATCH)
    assert num_graphs() == before
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_it_is_off(tmp_path: Path) -> None:
    check_compiler.cache_clear()
    without = torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))})
    with compiles(in_cpp=True), without:
        engine = engine_of("compile=auto")
        engine.step(BATCH)
    check_compiler.cache_clear()
    assert "off: no compiler works here" in str(engine.compile_choice)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.tanh()


@pytest.mark.usefixtures("faster")
def test_blocks_that_cannot_be_compiled_run_uncompiled() -> None:
    model = nn.Sequential(Untraceable(), Untraceable())
    loss = lambda outputs, _: (outputs.square().sum(), outputs.numel())  # noqa: E731
    plan = "compile=auto recompute=selective"
    engine = engine_of(plan, model, loss=loss, optimizer_args={"lr": 0.1})
    engine.step({"input": torch.ones(3, 4)})
    assert "off: Untraceable: " in str(engine.compile_choice)
    assert "User-inserted graph break" in str(engine.compile_choice)


def test_a_model_without_blocks_is_not_compiled() -> None:
    loss = lambda outputs, _: (outputs.square().sum(), outputs.numel())  # noqa: E731
    engine = engine_of("compile=auto", nn.Linear(4, 4), loss=loss, optimizer_args={"lr": 0.1})
    engine.step({"input": torch.ones(3, 4)})
    assert str(engine.compile_choice) == "off: the model has no repeated blocks"


@pytest.mark.usefixtures("restored_numerics")
def test_a_plan_that_compiles_nothing_is_said_and_costs_nothing() -> None:
    engine = engine_of("compile=auto deterministic=true")
    assert engine.plan.compile is False
    assert "deterministic=true" in str(engine.compile_choice)
    assert not any(hasattr(module, "compiled_forward") for module in engine.model.modules())
    assert engine_of("dp=1").compile_choice is None


# --- a run

RECIPE = """
plan = "dp=1 compile=auto"
[run]
dir = "{here}/run"
steps = 2
batch = 1
evaluate_every = 0
[model.config]
model_type = "llama"
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 1
[data]
dir = "{here}/data"
sources = ["{here}/text.txt"]
sequence = 8
validation = 0
workers = 0
[tokenizer]
vocab_size = 260
[optimizer]
lr = 1e-3
[schedule]
warmup = 0
[sample]
tokens = 0
"""


@pytest.mark.usefixtures("faster")
def test_a_resumed_run_keeps_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved with the checkpoint, and in the first table, also where times would say otherwise now."""
    words = random.Random(0).choices(["ship", "harbour", "sails", "wind"], k=200)
    (tmp_path / "text.txt").write_text(" ".join(words))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(here=tmp_path))
    alone = World.alone(torch.device("cpu"))
    run = prepare(recipe).dir
    train(run.read_recipe(), alone)
    saved = newest(run.checkpoints)
    assert saved is not None
    assert saved.facts["compile"]["is_on"]
    assert "compile" in (table := capsys.readouterr().out)
    assert "on: " in table
    monkeypatch.setattr(compile_choice, "MIN_GAIN", 1.0)
    monkeypatch.setattr(auto_compile.CompileTrial, "_measured", None)  # would be an error
    prepare(run.path, sets=["run.steps=4"], resume=True)
    train(run.read_recipe(), alone)
    resumed = newest(run.checkpoints)
    assert resumed is not None
    assert resumed.facts["compile"] == saved.facts["compile"]
