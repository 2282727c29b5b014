"""Optimizers that need norms or full tensors of parameters: LAMB, Muon and Adafactor under every plan."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.spec import Arguments
from plait.errors import ConfigError
from plait.estimate.explain import explain
from plait.parallel.zero.full_tensors import assign_owners
from support import optimizers, programs
from support.pool import Pool

Weights = dict[str, Tensor]
STEPS = 3


class PlainLAMB(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, line by line, parameter by parameter."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * x.grad
                v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * x.grad**2
                r = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
                u = r + group["weight_decay"] * x
                x -= group["lr"] * x.norm() / u.norm() * u


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of blocks, and all other parameters."""
    named = dict(model.named_parameters())
    inner = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    ids = {id(p) for p in inner}
    return inner, [p for p in named.values() if id(p) not in ids]


MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "LAMB": {"lr": 0.01, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.02, "weight_decay": 0.1},
}


def _optimizer(kind: str, model: nn.Module) -> dict[str, Any]:
    """Arguments of `parallelize`."""
    if kind == "Muon":
        inner, others = _split(model)
        groups = [{"params": inner, "optimizer": torch.optim.Muon, **MUON}, {"params": others}]
        return {"optimizer_args": ADAMW, "param_groups": groups}
    if kind == "Counting and AdamW":
        inner, others = _split(model)
        groups = [{"params": inner, "optimizer": optimizers.Counting}, {"params": others}]
        return {"optimizer_args": ADAMW, "param_groups": groups}
    chosen = {"LAMB": plait.LAMB, "Adafactor": torch.optim.Adafactor}.get(kind) or getattr(optimizers, kind)
    all_parameters = list(model.parameters())
    return {"optimizer": chosen, "optimizer_args": OPTIONS.get(kind, {}), "param_groups": all_parameters}


def _engine(kind: str, plan: str, build: Callable[..., nn.Module] = programs.llama) -> plait.Engine:
    model = build()
    shared: dict[str, Any] = {"clip_norm": programs.CLIP, "loss": programs.summed_loss, "seed": 3}
    return plait.parallelize(model, plan, **_optimizer(kind, model), **shared)


def _trained(kind: str, plan: str, build: Callable[..., nn.Module] = programs.llama) -> tuple[Weights, ...]:
    engine = _engine(kind, f"{plan} precision=fp64", build)
    first = engine.full_parameters()
    for batch in programs.batches(STEPS):
        engine.step(programs.share_of(batch, engine))
    engine.check_replicas()
    if engine.world.rank == 0:  # estimates are of the first rank, which owns most
        measured, estimated = engine.memory(), engine.estimated_memory((4, programs.LENGTH))
        assert 0 <= measured.optimizer - estimated.optimizer <= 8 * len(first), (measured, estimated)
        assert measured.buffers <= estimated.buffers, (measured, estimated)
    return first, engine.full_parameters()


def _continued(kind: str, plan: str, state: Weights, steps: slice) -> tuple[Weights, Weights]:
    """Load a state, unless it is empty, and train; return the first weights and the last state."""
    engine = _engine(kind, f"{plan} precision=fp64")
    first = engine.full_parameters()
    if state:
        engine.load_state(state)
    for batch in programs.batches(STEPS)[steps]:
        engine.step(programs.share_of(batch, engine))
    return first, engine.state()


def _reference(kind: str, first: Weights, build: Callable[..., nn.Module]) -> Weights:
    """One model, plain torch."""
    model = build(on_meta=False).double()
    model.load_state_dict(first, strict=False)
    steppers: list[torch.optim.Optimizer]
    if kind == "Muon":
        inner, others = _split(model)
        steppers = [torch.optim.Muon(inner, **MUON), torch.optim.AdamW(others, **ADAMW)]
    elif kind == "Counting and AdamW":
        inner, others = _split(model)
        steppers = [optimizers.Counting(inner), torch.optim.AdamW(others, **ADAMW)]
    else:
        chosen: Any = PlainLAMB if kind == "LAMB" else _optimizer(kind, model)["optimizer"]
        steppers = [chosen(model.parameters(), **OPTIONS.get(kind, {}))]
    for batch in programs.batches(STEPS):
        model.zero_grad()
        programs.mean_loss(model, batch, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), programs.CLIP)
        for stepper in steppers:
            stepper.step()
    return {name: p.detach() for name, p in model.named_parameters()}


PLANS = ["dp=2 zero=0", "dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3 micro=2", "tp=3", "dp=2 tp=2 zero=3"]


CASES = [(kind, plan) for kind in ("Muon", "LAMB", "Adafactor") for plan in PLANS]
IN_SWEEP = {("LAMB", "dp=2 zero=0"), ("LAMB", "dp=2 zero=1"), ("Muon", "dp=2 zero=0")}
IN_SWEEP |= {("Adafactor", plan) for plan in PLANS if plan != "dp=2 tp=2 zero=3"}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [pytest.param(*case, marks=pytest.mark.sweep if case in IN_SWEEP else ()) for case in CASES],
)
def test_weights_are_those_of_one_process(pool: Pool, kind: str, plan: str) -> None:
    ranks = math.prod(int(entry[3:]) for entry in plan.split() if entry[:2] in ("dp", "tp", "pp"))
    first, weights = pool.run(_trained, ranks, kind, plan)[0]
    expected = _reference(kind, first, programs.llama)
    difference, name = programs.largest_difference(weights, expected)
    assert difference < 1e-9, name


OWN = [kind.__name__ for kind in (*optimizers.BY_TENSOR, optimizers.Replacing)]


def _all_trained(kinds: list[str], plan: str) -> dict[str, tuple[Weights, ...]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not known to be element-wise")
        return {kind: _trained(kind, plan) for kind in kinds}


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("dp=1", OWN),
        ("dp=2", [*OWN, "Counting and AdamW"]),
        ("dp=2 zero=3 micro=2", [*OWN, "ByElement"]),
        ("tp=2", OWN),
        ("pp=2 zero=1", ["Factored", "Counting and AdamW"]),
    ],
)
def test_an_optimizer_that_declares_nothing_trains_as_in_one_process(
    pool: Pool, plan: str, kinds: list[str]
) -> None:
    ranks = 1 if plan == "dp=1" else 2
    for kind, (first, weights) in pool.run(_all_trained, ranks, kinds, plan)[0].items():
        expected = _reference(kind, first, programs.llama)
        difference, name = programs.largest_difference(weights, expected)
        assert difference < 1e-9, (kind, name)


def _weights_of_a_tiny_model() -> list[list[Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not known to be element-wise")
        engine = plait.parallelize(
            nn.Linear(2, 1, bias=False, dtype=torch.float64),
            "dp=2 zero=3 precision=fp64",
            optimizer=optimizers.Stable,
            loss=lambda outputs, _: (outputs.sum(), len(outputs)),
        )
    before = [weight.clone() for weight in engine.full_parameters().values()]
    for _ in range(2):
        engine.step({"input": torch.ones(2, 2, dtype=torch.float64)})
    return [before, [*engine.full_parameters().values()]]


def test_a_rank_without_any_part_of_a_model_takes_part_in_updates_of_full_tensors(pool: Pool) -> None:
    [before], [after] = pool.run(_weights_of_a_tiny_model, 2)[0]
    expected = nn.Parameter(before.clone())
    optimizer = optimizers.Stable([expected])
    for _ in range(2):
        expected.grad = torch.ones_like(expected)
        optimizer.step()
    torch.testing.assert_close(after, expected.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["Muon", "LAMB", pytest.param("Adafactor", marks=pytest.mark.sweep)])
def test_a_state_is_continued_under_another_plan(pool: Pool, kind: str) -> None:
    first, state = pool.run(_continued, 2, kind, "dp=2 zero=1", {}, slice(1))[0]
    kinds = {key.partition("/")[0] for key in state} - {"weights", "buffers", "engine"}
    assert (
        kinds
        == {
            "Muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "scalar.step"},
            "LAMB": {"exp_avg", "exp_avg_sq", "number.step"},
            "Adafactor": {"row_var", "col_var", "variance", "scalar.step"},
        }[kind]
    )
    state = pool.run(_continued, 4, kind, "dp=2 tp=2 zero=3", state, slice(1, None))[0][1]
    weights = {key.partition("/")[2]: value for key, value in state.items() if key.startswith("weights/")}
    difference, name = programs.largest_difference(weights, _reference(kind, first, programs.llama))
    assert difference < 1e-9, name


def test_copies_of_a_tied_parameter_on_two_stages_stay_equal(pool: Pool) -> None:
    first, weights = pool.run(_trained, 4, "Adafactor", "pp=2 dp=2 zero=1 micro=2", programs.tied_llama)[0]
    expected = _reference("Adafactor", first, programs.tied_llama)
    difference, name = programs.largest_difference(weights, expected)
    assert difference < 1e-9, name


@pytest.mark.parametrize(
    ("optimizer", "plan", "fact", "given"),
    [
        ("Muon", "precision=fp64", "Muon cannot train a parameter of its group", "input_layernorm.weight"),
        ("Adafactor", "offload=cpu", "Adafactor does not work with offload=cpu", "needs full tensors"),
        ("LAMB", "optim_dtype=bf16", "LAMB does not work with optim_dtype=bf16", "needs norms"),
    ],
)
def test_plans_that_an_optimizer_cannot_run_are_refused(
    optimizer: str, plan: str, fact: str, given: str
) -> None:
    chosen = plait.LAMB if optimizer == "LAMB" else getattr(torch.optim, optimizer)
    with pytest.raises(ConfigError) as caught:
        plait.parallelize(programs.llama(), plan, optimizer=chosen, loss=programs.summed_loss)
    assert caught.value.fact == fact
    assert given in str(caught.value.given)
    assert caught.value.expected
    assert caught.value.hint


def _estimated(kind: str, plan: str) -> int:
    return _engine(kind, plan).estimated_memory((4, programs.LENGTH)).optimizer


def test_explained_states_are_those_of_the_rank_that_owns_most(pool: Pool) -> None:
    model, plan = programs.llama(), "dp=2 tp=2 zero=1"
    ids = torch.zeros(4, programs.LENGTH, dtype=torch.long)
    options = _optimizer("Muon", model)
    micro = {"input_ids": ids, "labels": ids}
    explanation = explain(Arguments(model, plan, loss=programs.summed_loss, **options), micro)
    estimates = pool.run(_estimated, 4, "Muon", plan)
    assert max(each.memory.optimizer for each in explanation.rank_classes) == max(estimates)
    assert len(set(estimates)) > 1


def test_owners_have_about_the_same_work() -> None:
    assert assign_owners([4, 1, 3, 2, 2], 2) == [0, 1, 1, 1, 0]
    assert assign_owners([1], 3) == [0]
