"""Expert parallelism with optimizers of norms and full tensors, islands, states on disk and float8."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.plan import Plan
from support import hf_models, local_steps, programs, routed_experts
from support.pool import Pool

OPTIMIZERS: dict[str, Any] = {
    "LAMB": (plait.LAMB, {"lr": 0.01, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
}


def _matrices(model: nn.Module, kind: str) -> list[Tensor]:
    """The parameters of the optimizer: all, or for Muon the matrices of layers, those of experts too."""
    named = model.named_parameters()
    return [p for name, p in named if kind != "Muon" or ("layers" in name and p.ndim > 1)]


def _engine(kind: str, words: str, seed: int = 3) -> plait.Engine:
    """`kind`: an optimizer; after it "list", for experts that are modules."""
    kind, _, form = kind.partition(" ")
    model = routed_experts.model_of(form) if form else hf_models.model_of("mixtral")
    chosen, options = OPTIMIZERS[kind]
    own = _matrices(model, kind)
    ids = {id(p) for p in own}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": own, "optimizer": chosen, **options}] + [{"params": others}] * bool(others)
    return plait.parallelize(
        model, f"{words} precision=fp64", seed=seed, clip_norm=programs.CLIP, param_groups=groups
    )


def _trained(kind: str, words: str, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the last state. With `folder`, one step, then a save, or the steps after the one saved."""
    engine = _engine(kind, words)
    batches = programs.batches(3)
    if folder is not None and (saved := sorted(folder.glob("step-*"))):
        engine.load(saved[0])
        batches = batches[1:]
    elif folder is not None:
        batches = batches[:1]
    losses = [engine.step(programs.share_of(batch, engine)).loss for batch in batches]
    engine.check_replicas()
    if engine.world.rank == 0:
        measured, estimated = engine.memory(), engine.estimated_memory((4, programs.LENGTH))
        assert 0 <= measured.optimizer - estimated.optimizer <= 800, (measured, estimated)
    if folder is not None and len(batches) == 1:
        engine.save(folder)
    return losses, engine.state()


def _check_same(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    assert found[1].keys() == expected[1].keys()
    for key, tensor in expected[1].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-9, atol=1e-9, msg=key)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    return functools.cache(lambda kind: pool.run(_trained, 1, kind, "dp=1")[0])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "words",
    [
        "dp=2 ep=2",
        "dp=4 ep=2 zero=1",
        "dp=4 ep=2 zero=3 shard=2",
        "dp=2 ep=2 tp=2 zero=1",
        "dp=2 cp=2 ep=2 zero=2",
        "dp=2 ep=2 pp=2 micro=2",
    ],
)
def test_norms_and_full_tensors_of_experts_are_those_of_one_process(
    pool: Pool, alone: Any, kind: str, words: str
) -> None:
    _check_same(pool.run(_trained, Plan.parse(words).num_ranks, kind, words)[0], alone(kind))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("words", ["dp=2 ep=2", "dp=4 ep=4 zero=1 shard=2"])
def test_norms_and_full_tensors_of_a_list_of_experts_are_those_of_one_process(
    pool: Pool, alone: Any, kind: str, words: str
) -> None:
    of_list = f"{kind} list"
    _check_same(pool.run(_trained, Plan.parse(words).num_ranks, of_list, words)[0], alone(of_list))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("plans", [("dp=4 ep=4", "dp=2 ep=2 zero=1"), ("dp=2 ep=2 tp=2 zero=3", "dp=2")])
def test_their_states_continue_with_another_ep(
    pool: Pool, alone: Any, tmp_path: Path, kind: str, plans: tuple[str, str]
) -> None:
    first, second = (pool.run(_trained, Plan.parse(p).num_ranks, kind, p, tmp_path)[0] for p in plans)
    _check_same((first[0] + second[0], second[1]), alone(kind))


@pytest.mark.parametrize(
    "words",
    [
        "dp=4 ep=2 local_steps=2",
        "dp=4 ep=2 zero=1 shard=2 local_steps=3 outer=nesterov:0.7:0.9",
        "dp=4 ep=2 zero=3 shard=2 local_steps=2",
        "dp=2 cp=2 ep=2 local_steps=2",
    ],
)
def test_islands_of_complete_ep_groups_train_as_in_a_simulation(pool: Pool, words: str) -> None:
    plan = Plan.parse(f"{words} precision=fp64")
    task = local_steps.task(hf_models.builder("mixtral"), own_loss=True)
    trace = pool.run(local_steps.train, plan.num_ranks, task, str(plan))[0]
    local_steps.check(trace, task, plan)
    islands = plan.num_islands
    without = f"dp={islands} micro={plan.dp // islands} local_steps={plan.local_steps} outer={plan.outer}"
    (alone, *_) = pool.run(local_steps.train, islands, task, f"{without} precision=fp64")
    assert trace.drifts == pytest.approx(alone.drifts, rel=1e-9)


def _by_hand() -> dict[str, Tensor]:
    """Weights after steps of torch's Muon on each expert's matrix as a parameter."""
    first = _engine("Muon", "dp=1").full_parameters()
    model = hf_models.model_of("mixtral", on_meta=False).double()
    model.load_state_dict(first, strict=False)
    own = _matrices(model, "Muon")
    ids = {id(p) for p in own}
    leaves = [
        (p, leaf) for p in own for leaf in ([nn.Parameter(m) for m in p.detach()] if p.ndim == 3 else [p])
    ]
    others = [p for p in model.parameters() if id(p) not in ids]
    steppers = [
        torch.optim.Muon([leaf for _, leaf in leaves], **OPTIMIZERS["Muon"][1]),
        torch.optim.AdamW(others),
    ]
    for batch in programs.batches(3):
        model.zero_grad()
        programs.mean_loss(model, batch, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), programs.CLIP)
        for p in own:
            stack = [leaf for of, leaf in leaves if of is p]
            for leaf, gradient in zip(stack, p.grad if p.ndim == 3 else [p.grad], strict=True):
                leaf.grad = gradient
        for stepper in steppers:
            stepper.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_muon_updates_the_matrix_of_each_expert(pool: Pool, alone: Any) -> None:
    (expected,) = pool.run(_by_hand, 1)
    for name, weight in expected.items():
        torch.testing.assert_close(
            alone("Muon")[1][f"weights/{name}"], weight, rtol=1e-9, atol=1e-9, msg=name
        )


def _on_disk(words: str, folder: str | None) -> Any:
    words += " offload=disk" * (folder is not None)
    engine = plait.parallelize(hf_models.model_of("mixtral"), words, offload_dir=folder, seed=3)
    losses = [engine.step(programs.share_of(batch, engine)).loss for batch in programs.batches(3)]
    return losses, engine.state()


@pytest.mark.parametrize("words", ["dp=2 ep=2", "dp=4 ep=2 zero=1", "dp=2 ep=2 zero=3 precision=bf16"])
def test_states_of_experts_on_disk_change_no_bit(pool: Pool, tmp_path: Path, words: str) -> None:
    ranks = Plan.parse(words).num_ranks
    in_memory, on_disk = (pool.run(_on_disk, ranks, words, at)[0] for at in (None, str(tmp_path)))
    assert on_disk[0] == in_memory[0]
    assert [key for key in in_memory[1] if not torch.equal(on_disk[1][key], in_memory[1][key])] == []


def _float8(task: programs.Task, words: str) -> programs.Trace:
    with mock.patch.object(Plan, "dtype", "fp64"):  # see test_float8_ranks.py
        return programs.train_task(task, words)


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_float8_layers_around_experts_train_as_in_one_process(pool: Pool, precision: str) -> None:
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True, steps=2)
    (alone,) = pool.run(_float8, 1, task, f"dp=1 micro=2 precision={precision}")
    ours = pool.run(_float8, 2, task, f"dp=2 ep=2 zero=1 precision={precision}")[0]
    assert ours.losses == pytest.approx(alone.losses, rel=1e-8)
    assert programs.largest_difference(ours.weights, alone.weights)[0] <= 1e-8
