"""Errors that no exception tells of, in what ranks hold and decide: each of them happened elsewhere.

The whole list, with the test of each entry, is in docs/reliability.md.
"""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.errors import ModelError, RunError
from support import edge_case_models, hf_models, pipeline_faults, programs, silent_error_models
from support.pool import Pool

# --- parameters that would not be reduced or updated


class _Late(nn.Module):
    """A layer with a correction that trains, as adapters wrap one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def _comes_late(plan: str, how: str) -> tuple[str, bool]:
    """A step's error for a parameter added after parallelize; whether the step runs once it is frozen."""
    task = programs.Task(edge_case_models.uneven)
    engine: Any = programs.engine_of(task, plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    block = next(
        block for block in engine.model.blocks if not block.up.weight.is_meta
    )  # of this rank's stage
    if how == "wrapped":
        block.up = _Late(block.up)
    else:
        block.late = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError) as found:
        engine.step(batch)
    for parameter in (block.up.scale,) if how == "wrapped" else (block.late,):
        parameter.requires_grad_(False)
    return str(found.value), engine.step(batch).skipped


@pytest.mark.parametrize("how", ["wrapped", "added"])
@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2 zero=3", 2), ("pp=2", 2)])
def test_a_parameter_without_a_layout_is_refused(pool: Pool, plan: str, ranks: int, how: str) -> None:
    """Megatron-LM#7452: how a parameter is cut was a flag that somebody had to set."""
    for message, skipped in pool.run(_comes_late, ranks, f"{plan} precision=fp64", how):
        assert message.startswith("a parameter was added after parallelize")
        assert "up.scale" in message or ".late" in message
        assert not skipped


# --- weights


def _after_two_steps(task: programs.Task, plan: str, is_deaf: bool) -> str:
    """The result of comparing replicas."""
    engine = programs.engine_of(task, plan)
    for batch in programs.batches(2):
        with pipeline_faults.muted("shared") if is_deaf else nullcontext():
            engine.step(programs.share_of(batch, engine))
    try:
        engine.check_replicas()
    except RunError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(("plan", "ranks"), [("pp=2", 2), ("pp=2 dp=2 tp=2 zero=1", 8)])
def test_tied_weights_on_two_stages_stay_equal_bit_for_bit(pool: Pool, plan: str, ranks: int) -> None:
    """torchtitan#1409, #1524: each stage trains its own copy, with its own part of the gradient."""
    task, plan = silent_error_models.task("tied_llama"), f"{plan} precision=fp64"
    assert pool.run(_after_two_steps, ranks, task, plan, False) == ["equal"] * ranks
    for said in pool.run(_after_two_steps, ranks, task, plan, True):
        assert "copies of model.embed_tokens.weight are no longer the same" in said


def _held_rows(plan: str, loads: bool) -> dict[str, Tensor]:
    """The values that this rank computes with, of weights that came with the model, or that were loaded."""
    model = silent_error_models.with_random_weights("llama")
    if loads:  # into others
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    engine = plait.parallelize(model, plan, optimizer_args={"lr": 0.0}, loss=programs.summed_loss)
    if loads:
        state = plait.parallelize(
            silent_error_models.with_random_weights("llama"), plan, optimizer_args={"lr": 0.0}
        ).state()
        engine.load_state(_on_all(engine, state))
    units = engine._parts.sharded.units
    assert all(unit.storage.numel() == unit.layout.numel for unit in units)
    found = {}
    for unit in units:
        for piece, values in zip(unit.layout.params, unit.views_of(unit.storage), strict=True):
            if piece.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight")):
                found[piece.name] = (values.clone(), piece.boxes.ranges[0])
    return found


def _on_all(engine: plait.Engine, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rank 0's, which alone has one, on every rank."""
    folder = (
        Path(tempfile.gettempdir()) / f"plait-silent-{os.environ['PLAIT_RENDEZVOUS_FILE'].replace('/', '-')}"
    )
    if engine.world.rank == 0:
        torch.save(state, folder)
    engine.world.barrier()
    loaded: dict[str, Tensor] = torch.load(folder)
    engine.world.barrier()
    if engine.world.rank == 0:
        folder.unlink()
    return loaded


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", 2), ("tp=3", 3), ("pp=2 dp=2 tp=2 zero=1", 8)])
def test_every_rank_of_a_grid_has_its_own_rows_of_loaded_weights(
    pool: Pool, plan: str, ranks: int, loads: bool
) -> None:
    """picotron: queries, keys and values were loaded from the first rows on every rank."""
    whole = dict(silent_error_models.with_random_weights("llama").named_parameters())
    seen: dict[str, set[int]] = {}
    for held in pool.run(_held_rows, ranks, f"{plan} precision=fp64", loads):
        assert held
        for name, (values, ranges) in held.items():
            rows = torch.cat([torch.arange(start, stop) for start, stop in ranges])
            assert torch.equal(values, whole[name][rows].detach()), name
            seen.setdefault(name, set()).update(rows.tolist())
    assert seen
    assert all(rows == set(range(len(whole[name]))) for name, rows in seen.items())


def _shapes(plan: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes that are saved, with the optimizer's states; and their estimate before."""
    engine = programs.engine_of(silent_error_models.task("llama"), plan)
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    return {key: tuple(tensor.shape) for key, tensor in engine.state().items()}, engine.weight_shapes()


@pytest.mark.parametrize(("plan", "ranks"), [("tp=4", 4), ("tp=3 sp=true", 3), ("pp=2 dp=2 tp=2 zero=3", 8)])
def test_nothing_of_a_vocabulary_that_does_not_divide_is_padded_in_a_checkpoint(
    pool: Pool, plan: str, ranks: int
) -> None:
    """Megatron-LM#1754. Of 61 words; what is exported is what is saved."""
    alone, estimated = pool.run(_shapes, 1, "dp=1 precision=fp64")[0]
    shapes, said = pool.run(_shapes, ranks, f"{plan} precision=fp64")[0]
    assert shapes == alone
    assert said == estimated
    assert sum(shape[0] == programs.VOCABULARY for shape in shapes.values() if len(shape) == 2) == 6


# --- what a loop changes on the model


class _Changing(nn.Module):
    """Depends on all that a loop may change outside of blocks, and counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.enter, *blocks = (nn.Linear(6, 6) for _ in range(5))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(6, 6)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.register_buffer("seen", torch.zeros(()))
        self.gain, self.calls, self.config = 1.0, 0, SimpleNamespace(scale=1.0)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.5)
        self.around = [self.act]  # the same module, in a plain list

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        x = self.enter(x + self.shift) * self.gain * (1 + 0.1 * self.calls)
        for block in self.blocks:
            x = torch.sin(block(x))
        self.last_size = x.square().mean()
        x = self.around[0](x) * self.config.scale + self.act(x) * self.gain
        return self.head(self.drop(x)) / self.temperature * float(self.seen)


def _doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return 2 * F.linear(x, layer.weight, layer.bias)


def _changed(model: Any, number: int) -> None:
    """Changes before step `number`."""
    if number == 0:
        model.eval()  # and with it dropout
    if number == 1:
        model.gain, model.config.scale = 0.7, 1.3
        model.shift.mul_(-3.0)
        model.drop.register_forward_hook(lambda *call: call[-1] * 1.25)
        model.register_forward_hook(lambda *call: call[-1] * 0.9)  # of the model's output, not of a stage's
    if number == 2:
        model.shift, model.act = model.shift + 1.0, nn.Sigmoid()
        model.calls = 0
        model.enter.forward = MethodType(_doubled, model.enter)


def _trained_with_changes(plan: str | None) -> list[float]:
    """Losses of steps between which the loop changes the model; None: in plain torch."""
    model: Any = _Changing().double()

    def loss(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
        return outputs.square().sum() + model.last_size, len(outputs)

    data = torch.linspace(-1, 1, 4 * 24, dtype=torch.float64).view(4, 4, 6).sin()
    losses = []
    if plan is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number, x in enumerate(data):
            _changed(model, number)
            optimizer.zero_grad()
            totals = [loss(model(half), None)[0] / 4 for half in x.chunk(2)]
            torch.autograd.backward(totals)
            optimizer.step()
            losses.append(sum(total.item() for total in totals))
        return losses
    engine = plait.parallelize(
        model,
        f"{plan} micro=2 precision=fp64",
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 0.05},
        loss=loss,
        example_batch={"x": data[0]},
    )
    for number, x in enumerate(data):
        _changed(engine.model, number)
        losses.append(engine.step({"x": x}).loss)
    return losses


SCHEDULES = [f"pp=2 schedule={name}" for name in ("gpipe", "1f1b", "interleaved chunks=2", "zb-h1", "zbv")]


@pytest.mark.parametrize("plan", SCHEDULES)
def test_changes_of_the_model_outside_of_blocks_reach_every_stage(pool: Pool, plan: str) -> None:
    """Stages ran a copy of the model: gains, buffers, hooks and `eval()` were lost on the way."""
    expected = pytest.approx(_trained_with_changes(None), rel=1e-9)
    assert pool.run(_trained_with_changes, 2, plan) == [expected] * 2


def _collecting_later() -> str:
    engine = programs.engine_of(silent_error_models.task("llama"), "pp=2 precision=fp64")
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    engine.model.config.output_hidden_states = True
    with pytest.raises(ModelError) as caught:
        engine.step(batch)
    return str(caught.value)


def test_hidden_states_that_a_model_collects_after_it_was_split_are_refused(pool: Pool) -> None:
    """Those of other stages' blocks were placeholders in a loss that read them."""
    for message in pool.run(_collecting_later, 2):
        assert "the model collects other outputs of blocks" in message


# --- several engines


def _weights_of_two(plans: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Weights of engines whose steps take turns."""
    engines = [
        programs.engine_of(silent_error_models.task("llama"), f"{plan} precision=fp64") for plan in plans
    ]
    for batch in programs.batches(2):
        for engine in engines:
            engine.step(programs.share_of(batch, engine))
            engine.evaluate(programs.share_of(batch, engine))
    return [engine.full_parameters() for engine in engines]


def test_engines_of_one_process_do_not_interfere(pool: Pool) -> None:
    """Megatron-LM#7452, PR #7359: something asks a global group, which is another engine's."""
    plans = ("tp=2 dp=2", "dp=2 tp=2 zero=3", "pp=2 dp=2 zero=2", "tp=2x2 sp=true")
    together = pool.run(_weights_of_two, 4, plans)[0]
    for plan, found in zip(plans, together, strict=True):
        alone = pool.run(_weights_of_two, 4, (plan,))[0][0]
        assert all(torch.equal(alone[name], weight) for name, weight in found.items()), plan


# --- decisions, masks, evaluation


def _overflow_on_one(plan: str, culprit: int) -> tuple[list[bool], list[float | None]]:
    """The kind of each step, and the loss scale after it; in the second one rank's gradient is infinite."""
    model = silent_error_models.with_random_weights("llama").float()
    engine = plait.parallelize(model, f"{plan} precision=fp16", optimizer_args={"lr": 1e-3}, clip_norm=1.0)
    skipped, scales = [], []
    for number, batch in enumerate(programs.batches(3)):
        handles = []
        if number == 1 and engine.world.rank == culprit:
            parameter = engine._parts.sharded.trained[0].parameters.values()
            handles = [p.register_hook(lambda gradient: gradient * torch.inf) for p in parameter]
        skipped.append(engine.step(programs.share_of(batch, engine)).skipped)
        scales.append(engine.loss_scale)
        for handle in handles:
            handle.remove()
    return skipped, scales


@pytest.mark.parametrize("culprit", [0, 7])
def test_one_ranks_overflow_is_every_ranks_decision_in_a_hybrid(pool: Pool, culprit: int) -> None:
    """A rank that skips alone, or scales otherwise, trains another model from then on."""
    found = pool.run(_overflow_on_one, 8, "pp=2 dp=2 tp=2 zero=1 micro=2", culprit)
    assert found == [found[0]] * 8
    skipped, scales = found[0]
    assert skipped == [False, True, False]
    assert scales[1] == scales[2] == scales[0] / 2


def _masks(plan: str) -> list[tuple[dict[str, int], int, list[Tensor]]]:
    """This rank's place, and the masks of the dropout in its residual stream, by step and micro-batch."""
    model = hf_models.model_of("gpt2", exact=False, resid_pdrop=0.5)
    engine = plait.parallelize(model, plan, optimizer_args={"lr": 0.0})
    masks: list[Tensor] = []
    for name, module in engine.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and name.endswith("attn.resid_dropout"):
            module.register_forward_hook(lambda *given: masks.append((given[-1] == 0).detach()))
    for batch in programs.batches(2, sequences=8):
        engine.step(programs.share_of(batch, engine))
    coord = plait.plan.Grid.from_plan(engine.plan).coord(engine.world.rank)
    return [(coord, number, mask) for number, mask in enumerate(masks)]


def test_masks_agree_over_tp_and_differ_between_data_ranks_stages_steps_and_micro_batches(pool: Pool) -> None:
    """Ranks with the same activation have the same mask; no two others are equal."""
    found = [one for rank in pool.run(_masks, 8, "pp=2 dp=2 tp=2 micro=2") for one in rank]
    assert len(found) == 8 * 4  # two steps of two micro-batches, through a block on each rank
    for index, (coord, number, mask) in enumerate(found):
        assert 0.4 < float(mask.double().mean()) < 0.6
        for other, other_number, other_mask in found[:index]:
            is_one = number == other_number and {**coord, "col": 0} == {**other, "col": 0}
            assert torch.equal(mask, other_mask) == is_one, (coord, number, other, other_number)


def _steps_between(plan: str, looks: bool) -> tuple[list[Any], dict[str, Tensor], list[Tensor]]:
    """A model with dropout: results, state, and what generators draw next."""
    model = hf_models.model_of("gpt2", exact=False, resid_pdrop=0.3, attn_pdrop=0.2)
    engine = plait.parallelize(model, plan, optimizer_args={"lr": 1e-2}, clip_norm=1.0)
    results = []
    torch.manual_seed(4)
    for batch in programs.batches(3):
        share = programs.share_of(batch, engine)
        results.append(engine.step(share))
        if looks:
            engine.evaluate(share)
            engine.outputs(share, lambda outputs: outputs.logits)
            engine.check_replicas()
            engine.full_gradients()
    return results, engine.state(), [torch.rand(3)]


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2 sp=true", 2), ("pp=2 dp=2 tp=2 zero=3 micro=2", 8)])
def test_evaluation_changes_no_bit_of_training(pool: Pool, plan: str, ranks: int) -> None:
    """Modules left in eval mode, generators moved on, gathers and caches that belong to an evaluation."""
    with_looks, without = (pool.run(_steps_between, ranks, plan, looks) for looks in (True, False))
    for (results, state, drawn), (others, other_state, other_drawn) in zip(with_looks, without, strict=True):
        assert results == others
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in other_state.items())
        assert torch.equal(drawn[0], other_drawn[0])
