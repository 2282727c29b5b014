"""Defects of expert parallelism, most of them of other libraries, put in one at a time: each changes the
numbers that its row names. See "Defects of others" in docs/experts.md."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from plait.engine import build
from plait.models.experts import Sizes
from plait.optim.clip import clip_factor
from plait.parallel.experts import dispatch
from plait.parallel.tensor.other_layers import ParallelExperts
from plait.parallel.tensor.shards import TokenShards
from plait.parallel.zero import sharded_model
from plait.parallel.zero.rank_context import UnitGroups
from plait.parallel.zero.state_dict import ShardedState
from plait.plan import axes
from plait.plan.axes import Roles, UnitKind
from support import expert_cases, programs
from support.expert_cases import Case
from support.pool import Pool, RankError

EXCHANGE, LAYER = dispatch._Exchange, dispatch.DistributedExperts
_list, _backward, _computed, _call = (
    dispatch.all_to_all_list,
    EXCHANGE.backward,
    LAYER._computed,
    LAYER.__call__,
)
_replicas, _build = Roles.replicas, UnitGroups.build
_all_reduce, _distribute, _state_of = (
    sharded_model.all_reduce,
    build.distribute_experts,
    ShardedState._state_of,
)
_adamw, _new_zeros = torch.optim.AdamW.step, torch.Tensor.new_zeros


# --- rows and their gradients


def _not_sent(outs: Any, parts: Any, group: Any, *, label: str) -> None:
    if label.startswith("counts"):
        _list(outs, parts, group, label=label)
        return
    for rank, (out, part) in enumerate(zip(outs, parts, strict=True)):
        out.copy_(part) if rank == group.rank else out.zero_()


def _own_gradients(ctx: Any, *gradients: Tensor) -> Any:
    with mock.patch.object(dispatch, "all_to_all_list", _not_sent):
        return _backward(ctx, *gradients)


def _by_expert(self: dispatch.Rows) -> tuple[Tensor, Tensor]:
    """Rows as if they came by expert, and of an expert by rank."""
    places = torch.arange(sum(self.received))
    return places, places


def _without_row_of_zeros(self: Any, module: nn.Module, x_RH: Tensor, sizes: Sizes) -> Tensor:
    return _computed(self, module, x_RH, sizes) if len(x_RH) else x_RH.new_zeros(x_RH.shape)


def _filled(value: float) -> Callable[..., Tensor]:
    """`new_zeros` with other values where a layer fills the rows that it does not send."""

    def new_zeros(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        caller = sys._getframe(1).f_code
        fills = caller.co_filename == dispatch.__file__ and caller.co_name != "_computed"
        return self.new_full(shape, value) if fills else _new_zeros(self, *shape, **options)

    return new_zeros


# --- scales of gradients


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scaled(power: int) -> Any:
    """Gradients of experts, and of these alone, times a power of the number of ranks of ep."""

    def computed(self: Any, module: nn.Module, x_RH: Tensor, sizes: Sizes) -> Tensor:
        factor = float(self.group.size) ** power
        return _Scale.apply(_computed(self, module, _Scale.apply(x_RH, 1 / factor), sizes), factor)

    return computed


def _without_kind(self: Roles, _: UnitKind = UnitKind.DENSE) -> Any:
    return _replicas(self)


def _without_replicas(self: Roles, kind: UnitKind = UnitKind.DENSE) -> Any:
    return () if kind is UnitKind.EXPERT else _replicas(self, kind)


def _detached(self: Any, module: nn.Module, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return _call(self, module, x, experts, weights.detach())


def _weighted_twice(self: Any, module: nn.Module, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return _call(self, module, x, experts, weights * weights)


def _shared_summed(model: nn.Module, *given: Any) -> None:
    """Shared experts as a part of what is summed over the two ranks of ep."""
    _distribute(model, *given)
    for name, module in model.named_modules():
        if name.endswith("shared_expert"):
            module.register_forward_hook(lambda _module, _args, output: output * 2)


# --- norms, updates and states


def _counted(experts: bool, dense: bool | None = None) -> Any:
    """Groups whose units a rank counts in the norm, or not, by their kind; None: as they are."""

    def groups(cls: Any, mesh: Any, plan: Any, kind: UnitKind) -> UnitGroups:
        built, counts = _build(mesh, plan, kind), experts if kind is UnitKind.EXPERT else dense
        return built if counts is None else replace(built, counts=counts)

    return classmethod(groups)


def _own_tokens(x: Tensor, tokens: TokenShards) -> Tensor:
    return tokens.shard(x)


def _own_norm(self: Roles) -> Any:
    return ("pp", *self.states(), "row", "col")


def _norm_of_ranges(self: Roles) -> Any:
    return ("pp", *axes.EXPERTS, "row", "col")


def _mean_norm(tensor: Tensor, group: Any) -> None:
    """The mean of ranks' norms, in place of the root of the sum of their squares."""
    tensor[0] = tensor[0].sqrt()
    _all_reduce(tensor, group)
    tensor[0] = (tensor[0] / group.size) ** 2


def _skipping(self: Any, closure: Any = None) -> Any:
    """AdamW that does not update, nor decay, what has no gradient."""
    leaves = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
    before = [(p, p.detach().clone(), p.grad == 0) for p in leaves]
    result = _adamw(self, closure)
    with torch.no_grad():
        for parameter, weights, without in before:
            parameter.copy_(torch.where(without, weights, parameter))
    return result


def _states_of_places(self: ShardedState, unit: Any, part: Any, source: Any) -> Any:
    """States of experts without those of the file."""
    state = _state_of(self, unit, part, source)
    if unit.layout.kind is UnitKind.EXPERT:
        state = {key: value if value.ndim == 0 else value * 0 for key, value in state.items()}
    return state


# --- the table

EXPERTS, ROUTER, DENSE, NORM, LOSS = "experts", "router", "dense", "norm", "loss"
LATER, RANKS, ENDS = "later steps", "ranks differ", "no end"
GRADIENTS = {EXPERTS, ROUTER, DENSE, NORM}
ALL = {*GRADIENTS, LOSS}
OWN = Case("dp=2 ep=2 precision=fp64", "mixtral", 4, 2, "own")
COPIES = replace(OWN, plan="dp=4 ep=2 precision=fp64")
UNUSED = replace(OWN, routing="one expert")
NO_EXPERT = replace(OWN, routing="no expert")


@dataclass(frozen=True)
class Mutation:
    """`target`'s attribute `name` is replaced; what then differs in the first step. `others`: numbers of the
    same defect elsewhere."""

    target: Any
    name: str
    replacement: Any
    differs: set[str]
    case: Case = OWN
    others: str = ""


MUTATIONS = {
    "rows not sent": Mutation(dispatch, "all_to_all_list", _not_sent, ALL),
    "gradients not sent back": Mutation(EXCHANGE, "backward", staticmethod(_own_gradients), GRADIENTS),
    "rows taken by expert": Mutation(dispatch.Rows, "by_expert", _by_expert, ALL),
    "weights applied twice": Mutation(LAYER, "__call__", _weighted_twice, ALL),
    "a rank without rows leaves out its experts": Mutation(
        LAYER,
        "_computed",
        _without_row_of_zeros,
        {ENDS},
        replace(UNUSED, routing="first half"),
        "DeepSpeed #4808, #5066, #7461; Megatron-LM #4851; Automodel #3680",
    ),
    "rows of no expert uninitialised": Mutation(
        torch.Tensor,
        "new_zeros",
        _filled(float("nan")),
        ALL,
        NO_EXPERT,
        "transformers #45621, #48205",
    ),
    "rows of no expert in the router's gradient": Mutation(
        torch.Tensor,
        "new_zeros",
        _filled(1.0),
        GRADIENTS,
        NO_EXPERT,
        "transformers #48687, #48689",
    ),
    "gradients of experts times the ranks of ep": Mutation(
        LAYER,
        "_computed",
        _scaled(1),
        {EXPERTS, NORM},
        others="DeepSpeed #4957, #5259, #5618, #6545, #6546; megablocks #20; pytorch #160285; "
        "torchtitan #1551, #3604; Megatron-LM #5956, #7160",
    ),
    "gradients of experts divided by the ranks of ep": Mutation(
        LAYER, "_computed", _scaled(-1), {EXPERTS, NORM}, others="megablocks #86"
    ),
    "gradients of experts read as zeros": Mutation(
        LAYER, "_computed", _scaled(-1000), {EXPERTS, NORM}, others="pytorch #190745, #190747"
    ),
    "gradients of other experts added": Mutation(
        Roles, "replicas", _without_kind, {EXPERTS, NORM}, others="Megatron-LM #5916"
    ),
    "gradients of the same experts not added": Mutation(
        Roles, "replicas", _without_replicas, {RANKS}, COPIES, "Megatron-LM #5916; fairseq #4220"
    ),
    "weights without a gradient": Mutation(
        LAYER,
        "__call__",
        _detached,
        GRADIENTS,
        others="transformers #48205; torchtitan #2416; Automodel #2092, #2995",
    ),
    "gradients of columns not summed below experts": Mutation(
        ParallelExperts,
        "_copy_to_group",
        lambda _, value: value,
        GRADIENTS,
        replace(OWN, plan="dp=2 tp=2 precision=fp64"),
        "torchtitan #1805, #1878, #4054",
    ),
    "shared experts summed over ranks": Mutation(
        build,
        "distribute_experts",
        _shared_summed,
        ALL,
        replace(OWN, family="qwen2_moe"),
        "sglang #26845, #31475, #35535",
    ),
    "gradients of other columns' tokens not gathered": Mutation(
        dispatch, "split", _own_tokens, GRADIENTS, replace(OWN, plan="dp=2 ep=2 tp=2 precision=fp64")
    ),
    "norm of this rank's experts": Mutation(
        Roles, "one_copy", property(_own_norm), {RANKS}, others="Automodel #3816; fastmoe #169"
    ),
    "norm of a rank's range": Mutation(
        Roles,
        "one_copy",
        property(_norm_of_ranges),
        {RANKS},
        replace(COPIES, plan="dp=4 ep=2 zero=1 precision=fp64"),
        "DeepSpeed #8613",
    ),
    "norm without experts": Mutation(
        UnitGroups,
        "build",
        _counted(experts=False),
        {NORM},
        replace(OWN, plan="dp=2 ep=2 tp=2 precision=fp64"),
        "Megatron-LM #5916, #6470",
    ),
    "norm as a mean of norms": Mutation(
        sharded_model, "all_reduce", _mean_norm, {NORM}, others="DeepSpeed #5259, #8475, #8478"
    ),
    "dense units counted by all ranks of ep": Mutation(
        UnitGroups, "build", _counted(experts=True, dense=True), {NORM}
    ),
    "experts without tokens not decayed": Mutation(
        torch.optim.AdamW, "step", _skipping, {LATER}, UNUSED, "Automodel #2995"
    ),
    "moments lost under another ep": Mutation(
        ShardedState,
        "_state_of",
        _states_of_places,
        {LATER},
        replace(OWN, then="dp=4 ep=4 precision=fp64"),
        "Megatron Core, its README",
    ),
}


def _mutated(mutation: str, *args: Any) -> programs.Trace:
    if not mutation:
        return expert_cases.trained(*args)
    row = MUTATIONS[mutation]
    with mock.patch.object(row.target, row.name, row.replacement):
        return expert_cases.trained(*args)


def _kind_of(name: str) -> str:
    return EXPERTS if ".experts." in name else ROUTER if ".gate." in name or ".router." in name else DENSE


def _before_clipping(trace: programs.Trace) -> dict[str, Tensor]:
    """Gradients of the first step as they were before they were clipped, by the norm of the trace."""
    factor = clip_factor(trace.norms[0], programs.CLIP)
    return {name: gradient / factor for name, gradient in trace.gradients[0].items()}


def _differing(ours: programs.Trace, expected: programs.Trace) -> set[str]:
    """Names of what differs in the first step; if nothing does, check that something does later."""
    mine, theirs = (_before_clipping(trace) for trace in (ours, expected))
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    first = {
        _kind_of(name)
        for name, gradient in theirs.items()
        if not torch.allclose(mine[name], gradient, rtol=0, atol=1e-9 * scale)
    }
    first |= {LOSS} if ours.losses[0] != pytest.approx(expected.losses[0], rel=1e-9) else set()
    first |= {NORM} if ours.norms[0] != pytest.approx(expected.norms[0], rel=1e-9) else set()
    if not first:
        with pytest.raises(AssertionError):
            programs.assert_same(ours, expected)
        return {LATER}
    return first


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_defect_changes_the_numbers_of_its_row(pool: Pool, mutation: str, tmp_path: Path) -> None:
    row = MUTATIONS[mutation]
    if row.differs <= {ENDS, RANKS}:
        error, text = (
            (RankError, "gone|running") if row.differs == {ENDS} else (AssertionError, "ranks have other")
        )
        with pytest.raises(error, match=text):
            expert_cases.trace_of(pool, row.case, tmp_path, _mutated, mutation, timeout_s=8)
        return
    ours = expert_cases.trace_of(pool, row.case, tmp_path, _mutated, mutation)
    expected = programs.one_process_task(row.case.task, ours.first_weights, 1)
    assert _differing(ours, expected) == row.differs


def test_the_page_has_a_row_for_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = {cells[-1].removesuffix(" |"): cells[0].removeprefix("| ") for cells in rows}
    for name, row in MUTATIONS.items():
        assert listed.get(name) == row.others or not row.others, name


@pytest.mark.parametrize("case", {row.case: None for row in MUTATIONS.values()})
def test_cases_without_a_defect_are_those_of_one_process(pool: Pool, case: Case, tmp_path: Path) -> None:
    ours = expert_cases.trace_of(pool, case, tmp_path)
    programs.assert_same(ours, programs.one_process_task(case.task, ours.first_weights, 1))
