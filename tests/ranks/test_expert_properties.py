"""Expert parallelism: factors of gradients, a norm by hand, numbers of rows, bits, random plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import plait
from plait.parallel.experts import dispatch
from plait.plan import Plan
from support import expert_cases, programs, trainings
from support.expert_cases import Case
from support.pool import Pool

OWN = Case("dp=2 ep=2 precision=fp64", "mixtral", 4, 2, "own")
FACTORS = (
    "dp=1",
    "dp=2",
    "dp=2 ep=2",
    "dp=4 ep=2",
    "dp=4 ep=4",
    "dp=8 ep=4 zero=1",
    "dp=4 ep=2 zero=3 shard=2",
)


def _check_same(pool: Pool, case: Case, folder: Path) -> None:
    ours = expert_cases.trace_of(pool, case, folder)
    programs.assert_same(ours, programs.one_process_task(case.task, ours.first_weights, 1))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("bf16", 0.02)])
@pytest.mark.parametrize("plan", FACTORS)
def test_the_gradient_of_each_expert_is_as_large_as_in_one_process(
    pool: Pool, plan: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    case = replace(OWN, plan=f"{plan} precision={precision}", routing="first choices")
    ours = expert_cases.trace_of(pool, case, tmp_path)
    expected = programs.one_process_task(case.task, ours.first_weights, 1).gradients[0]
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 8
    for name in experts:
        for number in range(2):  # the others get no tokens
            ratio = float(ours.gradients[0][name][number].norm() / expected[name][number].norm())
            assert ratio == pytest.approx(1, abs=tolerance), f"expert {number} of {name}"
        assert not ours.gradients[0][name][2:].any()


# --- a norm by hand


class _Sum(nn.Module):
    """A number, and what a token's expert makes of 1: its only weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=1, intermediate_size=1, num_local_experts=2, hidden_act="relu")
        config._experts_implementation = "eager"
        self.experts, self.number = MixtralExperts(config), nn.Parameter(torch.ones(1))
        nn.init.ones_(self.experts.gate_up_proj).requires_grad_(False)
        nn.init.ones_(self.experts.down_proj)

    def forward(self, x_T1: Tensor, choices_T1: Tensor, factors_T1: Tensor) -> Tensor:
        return 3 * self.number + factors_T1 * self.experts(x_T1, choices_T1, torch.ones_like(x_T1))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Sum()])

    def forward(self, x: Tensor, choices: Tensor, factors: Tensor) -> Tensor:
        return self.blocks[0](x, choices, factors)


def _by_hand(plan: str) -> tuple[float, dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    engine = plait.parallelize(
        _Model(),
        f"{plan} precision=fp64",
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 1.0},
        clip_norm=1.3,
        loss=lambda outputs, _: (outputs.sum(), len(outputs)),
    )
    torch.set_default_dtype(torch.float32)
    # Half of the tokens are the second expert's, with a mean gradient of 12, and the others the first one's.
    number = torch.arange(4)[:, None]
    batch = {"x": torch.ones(4, 1).double(), "choices": 1 - number // 2}
    batch["factors"] = torch.where(number < 2, 24.0, 8.0).double()
    result = engine.step(programs.share_of(batch, engine))
    return result.grad_norm, engine.full_parameters()


@pytest.mark.parametrize(
    "plan", ["dp=2 ep=2", "dp=2 ep=2 zero=1", "dp=2 ep=2 zero=3", "dp=4 ep=2 zero=2", "dp=4 ep=2"]
)
def test_a_norm_of_gradients_3_4_and_12_is_13_and_clips_by_it(pool: Pool, plan: str) -> None:
    ranks = pool.run(_by_hand, Plan.parse(plan).num_ranks, plan)
    assert [norm for norm, _ in ranks] == pytest.approx([13.0] * len(ranks), rel=1e-12)
    weights = ranks[0][1]
    assert weights["blocks.0.number"].tolist() == pytest.approx([1 - 0.3])
    assert weights["blocks.0.experts.down_proj"].flatten().tolist() == pytest.approx([1 - 0.4, 1 - 1.2])


# --- rows


def _received(case: Case, plan: str) -> int:
    """The rows that this rank receives in a step."""
    numbers = []

    def exchanged(*args: Any) -> dispatch.Rows:
        rows = original(*args)
        numbers.append(sum(rows.received))
        return rows

    engine, original = programs.engine_of(case.task, plan), dispatch.Rows.exchanged
    with mock.patch.object(dispatch.Rows, "exchanged", exchanged):
        engine.step(programs.share_of(case.task.data(1)[0], engine))
    return sum(numbers)


@pytest.mark.parametrize("routing", ["own", "one expert", "first half"])
@pytest.mark.parametrize(
    "plan", ["dp=2 ep=2 micro=2", "dp=4 ep=2", "dp=4 ep=4 zero=3", "dp=2 ep=2 pp=2 micro=3"]
)
def test_all_ranks_together_receive_a_row_for_each_choice(pool: Pool, plan: str, routing: str) -> None:
    case = replace(OWN, routing=routing)
    rows = pool.run(_received, Plan.parse(plan).num_ranks, case, f"{plan} precision=fp64")
    assert sum(rows) == 12 * programs.LENGTH * case.choices * 4  # samples, tokens, choices, layers


HARD = {
    "every token chooses all experts": replace(OWN, choices=4),
    "an expert on each rank": replace(OWN, plan="dp=4 ep=4 zero=1 precision=fp64"),
    "all tokens choose one expert, twice": replace(OWN, routing="one expert"),
    "a rank without rows": replace(OWN, routing="first half", family="gpt_oss"),
    "a rank without rows, of experts alone": replace(OWN, routing="last rank", frozen="gate|self_attn|embed"),
    "choices of no expert": replace(OWN, routing="no expert", family="qwen2_moe"),
    "samples that do not divide": replace(OWN, plan="dp=4 ep=2 micro=2 precision=fp64", sequences=25),
    "padded rows": replace(OWN, padded=True, family="deepseek_v3"),
    "frozen experts": replace(OWN, frozen="experts"),
    "frozen routers": replace(OWN, frozen="gate|router", plan="dp=4 ep=2 zero=3 precision=fp64"),
    "experts with biases, over columns": replace(
        OWN, family="gpt_oss", plan="dp=2 ep=2 tp=2 zero=1 precision=fp64"
    ),
    "a stage without experts": replace(
        OWN, family="deepseek_v3", plan="dp=2 ep=2 pp=2 stages=1,3 zero=1 micro=2 precision=fp64"
    ),
    "evaluations, and another ep from the second step": replace(
        OWN, evaluates=True, then="dp=4 ep=4 zero=3 recompute=full precision=fp64"
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_train_as_in_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    _check_same(pool, HARD[name], tmp_path)


# --- bits


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("dp=2 ep=2 zero=3 micro=2", "dp=2 ep=2 zero=3 micro=2"),
        ("dp=4 ep=2", "dp=4 ep=2"),
        ("dp=2 ep=2 micro=2", "dp=2 ep=2 micro=2 recompute=full"),
        ("dp=2 ep=2 pp=2 micro=2", "dp=2 ep=2 pp=2 micro=2 recompute=full"),
    ],
)
def test_two_runs_and_recomputed_blocks_have_the_same_bits(pool: Pool, plan: str, other: str) -> None:
    task = replace(OWN.task, steps=2)
    one, two = (
        pool.run(programs.train_task, Plan.parse(words).num_ranks, task, f"{words} precision=fp32")[0]
        for words in (plan, other)
    )
    assert (one.losses, one.norms) == (two.losses, two.norms)
    assert trainings.differing(one.weights, two.weights) == []


def _continued(plan: str, folder: Path, source: Path | None) -> dict[str, Tensor]:
    """The state after a step, or after loading; it is saved."""
    engine = programs.engine_of(OWN.task, f"{plan} precision=fp64", seed=3 if source is None else 4)
    if source is None:
        engine.step(programs.share_of(OWN.task.data(1)[0], engine))
    else:
        engine.load(source / "step-00000001")
    engine.save(folder)
    return engine.state()


def test_a_checkpoint_keeps_its_bits_from_ep_2_to_1_to_4(pool: Pool, tmp_path: Path) -> None:
    source, states = None, []
    for plan in ("dp=2 ep=2 zero=1", "dp=2 zero=3", "dp=4 ep=4", "dp=4 ep=2 tp=2 zero=3"):
        folder = tmp_path / plan.replace(" ", "-")
        states.append(pool.run(_continued, Plan.parse(plan).num_ranks, plan, folder, source)[0])
        source = folder
    assert [trainings.differing(states[0], state) for state in states[1:]] == [[], [], []]


# --- random plans


@pytest.mark.parametrize(
    "number", [*range(6), *(pytest.param(number, marks=pytest.mark.sweep) for number in range(6, 200))]
)
def test_random_plans_train_as_in_one_process(pool: Pool, number: int, tmp_path: Path) -> None:
    _check_same(pool, expert_cases.drawn(number), tmp_path)
