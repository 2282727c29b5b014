"""A plan is plain data: its text parses back, and an invalid one is refused with an error."""

import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import Grid, Plan
from plait.plan.collectives import ALGORITHMS
from plait.plan.key_conflicts import SCHEDULES
from plait.plan.plan import CHOICES, PRECISIONS, show_value

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPLIT = ("zb-h1", "zbv", "dualpipev")  # backwards in halves
REDUCTIONS = ["fp32", "bf16", "fp16", "int8", "powersgd", "powersgd:7"]


@st.composite
def plans(draw: Any) -> Plan:
    """Any plan that can be."""
    shard, replicas = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    zero = draw(st.integers(0, 3))
    precision = draw(st.sampled_from(PRECISIONS))
    exact = precision == "fp64"
    reduce = draw(st.sampled_from(["fp32"] if exact else REDUCTIONS))
    cols = draw(st.integers(1, 16))
    pp = draw(st.integers(1, 8))
    schedule = draw(st.sampled_from([*SCHEDULES, "file:mine.csv"]))
    chunks = draw(st.integers(0, 4)) if schedule in ("1f1b", "gpipe", "interleaved", "bfs") else 0
    staged = Plan(pp=pp, schedule=schedule, chunks=chunks).num_stages or draw(st.integers(1, 8))
    by_hand = draw(st.lists(st.integers(1, 99), min_size=staged, max_size=staged))
    reshard = draw(st.sampled_from(["use", "step"])) if zero == 3 else "use"
    return Plan(
        dp=shard * replicas,
        tp=(draw(st.integers(1, 4)), cols),
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        stages=",".join(map(str, by_hand)) if draw(st.booleans()) else "",
        sp=draw(st.booleans()) and cols > 1,
        zero=zero,
        shard=draw(st.sampled_from([0, shard])) if zero else 0,
        micro=draw(st.integers(1, 512)),
        accumulate=draw(
            st.sampled_from(["auto", "unsharded", "sharded"] if zero >= 2 else ["auto", "unsharded"])
        ),
        prefetch=draw(st.integers(0, 9)) if zero == 3 else 1,
        reshard=reshard,
        precision=precision,
        reduce=reduce,
        algorithm=draw(st.sampled_from(["auto", *ALGORITHMS] if reduce in ("fp32", "bf16") else ["auto"])),
        optim_dtype=draw(st.sampled_from(["fp32"] if exact else ["fp32", "bf16"])),
        base=draw(st.sampled_from(["none", "nf4", "int8"])) if reshard == "use" else "none",
        offload=draw(st.sampled_from(["none", "cpu", "disk"])),
        recompute=draw(st.sampled_from(["none", "full", "selective", "every=1", "every=12"])),
        compile=draw(st.booleans()) and schedule not in SPLIT,
    )


def possible(**values: Any) -> Plan | None:
    """The plan, or None where it is refused."""
    try:
        return Plan(**values)
    except PlanError:
        return None


@given(plans())
def test_the_text_of_a_plan_parses_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@given(plans(), st.randoms())
def test_the_order_of_words_does_not_matter(plan: Plan, random: Any) -> None:
    names = Plan.keys()
    words = [f"{key}={str(getattr(plan, key)).lower()}" for key in names]
    random.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan


@given(plans())
def test_the_text_names_dp_and_what_is_no_default(plan: Plan) -> None:
    named = {word.partition("=")[0] for word in str(plan).split()}
    default, names = Plan(), Plan.keys()
    assert named == {"dp"} | {key for key in names if getattr(plan, key) != getattr(default, key)}


LOCAL = {"local_steps": 8, "outer": "nesterov:0.7:0.9", "exchange": "int8", "exchange_parts": 2}


def test_every_key_takes_effect_on_the_value() -> None:
    text = (
        "dp=8 tp=2x4 pp=2 schedule=bfs chunks=3 stages=1,2,3,4,5,6 sp=true "
        "zero=3 shard=4 micro=4 accumulate=unsharded prefetch=2 reshard=step "
        "precision=bf16 reduce=bf16 algorithm=ring optim_dtype=bf16 offload=cpu "
        "recompute=every=2 compile=true sync_batchnorm=true deterministic=true "
        "router_balance=step"
    )
    plan = Plan.parse(text)
    assert plan == Plan(
        *(8, "2x4", 2, "bfs", 3, "1,2,3,4,5,6", True, 1, "auto", 1, "none", 3, 4, 4, "unsharded"),
        *(2, "step", "bf16", "bf16", "ring"),
        *("bf16", "none", "cpu", "every=2", True, True, False, True, "step"),
    )
    assert str(plan) == text
    of_servers = ("servers", "sync", "server")
    assert {word.partition("=")[0] for word in text.split()} == set(Plan.keys()) - {
        *("tf32", "cp", "cp_method", "ep", "capacity", "base"),
        *LOCAL,
        *of_servers,
    }
    assert Plan.parse("dp=3 servers=2 sync=stale:3") == Plan(dp=3, servers=2, sync="stale:3")
    assert Plan.parse("server=colocated") == Plan(server="colocated")
    assert Plan.parse("tf32=true") == Plan(tf32=True)
    assert Plan.parse("base=nf4") == Plan(base="nf4")
    assert Plan.parse("dp=4 ep=2 capacity=1.25") == Plan(dp=4, ep=2, capacity=1.25)
    text = "dp=2 local_steps=8 outer=nesterov:0.7:0.9 exchange=int8 exchange_parts=2"
    assert Plan.parse(text) == Plan(dp=2, **LOCAL)
    assert str(Plan(dp=2, **LOCAL)) == text
    assert str(Plan()) == "dp=1"


def test_the_docs_list_every_key_with_its_values_and_the_default_first() -> None:
    table = (DOCS / "recipes.md").read_text().partition("\n## plan\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert {key for key, _ in rows} == set(Plan.keys())
    for key, values in rows:
        words = re.findall(r"[^`, ]+", values)
        if key not in ("chunks", "stages"):  # by default those of the schedule, and by cost
            assert words[0] == show_value(key, getattr(Plan(), key)), key
        if key in CHOICES or key == "schedule":
            assert set(words) - {"file:PATH"} == set(CHOICES.get(key, SCHEDULES)), key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2 precison=bf16", ["unknown plan key 'precison'", "precision"]),
        ("dp", ["key=value", "'dp'"]),
        ("dp=2 dp=4", ["dp is given twice"]),
        ("pp=2 schedule=zvb", ["unknown schedule", "zbv"]),
        ("pp=2 schedule=zbv chunks=3", ["zbv", "chunks=3"]),
        ("pp=2 schedule=file:a.csv chunks=2", ["schedule file", "no chunks"]),
        ("pp=2 schedule=file:a,b.csv", ["file:a,b.csv", "rename the file"]),
        ("pp=2 stages=3,5,6", ["3 counts", "2 block counts"]),
        ("pp=2 stages=3;5", ["not a list of block counts", "stages=8,8,8,6"]),
        ("pp=2 schedule=inference", ["unknown schedule"]),
        (
            "schedule=zb-h1 compile=true",
            ["cannot be split", "schedule=zb-h1", "compile=false", "schedule=1f1b"],
        ),
        ("dp=zero", ["dp is not a valid degree", "dp=zero", "an integer"]),
        ("dp=0", ["dp=0", "1 or more, or auto"]),
        ("tp=auto", ["tp=auto"]),
        ("dp=auto shard=2", ["shard has no effect"]),
        ("dp=-1", ["dp=-1"]),
        ("micro=2.5", ["micro=2.5"]),
        ("dp=²", ["dp is not a valid degree"]),
        ("precision=bf61", ["precision=bf61", "fp64 or fp32 or bf16", "try     : precision=bf16"]),
        ("recompute=ful", ["recompute=ful", "none, full"]),
        ("zero=5", ["zero=5", "3 (+ parameters)", "try     : zero=3"]),
        ("recompute=every=0", ["recompute=every=0", "k from 1"]),
        ("recompute=every", ["recompute=every"]),
        ("xp=2", ["unknown plan key 'xp'", "tp"]),
        ("zero=3 gathered=step", ["unknown plan key 'gathered'", "try     : reshard=use or reshard=step"]),
        ("states=bf16", ["unknown plan key 'states'", "try     : optim_dtype=fp32 or optim_dtype=bf16"]),
        ("zero=2 accumulate=cut", ["unknown value for accumulate", "try     : accumulate=sharded"]),
        ("tp=0", ["tp is not a valid grid", "tp=0", "tp=4 or tp=2x4"]),
        ("tp=2x", ["tp=2x"]),
        ("tp=2x2x2", ["tp=2x2x2"]),
        ("tp=4x1 sp=true", ["tp=4x1 sp=true", "two tp columns", "tp=2 sp=true"]),
        ("compile=1", ["compile=1", "true or false"]),
        ("compile=True", ["compile=True", "true or false"]),
        ("offload=gpu", ["offload=gpu", "none or cpu or disk"]),
        (
            "dp=2 algorithm=rings",
            ["algorithm=rings", "auto or naive or ring or halving or tree or two-level"],
        ),
        (
            "algorithm=ring reduce=int8",
            ["cannot use a named", "algorithm=ring reduce=int8", "algorithm=ring reduce=bf16"],
        ),
        ("reduce=fp8", ["reduce=fp8", "fp32, bf16, fp16, int8, powersgd, powersgd:r or powersgd:r:s"]),
        ("reduce=powersgd:0", ["reduce=powersgd:0", "a rank r from 1"]),
        ("reduce=powersgd:", ["reduce=powersgd:"]),
        ("reduce=int8:4", ["reduce=int8:4"]),
        ("optim_dtype=fp16", ["optim_dtype=fp16", "fp32 or bf16"]),
        ("zero=2 reshard=always", ["reshard=always", "use or step"]),
        ("zero=2 accumulate=half", ["accumulate=half", "auto or unsharded or sharded"]),
        ("chunks=99999999999", ["chunks is not a valid degree", "at most 999999"]),
        ("micro=1000000", ["at most 999999"]),
        (f"dp={'9' * 5000}", ["at most 999999"]),
        (f"tp={'9' * 5000}", ["tp is not a valid grid"]),
        (f"pp=1 stages={'9' * 5000}", ["not a list of block counts"]),
        (f"recompute=every={'9' * 5000}", ["k from 1"]),
    ],
)
def test_invalid_plans_are_refused_with_an_error(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [{"dp": "2"}, {"dp": 10**9}, {"dp": 2.0}, {"tp": None}, {"schedule": 5}, {"stages": 3}, {"sp": 1}],
    ids=str,
)
def test_values_of_other_types_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(values))):
        Plan(**values)


@pytest.mark.parametrize("text", [None, 5, b"dp=1", ["dp=1"]])
def test_a_plan_is_parsed_from_text_only(text: Any) -> None:
    with pytest.raises(PlanError, match="a plan is text"):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2 zero=4", ["unknown ZeRO stage", "zero=4", "3 (+ parameters)"]),
        ("dp=2 zero=-1", ["zero is not a valid stage", "zero=-1", "0, 1, 2 or 3"]),
        ("dp=2 zero=two", ["zero is not a valid stage", "zero=two", "0, 1, 2 or 3"]),
        ("dp=4 shard=2", ["shard has no effect", "zero=0 shard=2", "zero=1 shard=2"]),
        ("dp=6 zero=1 shard=4", ["shard does not divide dp", "dp=6 shard=4", "divisor of 6", "shard=3"]),
        ("dp=2 zero=1 shard=4", ["shard does not divide dp", "shard=2"]),
        ("dp=1 zero=1 shard=2", ["shard does not divide dp", "no shard"]),
        (
            "dp=2 zero=1 accumulate=sharded",
            ["needs sharded gradients", "zero=1 accumulate=sharded", "zero=2"],
        ),
        ("dp=2 accumulate=sharded", ["needs sharded gradients", "zero=0 accumulate=sharded", "zero=2"]),
        ("dp=2 zero=2 prefetch=2", ["prefetch has an effect only", "zero=2 prefetch=2", "zero=3 prefetch=2"]),
        ("dp=2 zero=1 prefetch=0", ["prefetch has an effect only", "zero=3 prefetch=0"]),
        ("dp=2 zero=3 prefetch=-1", ["prefetch is not a valid number of units", "0 or more"]),
        ("dp=2 zero=2 reshard=step", ["reshard has an effect only", "zero=3 reshard=step"]),
        ("dp=2 precision=fp64 reduce=bf16", ["fp64 cannot be combined", "precision=fp64 reduce=bf16"]),
        ("dp=2 precision=fp64 reduce=fp16", ["fp64 cannot be combined", "precision=bf16 reduce=fp16"]),
        ("dp=2 precision=fp64 reduce=int8", ["fp64 cannot be combined", "precision=bf16 reduce=int8"]),
        (
            "dp=2 precision=fp64 reduce=powersgd:2",
            ["fp64 cannot be combined", "precision=fp64 reduce=powersgd:2"],
        ),
        (
            "dp=2 precision=fp64 optim_dtype=bf16",
            ["fp64 cannot be combined", "precision=bf16 optim_dtype=bf16"],
        ),
    ],
)
def test_plans_that_zero_does_not_support_are_refused_with_one_that_works(
    text: str, words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n  given   : " in message
    assert "\n  expected: " in message or "\n  try     : " in message


@given(plans(), st.integers(1, 64))
def test_shard_must_divide_dp(plan: Plan, shard: int) -> None:
    assume(plan.zero)
    found = possible(dp=plan.dp, zero=plan.zero, shard=shard)
    assert (found is None) == (plan.dp % shard != 0)


@given(plans())
def test_state_sharded_by_a_zero_stage_is_sharded_over_shard_and_replicated_elsewhere(plan: Plan) -> None:
    grid = Grid.from_plan(plan)
    assert grid.num_ranks == plan.num_ranks == plan.pp * plan.dp * plan.rows * plan.cols
    expected = 1 if not plan.zero else plan.shard or plan.dp
    assert grid.degree("shard") == plan.shard_degree == expected
    assert grid.degree("replicate") * expected == plan.dp


@pytest.mark.parametrize(
    ("text", "whole", "stay"),
    [
        ("", True, True),
        ("zero=1", True, True),
        ("zero=1 micro=4", True, True),
        ("zero=2", False, False),
        ("zero=2 micro=4", False, False),
        ("zero=2 accumulate=unsharded", True, False),
        ("zero=2 accumulate=unsharded micro=4", True, True),
        ("zero=3 accumulate=unsharded micro=4", True, True),
        ("zero=3 accumulate=sharded micro=4", False, False),
    ],
)
def test_gradients_are_whole_as_long_as_the_plan_says(text: str, whole: bool, stay: bool) -> None:
    plan = Plan.parse(f"dp=2 {text}")
    assert (plan.accumulates_full, plan.keeps_full_grads) == (whole, stay)


def test_ranks_that_do_not_fit_are_refused_with_a_plan_that_would() -> None:
    Plan(dp=4).check_ranks(4)
    with pytest.raises(PlanError, match="2 ranks of this run") as caught:
        Plan(dp=4, precision="bf16").check_ranks(2)
    assert "dp=2 precision=bf16" in str(caught.value)
    assert "--nproc-per-node 4" in str(caught.value)


@given(plans(), st.integers(1, 64))
def test_the_plan_suggested_for_the_given_ranks_is_valid(plan: Plan, num_ranks: int) -> None:
    assume(num_ranks != plan.num_ranks)
    with pytest.raises(PlanError) as caught:
        plan.check_ranks(num_ranks)
    offered = Plan.parse(str(caught.value.hint).split('"')[1])
    offered.check_ranks(num_ranks)
    has_pipeline = num_ranks % plan.pp == 0
    assert offered.pp == (plan.pp if has_pipeline else math.gcd(num_ranks, plan.pp))
    if has_pipeline:
        assert (offered.schedule, offered.stages) == (plan.schedule, plan.stages)
    left = num_ranks // offered.pp
    keeps = left % (plan.rows * plan.cols) == 0  # its grid fits
    assert offered.tp == (plan.tp if keeps else str(math.gcd(left, plan.rows * plan.cols)))
    assert offered.sp == (plan.sp and offered.cols > 1)
    assert offered.shard in (plan.shard, 0)
    ranks: dict[str, Any] = {"dp": 1, "tp": "1", "sp": False, "shard": 0}
    pipeline: dict[str, Any] = {"pp": 1, "schedule": "1f1b", "chunks": 0, "stages": ""}
    assert replace(offered, **ranks, **pipeline) == replace(plan, **ranks, **pipeline)


def test_commas_between_words_are_taken_for_spaces() -> None:
    assert Plan.parse("dp=2, micro=4,precision=bf16") == Plan(dp=2, micro=4, precision="bf16")


def test_a_batch_that_does_not_divide_is_refused_with_one_that_would() -> None:
    assert Plan(dp=2, micro=3).check_batch(12) == 2
    for batch in (0, 5, 13):
        with pytest.raises(PlanError, match="does not divide") as caught:
            Plan(dp=2, micro=3).check_batch(batch)
        assert Plan(dp=2, micro=3).check_batch(int(str(caught.value.hint).removeprefix("batch="))) >= 1


@pytest.mark.parametrize(
    ("text", "ranks", "becomes"),
    [
        ("dp=auto", 1, "dp=1"),
        ("dp=auto", 6, "dp=6"),
        ("dp=auto tp=2 pp=2", 12, "dp=3 tp=2 pp=2"),
        ("dp=auto tp=2x2 zero=3 shard=2", 16, "dp=4 tp=2x2 zero=3 shard=2"),
        ("dp=4 micro=2", 4, "dp=4 micro=2"),
        ("dp=4 micro=2", 8, "dp=4 micro=2"),
    ],
)
def test_dp_auto_fills_what_the_rest_of_the_plan_leaves(text: str, ranks: int, becomes: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == text
    assert Plan.parse(str(plan)) == plan
    resolved = plan.resolved(ranks)
    assert str(resolved) == becomes
    assert resolved.resolved(ranks) == resolved
    if plan.dp == 0:
        assert resolved.num_ranks == ranks
        assert ranks % plan.min_ranks == 0


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("dp=auto tp=2", 3, ["on 3 ranks", "a multiple of 2 ranks", "2 or 4 ranks"]),
        ("dp=auto tp=2 pp=2", 1, ["on 1 rank\n", "a multiple of 4 ranks", "try     : 4 ranks"]),
        ("dp=auto zero=1 shard=4", 6, ["a multiple of 4 ranks", "4 or 8 ranks"]),
    ],
)
def test_rank_counts_that_dp_auto_cannot_fill_are_refused_with_counts_that_work(
    text: str, ranks: int, words: list[str]
) -> None:
    with pytest.raises(PlanError, match="dp=auto does not fit the number of ranks") as caught:
        Plan.parse(text).resolved(ranks)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_functions_that_need_a_rank_count_refuse_dp_auto() -> None:
    plan = Plan.parse("dp=auto tp=2 zero=1")
    for ask in (lambda: plan.num_ranks, lambda: plan.check_batch(8), lambda: plan.shard_degree):
        with pytest.raises(PlanError, match="number of ranks is known") as caught:
            ask()
        assert '"dp=2 tp=2 zero=1"' in str(caught.value.hint)


def test_a_changed_plan_is_the_plan_with_these_keys_and_the_same_errors() -> None:
    plan = Plan.parse("dp=8 tp=2 pp=4 zero=3 micro=8 precision=bf16")
    for keys in ({"zero": 1, "shard": 4}, {"tp": (2, 2), "sp": True}, {"micro": 1, "schedule": "zbv"}, {}):
        hash(plan)  # which a changed plan must not keep
        changed = plan.changed(**keys)
        assert changed == replace(plan, **keys)
        assert str(changed) == str(replace(plan, **keys))
        assert hash(changed) == hash(replace(plan, **keys))
    for keys in ({"zero": 0, "shard": 4}, {"micro": 0}, {"schedule": "zbv", "chunks": 3}, {"offload": "gpu"}):
        with pytest.raises(PlanError) as expected:
            replace(plan, **keys)
        with pytest.raises(PlanError) as error:
            plan.changed(**keys)
        assert str(error.value) == str(expected.value)


def test_a_plan_keeps_its_hash_in_one_process_only() -> None:
    """Hashes of texts differ between processes."""
    plan = Plan.parse("dp=8 precision=bf16")
    before = pickle.dumps(plan)
    assert {plan: 1}[Plan.parse("dp=8 precision=bf16")] == 1
    assert pickle.dumps(plan) == before
    assert pickle.loads(before) == plan
