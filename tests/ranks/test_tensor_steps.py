"""Options of a step on a grid: they compute what they compute without one, and ranks of a grid agree."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine import inputs
from plait.errors import PlanError
from plait.parallel.zero.flat_param import FlatParam
from plait.plan.loss_scaling import LossScaling
from support import hf_models, programs
from support.pool import Pool
from support.programs import Task
from support.trainings import assert_near, copied, differing, engine_of, train, trained


def num_ranks(plan: str) -> int:
    return plait.Plan.parse(plan).num_ranks


# --- options that the one-process program has too


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Interleaved: of each block's parameters some are in one and some in the other."""
    named = list(model.named_parameters())
    fast = [p for name, p in named if p.requires_grad and ("q_proj" in name or "norm" in name)]
    slow = [p for name, p in named if p.requires_grad and not ("q_proj" in name or "norm" in name)]
    return [{"params": fast, "lr": 1e-2, "weight_decay": 0.3}, {"params": slow}]


def _partly_frozen(on_meta: bool = True) -> nn.Module:
    """A block's attention, a norm and the embedding: what is cut over either axis, and what is whole."""
    model = hf_models.model_of("llama", on_meta=on_meta)
    for name, parameter in model.named_parameters():
        frozen = ("layers.0.self_attn", "layers.1.input_layernorm", "embed_tokens")
        parameter.requires_grad = not any(part in name for part in frozen)
    return model


@pytest.fixture(scope="module")
def oracles() -> dict[str, programs.Trace]:
    """By task: first weights are the same under every plan."""
    return {}


LLAMA = hf_models.builder("llama")
STEPS = 3
TASKS = {
    "llama": Task(LLAMA, own_loss=True, steps=STEPS),
    "gpt2": Task(hf_models.builder("gpt2"), own_loss=True, steps=STEPS),
    "groups": Task(LLAMA, groups=_two_groups, steps=STEPS),
    "frozen": Task(_partly_frozen, steps=STEPS),
    "by value": Task(LLAMA, clip_norm=None, clip_value=2e-3, steps=STEPS),
    "momentum": Task(LLAMA, optimizer="SGD", arguments={"lr": 0.1, "momentum": 0.9}, steps=STEPS),
}


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        ("llama", "tp=2 micro=2"),
        ("gpt2", "tp=2 sp=true dp=2 zero=3 micro=2"),
        ("llama", "tp=2x2 micro=3 accumulate=unsharded"),
        ("gpt2", "tp=2 dp=2 zero=2 micro=2 accumulate=unsharded"),
        ("llama", "tp=2 dp=2 zero=2 micro=2 accumulate=sharded"),
        ("gpt2", "tp=2x1 micro=2 offload=cpu"),
        ("llama", "tp=2 sp=true dp=2 zero=3 micro=2 offload=cpu"),
        ("groups", "tp=2x2"),
        ("groups", "tp=3 micro=2"),
        ("groups", "tp=2 sp=true dp=2 zero=3"),
        ("frozen", "tp=2x2"),
        ("frozen", "tp=2 sp=true dp=2 zero=3"),
        ("by value", "tp=2 sp=true dp=2 zero=3 micro=2"),
        ("momentum", "tp=2x1 dp=2 zero=2"),
    ],
)
def test_options_on_a_grid_give_the_one_process_programs_numbers(
    pool: Pool, oracles: dict[str, programs.Trace], task: str, plan: str
) -> None:
    ours = pool.run(programs.train_task, num_ranks(plan), TASKS[task], f"{plan} precision=fp64")[0]
    if task not in oracles:
        oracles[task] = programs.one_process_task(TASKS[task], ours.first_weights, 1)
    assert differing(ours.first_weights, oracles[task].first_weights) == []
    programs.assert_same(ours, oracles[task])


# --- lower precision


def _near(build: Any, plan: str, options: dict[str, Any] | None = None) -> Any:
    engine = engine_of(plan, build, **options or {})
    results = train(engine, last=4)
    return results, engine.full_parameters()


@pytest.mark.parametrize(
    "words",
    [
        "tp=2 precision=bf16",
        "tp=2x2 precision=bf16",
        "tp=2 sp=true precision=bf16 micro=2",
        "tp=2 dp=2 zero=3 precision=bf16 reduce=bf16",
        "tp=2 precision=fp16",
        "tp=2x1 dp=2 zero=3 precision=fp16 micro=2",
        "tp=2 dp=2 zero=2 reduce=bf16",
    ],
)
def test_narrow_numbers_on_a_grid_train_nearly_as_fp32_in_one_process(
    pool: Pool, words: str, wide: Any, start: Any
) -> None:
    """The bounds are those of the same precisions without a grid."""
    found = pool.run(trained, num_ranks(words), words)[0]
    assert_near(found, wide, start, weights=0.06, losses=1e-2)


@pytest.mark.parametrize("words", ["tp=2", "tp=2x2", "tp=2 sp=true dp=2 zero=3"])
def test_bf16_on_a_grid_is_near_bf16_in_one_process(pool: Pool, words: str) -> None:
    alone, _ = pool.run(_near, 1, programs.rough_llama, "dp=1 precision=bf16")[0]
    cut, _ = pool.run(_near, num_ranks(words), programs.rough_llama, f"{words} precision=bf16")[0]
    for mine, theirs in zip(cut, alone, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-2)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=3e-2)


def _compiled(plans: list[str]) -> Any:
    return [_near(programs.rough_llama, plan) for plan in plans]


@pytest.mark.sweep
def test_compiled_blocks_on_a_grid_train_as_uncompiled_ones(pool: Pool) -> None:
    (mine, weights), (theirs, plain) = pool.run(_compiled, 2, ["tp=2 compile=true", "tp=2"], timeout_s=240.0)[
        0
    ]
    for one, other in zip(mine, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert programs.largest_difference(weights, plain)[0] < 1e-5


# --- evaluation


def _evaluated(task: str, plan: str) -> Any:
    """The loss of a batch after a step, and what evaluation changed."""
    engine = programs.engine_of(TASKS[task], plan)
    batches = programs.batches(2)
    engine.step(programs.share_of(batches[0], engine))
    before = copied(engine.state())
    found = engine.evaluate(programs.share_of(batches[1], engine))
    return found, differing(before, engine.state())


@pytest.mark.parametrize("plan", ["tp=3", "tp=2x2 micro=2", "tp=2 sp=true dp=2 zero=3 micro=2"])
@pytest.mark.parametrize("task", ["llama", "by value"])
def test_evaluation_on_a_grid_gives_the_whole_loss_on_every_rank(pool: Pool, task: str, plan: str) -> None:
    (alone, _), *_ = pool.run(_evaluated, 1, task, "dp=1 precision=fp64")
    for found, changed in pool.run(_evaluated, num_ranks(plan), task, f"{plan} precision=fp64"):
        assert found.num_tokens == alone.num_tokens
        assert found.loss_sum == pytest.approx(alone.loss_sum, rel=1e-9)
        assert changed == []


# --- skipped steps


def _skips(plan: str, poisoned: int, what: str) -> Any:
    """A clean step, one that goes wrong on one rank alone, a clean one; what the second changed."""
    engine = engine_of(plan)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(3)]
    found = [engine.step(batches[0])]
    before = copied(engine.state())
    handles = []
    if engine.world.rank == poisoned:
        if what == "loss":
            with mock.patch.object(engine._parts.stages[0], "summed_loss", _nan_loss(engine)):
                found.append(engine.step(batches[1]))
        else:
            weight = dict(engine.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            handles.append(weight.register_hook(lambda gradient: gradient * float("nan")))
    if len(found) == 1:
        found.append(engine.step(batches[1]))
    for handle in handles:
        handle.remove()
    changed = differing(before, engine.state())
    found.append(engine.step(batches[2]))
    return [repr(result) for result in found], [result.skipped for result in found], changed


def _nan_loss(engine: plait.Engine) -> Any:
    """A loss that is no number, and has a gradient that is."""
    original = engine._parts.stages[0].summed_loss

    def poisoned(*given: Any) -> tuple[Tensor, Any]:
        loss, count = original(*given)
        return loss + float("nan"), count

    return poisoned


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("plan", "poisoned"),
    [("tp=2", 1), ("tp=2x2", 2), ("dp=2 tp=2 zero=3", 3), ("dp=2 tp=2x1 zero=1 micro=2 precision=bf16", 1)],
)
def test_a_step_that_goes_wrong_on_one_rank_is_skipped_by_all(
    pool: Pool, plan: str, poisoned: int, what: str
) -> None:
    ranks = pool.run(_skips, num_ranks(plan), plan, poisoned, what)
    for results, skipped, changed in ranks:
        assert skipped == [False, True, False]
        assert set(changed) <= {"engine/num_steps"}
        assert results == ranks[0][0], "the ranks disagree"


def test_a_loss_scale_falls_on_all_ranks_of_a_grid(pool: Pool) -> None:
    options = {"loss_scaling": LossScaling(initial=2.0**22)}
    ranks = pool.run(trained, 4, "tp=2x2 precision=fp16", options, 10)
    skipped = [result.skipped for result in ranks[0][0]]
    assert 1 <= sum(skipped) < 10
    assert ranks[0][2]["engine/loss_scale.value"] == 2.0 ** (22 - sum(skipped))
    assert all([result.skipped for result in results] == skipped for results, _, _ in ranks)


# --- the norm


def _norms(family: str, plan: str, uncounted: bool) -> list[float]:
    """With `uncounted`, what other ranks count too is not taken out."""
    engine = programs.engine_of(Task(hf_models.builder(family), own_loss=True), plan)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(2)]
    nothing = mock.patch.object(FlatParam, "uncounted_grads", return_value=())
    with nothing if uncounted else nullcontext():
        return [engine.step(batch).grad_norm for batch in batches]


GRIDS = [
    ("one_kv_llama", "tp=2"),  # columns share the kv head
    ("llama", "tp=3"),  # two of three columns share one
    ("llama", "tp=4"),
    ("qwen3", "tp=2 sp=true"),  # norms of heads
    ("gpt2", "tp=2x2"),  # biases, positions
    ("llama", "dp=2 tp=2 zero=3"),  # ranges that hold pieces of both kinds
    ("biased_llama", "tp=2x1"),
]


@pytest.mark.parametrize(("family", "plan"), GRIDS)
def test_each_element_counts_once_in_the_norm(pool: Pool, family: str, plan: str) -> None:
    alone = pool.run(_norms, 1, family, "dp=1 precision=fp64", False)[0]
    for norms in pool.run(_norms, num_ranks(plan), family, f"{plan} precision=fp64", False):
        assert norms == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize(("family", "plan"), GRIDS)
def test_the_norm_differs_without_the_count(pool: Pool, family: str, plan: str) -> None:
    alone = pool.run(_norms, 1, family, "dp=1 precision=fp64", False)[0]
    norms = pool.run(_norms, num_ranks(plan), family, f"{plan} precision=fp64", True)[0]
    assert norms[0] > alone[0] * (1 + 1e-6)


# --- batches


def _messages(plan: str, differ: str, how: str) -> Any:
    """The error of a first step whose values or samples differ on the last rank; the engine still trains."""
    engine = engine_of(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    other = dict(batch)
    if engine.world.rank == engine.world.size - 1:
        if differ == "a token":
            other["input_ids"] = (batch["input_ids"] + 1) % programs.VOCABULARY
        elif differ == "a label":
            other["labels"] = batch["labels"].clone()
            other["labels"][-1, -1] = 1 - other["labels"][-1, -1].clamp(0, 1)
        else:
            other = {key: value[:-2] for key, value in batch.items()}
    before = copied(engine.full_parameters())
    with pytest.raises(PlanError, match="received different batches") as caught:
        engine.step(other) if how == "step" else engine.loss(other)
    changed = differing(before, engine.full_parameters())
    return str(caught.value), changed, engine.step(batch)


@pytest.mark.parametrize(
    ("plan", "differ", "how"),
    [
        ("tp=2", "a token", "step"),
        ("tp=2x2", "a label", "step"),
        ("tp=2 sp=true", "fewer samples", "step"),
        ("tp=2x1", "a token", "loss"),
    ],
)
def test_batches_that_differ_between_ranks_of_a_grid_are_found_in_the_first_step(
    pool: Pool, plan: str, differ: str, how: str
) -> None:
    ranks = num_ranks(plan)
    expected, *_ = pool.run(_first_step, ranks, plan)[0]
    for message, changed, result in pool.run(_messages, ranks, plan, differ, how):
        assert f"rank {ranks - 1} has other values or shapes than rank 0" in message
        assert "engine.data_rank" in message
        assert changed == []
        assert result == expected


def _different_later() -> tuple[int, str]:
    """The number of the step in which a difference that begins in step 2 is found."""
    engine = engine_of("tp=2")
    batch = programs.share_of(programs.batches(1)[0], engine)
    with mock.patch.object(inputs, "_COMPARED_EVERY", 5):
        for number in range(10):
            other = (batch["input_ids"] + int(number > 1 and engine.world.rank)) % programs.VOCABULARY
            try:
                engine.step({**batch, "input_ids": other})
            except PlanError as error:
                return number, error.fact
    return -1, ""


def test_batches_that_differ_later_are_found_too(pool: Pool) -> None:
    expected = (5, "ranks that share one model received different batches")
    assert pool.run(_different_later, 2) == [expected, expected]


def _first_step(plan: str) -> Any:
    return train(engine_of(plan), last=1)


def test_data_ranks_may_have_what_they_like(pool: Pool) -> None:
    """Other numbers of samples too, of narrow floats and booleans."""
    for skipped in pool.run(_odd_batches, 4, "dp=2 tp=2"):
        assert not skipped


class Odd(nn.Module):
    """Takes a mask and narrow floats."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * mask[:, None]


def _square(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.float().square().sum(), outputs.numel()


def _odd_batches(plan: str) -> bool:
    words = {"up": "colwise", "down": "rowwise"}
    engine = plait.parallelize(Odd(), f"{plan} precision=bf16", loss=_square, tensor_plan=words)
    samples = 4 + engine.data_rank
    batch = {"x": torch.ones(samples, 8) * engine.data_rank, "mask": torch.ones(samples) > 0}
    return engine.step(batch).skipped
