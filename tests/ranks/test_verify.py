"""Findings of `plait verify`: none where numbers are right; else the layer and the ranks."""

import pytest

from plait.plan import Plan
from plait.verify import ModelSource, Outcome, Verdict
from support import verify_models
from support.pool import Pool, RankError
from support.verify_models import KINDS


def verdict_of(
    pool: Pool, num_ranks: int, source: ModelSource, plan: str, *more: object, over: str = "host"
) -> Verdict:
    found = pool.over(over).run(verify_models.verify_on_ranks, num_ranks, source, plan, *more)
    assert all(verdict is None for verdict in found[1:]), "the verdict is the first rank's"
    verdict = found[0]
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [(1, "dp=1"), (4, "pp=2 dp=2 zero=2 micro=2"), (4, "dp=2 zero=3 tp=2 sp=true recompute=full")],
)
def test_a_right_plan_is_found_right(pool: Pool, num_ranks: int, plan: str) -> None:
    verdict = verdict_of(pool, num_ranks, verify_models.TIED_LLAMA, plan)
    assert verdict.outcome is Outcome.SAME
    assert 0 < verdict.max_error < 1e-12
    assert len(verdict.steps) == 3
    assert bool(verdict.traffic) == (num_ranks > 1)


@pytest.mark.parametrize("build", ["pair", "with_values", "llama", "of_numbers", "random_features"])
def test_models_of_a_users_own_are_verified(pool: Pool, build: str) -> None:
    verdict = verdict_of(
        pool, 4, ModelSource(build=f"support.verify_models:{build}"), "pp=2 dp=2 zero=3 micro=2"
    )
    assert verdict.outcome is Outcome.SAME
    assert verdict.max_error < 1e-12


@pytest.mark.parametrize(
    ("build", "plans"),
    [
        ("bert", ["dp=2 zero=2 micro=2", "pp=2 micro=2", "pp=3 stages=0,2,0 micro=2"]),
        ("roberta", ["dp=2 zero=3", "pp=2 micro=2"]),
        ("modernbert", ["dp=2 zero=1 micro=2", "pp=2 micro=2 zero=1"]),
        ("distilbert", ["dp=2 zero=3 micro=2 recompute=full", "pp=2 micro=2"]),
        ("t5", ["dp=2 zero=3 micro=2", "pp=3 stages=0,4,0 micro=2"]),
        ("bart", ["dp=2 zero=2", "pp=2 micro=2", "pp=2 stages=0,1,3,0 schedule=zbv micro=2"]),
        ("mbart", ["dp=2 zero=3"]),
        ("marian", ["dp=2 zero=1 micro=2"]),
    ],
)
def test_masked_and_sequence_to_sequence_models_train_on_their_own_loss(
    pool: Pool, build: str, plans: list[str]
) -> None:
    source = ModelSource(build=f"support.verify_models:{build}")
    for plan in plans:
        verdict = verdict_of(pool, Plan.parse(plan).num_ranks, source, plan)
        assert (verdict.outcome, verdict.message) == (Outcome.SAME, ""), plan
        assert verdict.max_error < 1e-9, plan


_SAMPLE = [
    ("t5", "pp=2 micro=2"),
    ("bart", "tp=2"),
    ("qwen2_vl", "pp=2"),
    ("plain_resnet", "dp=2 zero=3"),
    ("encoder", "tp=2"),
]
_PLANS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2", "pp=2 dp=2 tp=2 zero=1")
_ALL = [pytest.param(kind, plan, marks=pytest.mark.sweep) for kind in KINDS for plan in _PLANS]
_REFUSED = {("albert", "pp"), *(("lstm", way) for way in ("tp", "pp"))}
_REFUSED |= {(kind, "tp") for kind in ("resnet", "plain_resnet", "unet")}


@pytest.mark.parametrize(("kind", "plan"), [*_SAMPLE, *_ALL])
def test_models_of_other_kinds_are_the_same_or_refused(pool: Pool, kind: str, plan: str) -> None:
    """In `make test` a sample of the table in docs/architectures.md."""
    source, full = verify_models.other_kind(kind), f"{plan} {KINDS[kind].options}"
    verdict = verdict_of(pool, Plan.parse(plan).num_ranks, source, full)
    is_refused = any((kind, way) in _REFUSED for way in ("tp", "pp") if f"{way}=" in plan)
    assert verdict.outcome is (Outcome.REFUSED if is_refused else Outcome.SAME), verdict.message
    assert is_refused or verdict.max_error < 1e-9


@pytest.mark.parametrize("build", ["batch_norm", "contrastive"])
@pytest.mark.parametrize("plan", ["dp=2", "micro=2", "dp=2 micro=2 zero=1"])
def test_numbers_that_depend_on_the_division_of_the_batch_are_reported_as_such(
    pool: Pool, build: str, plan: str
) -> None:
    source = ModelSource(build=f"support.verify_models:{build}")
    ranks = 2 if "dp" in plan else 1
    assert verdict_of(pool, 1, source, "dp=1").outcome is Outcome.SAME
    verdict = verdict_of(pool, ranks, source, plan)
    assert verdict.outcome is Outcome.DIFFERS
    assert "numbers depend on how the batch is divided: batch statistics" in verdict.message
    wrong = verdict_of(pool, 2, source, "dp=2 zero=1", "all replicas")
    assert (wrong.outcome, wrong.message) == (Outcome.DIFFERS, "")


def test_buffers_and_evaluation_are_compared_too(pool: Pool) -> None:
    source = ModelSource(build="support.verify_models:batch_norm")
    assert verdict_of(pool, 1, source, "recompute=full").outcome is Outcome.SAME
    verdict = verdict_of(pool, 1, source, "recompute=full", "recomputation")
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.worst_parameters[0].name.startswith("blocks.")
    assert "num_batches_tracked" in verdict.worst_parameters[0].name
    verdict = verdict_of(pool, 2, verify_models.LLAMA, "dp=2", "evaluation")
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.evaluation is not None
    assert verdict.evaluation[0] == pytest.approx(2 * verdict.evaluation[1])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_narrow_numbers_may_differ_by_their_rounding_and_no_more(pool: Pool, dtype: str) -> None:
    right = verdict_of(pool, 4, verify_models.LLAMA, "dp=2 tp=2", "", dtype)
    assert right.outcome is Outcome.SAME
    assert right.max_error > 1e-9
    wrong = verdict_of(pool, 4, verify_models.LLAMA, "dp=2 tp=2 sp=true", "parts", dtype)
    assert wrong.outcome is Outcome.DIFFERS
    assert is_of_the_deaf_block(wrong)


def is_of_the_deaf_block(verdict: Verdict) -> bool:
    return verdict.worst_parameters[0].name.startswith(verify_models.MUTED_LAYER)


@pytest.mark.parametrize(
    ("num_ranks", "plan", "mutation", "over"),
    [
        (2, "dp=2 zero=1", "replicas", "host"),
        (2, "dp=2 zero=3", "parameters", "gloo"),
        pytest.param(2, "tp=2 sp=true", "parts", "host", marks=pytest.mark.quick),
        (4, "pp=2 tp=2 sp=true", "parts", "host"),
        (8, "pp=2 dp=2 tp=2 zero=2", "replicas", "host"),
    ],
)
def test_without_the_messages_of_a_block_its_parameters_are_named(
    pool: Pool, num_ranks: int, plan: str, mutation: str, over: str
) -> None:
    verdict = verdict_of(pool, num_ranks, verify_models.LLAMA, f"{plan} micro=1", mutation, over=over)
    assert verdict.outcome is Outcome.DIFFERS
    assert is_of_the_deaf_block(verdict), verdict.worst_parameters
    assert verdict.worst_parameters[0].ranks


def test_tied_weights_that_are_not_added_up_over_stages_are_named(pool: Pool) -> None:
    verdict = verdict_of(pool, 2, verify_models.TIED_LLAMA, "pp=2 micro=2", "tied")
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.worst_parameters[0].name == "model.embed_tokens.weight"


def test_ranks_are_named_by_the_axis_on_which_they_are_off(pool: Pool) -> None:
    verdict = verdict_of(pool, 4, verify_models.LLAMA, "dp=2 tp=2 zero=1", "one column")
    assert verdict.outcome is Outcome.DIFFERS
    cut = next(off for off in verdict.worst_parameters if off.name.endswith("proj.weight"))
    assert cut.name.startswith(verify_models.MUTED_LAYER)
    assert cut.ranks == "col=1"


def test_a_model_that_is_another_at_each_build_has_the_first_ranks_weights(pool: Pool) -> None:
    source = ModelSource(build="support.verify_models:of_every_build_another")
    assert verdict_of(pool, 2, source, "dp=2").outcome is Outcome.SAME
    with pytest.raises(RankError, match="initial weights depend on the plan"):
        pool.run(verify_models.verify_twice, 1, source, "dp=1")


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [
        (2, "dp=2 local_steps=1 outer=nesterov:0.7:0.9"),
        (2, "dp=2 local_steps=2"),
        (4, "dp=4 zero=3 shard=2 micro=2 local_steps=3 outer=nesterov:0.7:0.9"),
        (4, "dp=2 tp=2 local_steps=2 outer=nesterov:0.7:0.9"),
    ],
)
def test_islands_are_compared_with_a_loop_of_programs_that_exchange(
    pool: Pool, num_ranks: int, plan: str
) -> None:
    verdict = verdict_of(pool, num_ranks, verify_models.TIED_LLAMA, plan)
    assert verdict.outcome is Outcome.SAME, verdict
    assert 0 < verdict.max_error < 1e-12
    assert len(verdict.steps) == {1: 3, 2: 4, 3: 6}[Plan.parse(plan).local_steps]


def test_islands_that_do_not_exchange_are_found(pool: Pool) -> None:
    verdict = verdict_of(pool, 2, verify_models.TIED_LLAMA, "dp=2 local_steps=2", "exchange")
    assert verdict.outcome is Outcome.DIFFERS
    assert len(verdict.steps) == 3, "the step after the first exchange"


def test_buffers_of_islands_become_their_mean(pool: Pool) -> None:
    with_batch_norm = ModelSource(build="support.verify_models:batch_norm")
    assert verdict_of(pool, 2, with_batch_norm, "dp=2 local_steps=2").outcome is Outcome.SAME
