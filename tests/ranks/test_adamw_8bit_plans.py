"""AdamW with 8-bit states: under every plan the blocks, and so the numbers, of one process."""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import ConfigError
from plait.optim import stepper
from plait.optim.adamw_8bit import stored_bytes
from plait.plan import MemoryUse, Plan
from support import block_codes, edge_case_models, hf_models, programs
from support.pool import Pool

WIDE = functools.partial(programs.llama, hidden=512, ffn=512, layers=2)  # rows of whole blocks for 2 columns
MIXTRAL = functools.partial(hf_models.model_of, "mixtral", hidden_size=64, intermediate_size=32)
TASK = programs.Task(programs.llama, optimizer="AdamW8bit")
TASKS = {
    "llama": TASK,
    "uneven": replace(TASK, build=edge_case_models.uneven, groups=edge_case_models.interleaved_groups),
    "wide": replace(TASK, build=WIDE, steps=2),
    "mixtral": replace(TASK, build=MIXTRAL, own_loss=True),
}
RANGES = ["dp=2 zero=0", "dp=3 zero=1", "dp=4 shard=2 zero=2", "dp=2 zero=3 micro=3", "pp=2 micro=2"]
CASES = [
    *(("uneven", plan) for plan in ("micro=2", "dp=3 zero=1", "dp=2 zero=2", "dp=4 zero=3")),
    *(("llama", plan) for plan in RANGES),
    ("llama", "dp=2 zero=3 offload=cpu"),
    ("llama", "dp=2 zero=2 offload=disk"),
    ("wide", "tp=2"),
    ("wide", "pp=2 tp=2 dp=2 zero=1 micro=2"),
    ("mixtral", "dp=2 zero=1"),
    ("mixtral", "dp=2 ep=2 zero=1"),
]
MUTATIONS: dict[str, Any] = {
    "": nullcontext,
    "blocks begin at the shard": lambda: mock.patch.object(
        stepper, "quantize", lambda values, stored, _, name: _quantize(values, stored, 0, name)
    ),
}
_quantize = stepper.quantize


def _trained(task: programs.Task, plan: str) -> programs.Trace:
    return programs.train_task(task, f"{plan} precision=fp64")


def _units(task: programs.Task) -> Any:
    return programs.engine_of(task, "precision=fp64").layout.units


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    """A task's training in plain torch, with states rounded along the units' storages."""

    @functools.cache
    def run(name: str) -> programs.Trace:
        task = TASKS[name]
        first = pool.run(_trained, 1, replace(task, steps=0), "micro=1")[0].first_weights
        units = pool.run(_units, 1, task)[0]
        of = functools.partial(block_codes.PlainAdamW8bit, units, arguments=task.arguments)
        return programs.one_process_task(task, first, 1, stepper_of=of)

    return run


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_plan_trains_as_plain_torch_with_the_same_blocks(
    pool: Pool, reference: Any, name: str, plan: str, tmp_path: Path
) -> None:
    task = replace(TASKS[name], offload_dir=str(tmp_path) if "disk" in plan else None)
    ours, *others = pool.run(_trained, Plan.parse(plan).num_ranks, task, plan)
    programs.assert_same(ours, reference(name))
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)


def _largest(task: programs.Task, mutation: str, expected: dict[str, Tensor]) -> float:
    with MUTATIONS[mutation]():
        ours = _trained(task, "dp=3 zero=1")
    return programs.largest_difference(ours.weights, expected)[0] if ours.weights else 0.0


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_blocks_that_begin_at_the_shard_are_found(pool: Pool, reference: Any, mutation: str) -> None:
    """With the mutation, the blocks of a group that begins within a block depend on the ranks' ranges."""
    difference = pool.run(_largest, 3, TASKS["uneven"], mutation, reference("uneven").weights)[0]
    assert (difference > 1e-6) == bool(mutation), difference


def _engine(plan: str, build: Any = programs.llama, seed: int = 3, **options: Any) -> plait.Engine:
    chosen = {"optimizer": plait.AdamW8bit, "optimizer_args": programs.ADAMW} | options
    shared: dict[str, Any] = {"clip_norm": programs.CLIP, "loss": programs.summed_loss, "seed": seed}
    return plait.parallelize(build(), plan, **shared, **chosen)


def _steps(engine: plait.Engine, first: int = 0, last: int = 5) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the last state."""
    batches = programs.batches(last)[first:]
    losses = [engine.step(programs.share_of(batch, engine)).loss for batch in batches]
    engine.check_replicas()
    return losses, engine.state()


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest of weights and states."""
    pairs = [
        {key: value for key, value in state.items() if value.is_floating_point() and value.ndim}
        for state in (one, other)
    ]
    return programs.largest_difference(*pairs)[0]


def _saves(plan: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """A training of five steps that saves after two."""
    engine = _engine(plan)
    _steps(engine, 0, 2)
    engine.save(folder)
    return _steps(engine, 2)


def _continues(plan: str, checkpoint: Path, optimizer: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = _engine(plan, seed=99, optimizer=optimizer)
    engine.step(programs.share_of(programs.batches(1)[0], engine))  # its states are replaced
    engine.load(checkpoint)
    return _steps(engine, 2)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(
    pool: Pool, precision: str, tmp_path: Path
) -> None:
    plan = f"dp=2 zero=3 micro=2 precision={precision}"
    losses, state = pool.run(_saves, 2, plan, tmp_path)[0]
    found, resumed = pool.run(_continues, 2, plan, tmp_path / "step-00000002", plait.AdamW8bit)[0]
    assert found == losses
    assert [key for key in state if not torch.equal(state[key], resumed[key])] == []


@pytest.mark.parametrize("plan", ["micro=2", "dp=3 zero=1", "dp=4 shard=2 zero=3", "pp=2 micro=2"])
def test_a_checkpoint_continues_under_another_plan_of_the_same_blocks(
    pool: Pool, plan: str, tmp_path: Path
) -> None:
    _, state = pool.run(_saves, 2, "dp=2 zero=2 precision=fp64", tmp_path)[0]
    ranks, words = Plan.parse(plan).num_ranks, f"{plan} precision=fp64"
    _, resumed = pool.run(_continues, ranks, words, tmp_path / "step-00000002", plait.AdamW8bit)[0]
    assert _difference(state, resumed) < 1e-9


@pytest.mark.parametrize(("plan", "optimizer"), [("tp=2", plait.AdamW8bit), ("dp=2", torch.optim.AdamW)])
def test_a_checkpoint_continues_with_other_blocks_or_without_codes(
    pool: Pool, plan: str, optimizer: Any, tmp_path: Path
) -> None:
    """With columns of 16 elements a block has other elements: states are rounded once more."""
    losses, _ = pool.run(_saves, 2, "dp=2 zero=2 precision=fp64", tmp_path)[0]
    words = f"{plan} precision=fp64"
    found, _ = pool.run(_continues, 2, words, tmp_path / "step-00000002", optimizer)[0]
    assert found[0] == pytest.approx(losses[0], rel=1e-9)  # of the same weights
    assert 0 < abs(found[-1] - losses[-1]) < 1e-3 * losses[-1]


def _memory(plan: str, folder: str | None) -> tuple[MemoryUse, MemoryUse, int]:
    engine = _engine(plan, programs.wide_llama, offload_dir=folder)
    shape = (programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH)
    estimated = engine.estimated_memory(shape)
    _steps(engine)
    elements = sum(
        stored_bytes(stop - start, start)
        for unit in engine.layout.units
        for _, start, stop in unit.owned_groups(engine.world.rank % unit.num_shards)
    )
    return estimated, engine.memory(), elements


@pytest.mark.parametrize("plan", ["dp=2 zero=0", "dp=2 zero=2", "dp=4 shard=2 zero=3"])
@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
def test_states_take_the_estimated_bytes(pool: Pool, plan: str, offload: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if offload == "disk" else None
    words = f"{plan} precision=bf16 offload={offload}"
    estimated, measured, states = pool.run(_memory, Plan.parse(words).num_ranks, words, folder)[0]
    category = {"none": "optimizer", "cpu": "host", "disk": "disk"}[offload]
    held, expected = getattr(measured, category), getattr(estimated, category)
    if offload == "none":
        assert held == expected == 2 * states
    assert held == pytest.approx(expected, rel=0.03)  # pages of files
    assert measured.buffers <= estimated.buffers


def _poisoned(value: float) -> tuple[bool, list[str], bool]:
    engine = _engine("dp=2 zero=1")
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    before = {key: tensor.clone() for key, tensor in engine.state().items()}
    first = next(iter(engine.model.parameters()))
    handle = first.register_hook(lambda g: g * value if engine.data_rank == 1 else g)
    result = engine.step(batch)
    handle.remove()
    after = engine.state()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    return result.skipped, changed, engine.step(batch).skipped


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_code(pool: Pool, value: float) -> None:
    skipped, changed, next_skipped = pool.run(_poisoned, 2, value)[0]
    assert (skipped, next_skipped) == (True, False)
    assert set(changed) <= {"engine/num_steps"}


def _mixed(plan: str, other: Any) -> tuple[dict[str, Tensor], MemoryUse, MemoryUse]:
    """Matrices of layers with another optimizer, in full width."""
    model = programs.llama()
    inner = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    ids = {id(p) for p in inner}
    groups = [
        {"params": inner, "optimizer": other, "lr": 1e-3},
        {"params": [p for p in model.parameters() if id(p) not in ids]},
    ]
    engine = _engine(f"{plan} precision=fp64", lambda: model, param_groups=groups)
    _, state = _steps(engine)
    return state, engine.memory(), engine.estimated_memory((4, programs.LENGTH))


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.Muon])
def test_groups_of_other_optimizers_train_the_same_next_to_it(pool: Pool, other: Any) -> None:
    expected, _, _ = pool.run(_mixed, 1, "micro=2", other)[0]
    state, measured, estimated = pool.run(_mixed, 2, "dp=2 zero=2", other)[0]
    assert _difference(state, expected) < 1e-9
    assert 0 <= measured.optimizer - estimated.optimizer <= 800


def _refused(plan: str, with_lamb: bool = False) -> str:
    model = programs.llama()
    first, *others = model.parameters()
    groups = [{"params": [first], "optimizer": plait.LAMB}, {"params": others}]
    with pytest.raises(ConfigError) as error:
        _engine(plan, lambda: model, **({"param_groups": groups} if with_lamb else {}))
    return str(error.value)


def test_options_that_it_does_not_work_with_are_refused(pool: Pool) -> None:
    assert "AdamW8bit does not work with optim_dtype=bf16" in pool.run(_refused, 1, "optim_dtype=bf16")[0]
    assert "AdamW8bit does not work with parameter servers" in pool.run(_refused, 3, "dp=2 servers=1")[0]
    found = pool.run(_refused, 1, "zero=1", True)[0]
    assert "AdamW8bit does not work with LAMB in one engine" in found
