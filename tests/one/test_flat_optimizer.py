"""Optimizers over flat pieces: their groups, what they remember, which ones are refused."""

import re
from typing import Any

import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.optim.flat_optimizer import FlatSlice, MixedOptimizer, make_optimizer, scaled_step
from plait.optim.update_kinds import GroupOptimizer, UpdateScope, state_kinds
from plait.parallel.zero.sharded_optim import check_groups
from plait.plan import Plan
from support import optimizers, programs

ELEMENTWISE = ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"]
ELEMENTWISE += ["ASGD", "Rprop", "Lion"]


def class_named(name: str) -> type[torch.optim.Optimizer]:
    kind: type[torch.optim.Optimizer] = plait.Lion if name == "Lion" else getattr(torch.optim, name)
    return kind


def piece(group: int, *, value: float = 1.0) -> FlatSlice:
    return FlatSlice.from_views(group, torch.full((16,), value), torch.full((16,), 0.5))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_group_is_there_in_order_on_a_rank_without_a_leaf_in_it(name: str) -> None:
    kind = class_named(name)
    lone = piece(1)
    groups = ({}, {"lr": 0.25}, {"lr": 0.5})
    optimizer = make_optimizer(kind, {"lr": 0.125}, [lone], groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25, 0.5]
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]
    before = lone.leaf.detach().clone()
    optimizer.step()  # with two empty groups
    assert not torch.equal(lone.leaf, before)
    nobodys = make_optimizer(kind, {"lr": 0.125}, [], groups)
    scaled_step(nobodys, 0.5)
    assert len(nobodys.param_groups) == 3


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_second_group_does_not_decay_where_the_class_can(name: str) -> None:
    kind = class_named(name)
    arguments = {"lr": 0.1} if name == "Rprop" else {"lr": 0.1, "weight_decay": 0.1}
    optimizer = make_optimizer(kind, arguments, [piece(0), piece(1)])
    assert [group.get("weight_decay") for group in optimizer.param_groups] == (
        [None, None] if name == "Rprop" else [0.1, 0.0]
    )


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (({}, {"lr": -1.0}), "Invalid learning rate"),
        (({}, {"beta": (0.9, 0.9)}), "try +: betas"),
        (({"weight_decai": 0.1},), "weight_decay"),
    ],
)
def test_options_of_a_group_are_checked_as_the_arguments_are(
    groups: tuple[dict[str, Any], ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        make_optimizer(torch.optim.AdamW, {}, [], groups)
    assert caught.value.fact == "AdamW does not take these arguments"


def test_decay_for_a_class_that_knows_none_is_refused_unless_it_is_zero() -> None:
    with pytest.raises(ConfigError, match="weight_decay"):
        make_optimizer(torch.optim.Rprop, {}, [piece(0)], ({"weight_decay": 0.1},))


def test_groups_with_different_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep different states"):
        state_kinds(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ({}, {"momentum": 0.0}))


def test_lion_has_one_state_and_checks_its_arguments() -> None:
    assert state_kinds(plait.Lion, {}) == {"exp_avg"}
    for wrong in ({"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}):
        with pytest.raises(ConfigError, match="Invalid"):
            make_optimizer(plait.Lion, wrong, [])


def test_the_states_of_an_optimizer_are_known_before_it_steps() -> None:
    assert state_kinds(torch.optim.AdamW, {}) == {"exp_avg", "exp_avg_sq", "scalar.step"}
    assert "max_exp_avg_sq" in state_kinds(torch.optim.AdamW, {"amsgrad": True})
    assert state_kinds(torch.optim.SGD, {"lr": 0.1}) == set()


class MyLBFGS(torch.optim.LBFGS):
    """A user's own."""


class Normalised(torch.optim.SGD):
    """Like LARS and LAMB: the step is as long as the parameter's norm says."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() * p.grad / p.grad.norm())


class Counting(torch.optim.SGD):
    """Counts its steps for the group, as several published optimizers do."""

    def step(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Coupled(torch.optim.SGD):
    """Takes steps as long as the norm of all gradients together."""

    @torch.no_grad()
    def step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.cat([p.grad.reshape(-1) for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm)


class RowsOfMatrices(torch.optim.SGD):
    """Treats vectors by element, and matrices by row, as published optimizers do."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True) if p.ndim == 2 else p.grad)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MyLBFGS, "line|direction"),
        (Coupled, "depends on other parameters"),
        (Counting, "counts in its param_groups"),
    ],
)
def test_classes_that_do_not_update_parameters_one_by_one_are_refused(
    kind: type[torch.optim.Optimizer], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        _ = GroupOptimizer(kind, {"lr": 0.1}).scope
    assert caught.value.fact == f"{kind.__name__} cannot work on shards of parameters"


class Derived(torch.optim.AdamW):
    """Declares nothing: it may have changed the step."""


class DerivedOfDeclared(optimizers.ByElement):
    """Declares nothing itself."""


UNDECLARED = [*optimizers.BY_TENSOR, Derived, DerivedOfDeclared, Normalised, RowsOfMatrices]


@pytest.mark.parametrize(
    "kind",
    [torch.optim.Muon, torch.optim.Adafactor, optimizers.declaring(optimizers.Stable, False), *UNDECLARED],
    ids=lambda kind: kind.__name__,
)
def test_a_class_that_is_not_declared_element_wise_needs_full_tensors(
    kind: type[torch.optim.Optimizer],
) -> None:
    assert GroupOptimizer(kind, {"lr": 0.1}).scope is UpdateScope.TENSORS
    with pytest.raises(ConfigError, match=r"does not work with .*\n.*needs full tensors"):
        state_kinds(kind, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optimizers.Stable, "is not updated as a vector|parts of a parameter"),
        (optimizers.Cautious, "parts of a parameter"),
        (optimizers.Clipping, "parts of a parameter"),
        (optimizers.ClippingLarge, "parts of a parameter"),
        (optimizers.Factored, r"shape \(160, 160\) is not updated as a vector"),
        (optimizers.FactoredLarge, r"shape \(160, 160\) is not updated as a vector"),
        (optimizers.LaterByTensor, "parts of a parameter"),
        (optimizers.Counting, "stepped by turns"),
        (optimizers.FirstRate, "reads other groups"),
        (RowsOfMatrices, r"shape \(2, 12\) is not updated as a vector"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_class_that_declares_itself_element_wise_but_is_not_is_refused(
    kind: type[torch.optim.Optimizer], reason: str
) -> None:
    declared = optimizers.declaring(kind)
    with pytest.raises(ConfigError) as caught:
        _ = GroupOptimizer(declared, {"lr": 0.1}).scope
    assert caught.value.fact == f"{declared.__name__} is not what its is_elementwise declares"
    assert re.search(reason, str(caught.value.given))
    assert "one element's weights, gradients and states" in str(caught.value.expected)
    assert "full tensors" in str(caught.value.hint)


def test_a_class_that_declares_itself_element_wise_works_on_shards_and_servers() -> None:
    assert GroupOptimizer(optimizers.ByElement, {}).scope is UpdateScope.ELEMENTS
    assert state_kinds(optimizers.ByElement, {}) == {"exp_avg"}


def test_a_class_that_reads_the_parameters_when_it_is_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="when it is built"):
        _ = GroupOptimizer(optimizers.ReadingAtStart, {}).scope


def test_a_class_that_declares_nothing_is_said_to_be_slower_unless_it_says_that_it_is_not_element_wise() -> (
    None
):
    options: dict[str, Any] = {"loss": programs.summed_loss, "seed": 3}
    with pytest.warns(UserWarning, match="Cautious is not known to be element-wise.*is_elementwise = True"):
        plait.parallelize(programs.llama(), "dp=1", optimizer=optimizers.Cautious, **options)
    declared = optimizers.declaring(optimizers.Cautious, False)
    plait.parallelize(programs.llama(), "dp=1", optimizer=declared, **options)  # warnings are errors
    with pytest.raises(
        ConfigError, match=r"Derived does not work with offload=disk(.|\n)*is_elementwise = True"
    ):
        check_groups([GroupOptimizer(Derived, {})], Plan.parse("offload=disk"))


def test_a_class_that_sums_over_shards_needs_norms() -> None:
    assert GroupOptimizer(plait.LAMB, {}).scope is UpdateScope.NORMS
    for wrong in (
        {"lr": -1.0},
        {"eps": -1.0},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
    ):
        with pytest.raises(ConfigError, match="Invalid"):
            make_optimizer(plait.LAMB, wrong, [])


def test_shapes_of_states_follow_the_shape_of_the_parameter() -> None:
    factored = GroupOptimizer(torch.optim.Adafactor, {})
    assert factored.state_shapes((6, 6)) == {"scalar.step": (), "row_var": (6, 1), "col_var": (1, 6)}
    assert factored.state_shapes((2, 1, 5))["row_var"] == (2, 1, 1)
    assert factored.state_shapes((9,)) == {"scalar.step": (), "variance": (9,)}
    later = GroupOptimizer(optimizers.FactoredLarge, {})
    assert later.state_shapes((130, 7)) == {"variance": (130, 7)}
    assert later.state_shapes((130, 200)) == {"row": (130, 1), "column": (1, 200)}
    assert GroupOptimizer(optimizers.Stable, {}).state_shapes((4, 9))["exp_avg"] == (4, 9)


def test_groups_of_two_classes_step_as_one_optimizer() -> None:
    pieces, alone = [[piece(0, value=2.0), piece(1, value=3.0)] for _ in range(2)]
    groups: tuple[dict[str, Any], ...] = ({}, {"optimizer": torch.optim.SGD, "lr": 0.5, "momentum": 0.9})
    mixed = make_optimizer(torch.optim.AdamW, {"lr": 0.125, "betas": (0.5, 0.5)}, pieces, groups)
    assert isinstance(mixed, MixedOptimizer)
    assert [group["optimizer"] for group in mixed.param_groups] == ["AdamW", "SGD"]
    adamw = torch.optim.AdamW([alone[0].leaf], lr=0.125, betas=(0.5, 0.5), fused=True)
    sgd = torch.optim.SGD([alone[1].leaf], lr=0.5, momentum=0.9, fused=True)
    for factor in (1.0, 0.5):
        for group in mixed.param_groups:
            group["lr"] *= factor  # as a schedule does
        adamw.param_groups[0]["lr"] *= factor
        sgd.param_groups[0]["lr"] *= factor
        for optimizer in (mixed, adamw, sgd):
            optimizer.step()
    for ours, theirs in zip(pieces, alone, strict=True):
        assert torch.equal(ours.leaf, theirs.leaf)
    assert mixed.state[pieces[0].leaf].keys() >= {"exp_avg", "exp_avg_sq"}
    assert mixed.state[pieces[1].leaf].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_no_elementwise_class_is_refused(name: str) -> None:
    kinds = state_kinds(class_named(name), {"lr": 0.1})
    assert all(isinstance(kind, str) for kind in kinds)
