"""Ranks that hold the same weights compare them: equal ones pass, one bit on one rank is found and named."""

import warnings
from contextlib import nullcontext

import pytest
import torch

import plait
from plait.errors import RunError
from plait.plan import subtract_traffic
from support import hf_models, programs
from support.pool import Pool

PLANS = [  # which messages a look takes: sums over ranges, and one over all ranks
    ("dp=2", 2, "llama", 1),
    ("dp=4 zero=1 shard=2 precision=bf16", 4, "tied_llama", 2),
    ("dp=4 zero=3 shard=2 precision=bf16", 4, "tied_llama", 2),
    ("dp=2 zero=3", 2, "llama", 0),
    ("dp=2 ep=2", 2, "mixtral", 1),
    ("dp=4 ep=2 zero=1 shard=2 precision=bf16", 4, "mixtral", 2),
    ("dp=4 ep=2 zero=3", 4, "mixtral", 0),
    ("tp=2", 2, "one_kv_llama", 1),
    ("tp=3 sp=true", 3, "biased_llama", 1),
    ("tp=2x2 dp=2 zero=3 shard=1 precision=bf16", 8, "qwen3", 1),
    ("dp=2 zero=3 offload=cpu tp=2", 4, "llama", 2),
    ("pp=2 dp=2 tp=2 zero=1", 8, "tied_llama", 2),
    ("pp=2 schedule=zbv micro=2", 2, "tied_llama", 1),
    ("dp=2 pp=2 local_steps=2 outer=nesterov:0.7:0.9", 4, "tied_llama", 1),
]


def _trained(plan: str, family: str) -> plait.Engine:
    model = hf_models.model_of(family, exact=False, num_hidden_layers=4)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, clip_norm=programs.CLIP)
    for batch in programs.batches(2, sequences=16):
        assert not engine.step(programs.share_of(batch, engine)).skipped
    return engine


def _messages_of_a_look(plan: str, family: str) -> int:
    engine = _trained(plan, family)
    before = engine.world.comm_log.read()
    engine.check_replicas()
    said = subtract_traffic(before, engine.world.comm_log.read())
    return sum(tally.count for tally in said.values())


@pytest.mark.parametrize(("plan", "ranks", "family", "messages"), PLANS)
def test_equal_replicas_pass_with_the_expected_messages(
    pool: Pool, plan: str, ranks: int, family: str, messages: int
) -> None:
    assert pool.run(_messages_of_a_look, ranks, plan, family) == [messages] * ranks


def _one_bit_off(
    plan: str,
    family: str,
    name: str,
    culprit: int,
    *,
    of: str = "weights",
    is_deaf: bool = False,
    expects_equal_grids: bool = True,
) -> str:
    """The ranks' errors when one has changed the last bit of the last element that it has of a parameter, on
    the last of its stages that have it."""
    engine = _trained(plan, family)
    if engine.world.rank == culprit:
        units = [u for u in engine._parts.sharded.units if any(p.name == name for p in u.layout.params)]
        flats = {"weights": units[-1].shard, "master weights": units[-1].master}
        for kind, states in engine._parts.islands.outer.common.items():
            flats[kind] = next(state for unit, state in states if unit is units[-1])
        flat = flats[of]
        last = units[-1].layout.overlaps(units[-1].start, units[-1].stop)
        at = next(o.at + o.stop - o.start for o in last if o.shard.name == name)
        flat[at - 1 : at].view({2: torch.int16, 4: torch.int32}[flat.itemsize]).bitwise_xor_(1)
    engine.world.barrier()  # memory may be shared
    engine._parts.replicas.expects_equal_grids = expects_equal_grids
    try:
        with programs.muted("all_reduce") if is_deaf else nullcontext():
            engine.check_replicas()
    except RunError as error:
        return str(error)
    return "nothing"


NORM, TABLE = "model.layers.3.input_layernorm.weight", "model.embed_tokens.weight"
UP, KEYS = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"
BIAS = "model.layers.2.self_attn.q_proj.bias"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("plan", "ranks", "transport", "family", "name", "culprit", "found"),
    [
        ("dp=2", 2, "host", "llama", UP, 1, "rank 1 (replicate=1) than on rank 0 (replicate=0)"),
        ("dp=3", 3, "host", "llama", NORM, 0, "rank 0 (replicate=0) than on ranks 1, 2"),
        ("dp=3 zero=1", 3, "gloo", "llama", UP, 2, "rank 2 (shard=2) than on ranks 0, 1"),
        ("dp=4 zero=3 shard=2", 4, "host", "tied_llama", UP, 3, "ranks 2, 3 than on ranks 0, 1"),
        ("dp=4 ep=2", 4, "host", "mixtral", EXPERTS, 3, "rank 3 (replicate=1 ep_replicate=1) than on"),
        (
            "dp=4 ep=2 zero=3 shard=2",
            4,
            "gloo",
            "mixtral",
            EXPERTS,
            2,
            "rank 2 (replicate=1 ep_shard=0) than on",
        ),
        ("dp=2 ep=2", 2, "host", "mixtral", NORM, 1, "rank 1 (ep_replicate=1) than on rank 0"),
        ("tp=3 sp=true", 3, "host", "biased_llama", NORM, 2, "rank 2 (col=2) than on ranks 0, 1"),
        ("tp=2", 2, "host", "one_kv_llama", KEYS, 1, "rank 1 (col=1) than on rank 0 (col=0)"),
        ("tp=2x1", 2, "host", "biased_llama", BIAS, 1, "rank 1 (row=1) than on rank 0 (row=0)"),
        ("pp=2", 2, "host", "tied_llama", TABLE, 1, "rank 1 (pp=1) than on rank 0 (pp=0)"),
        (
            "pp=2 schedule=zbv micro=2",
            2,
            "host",
            "tied_llama",
            TABLE,
            0,
            "two stages of rank 0 (pp=0)",
        ),
        pytest.param(
            "pp=2 dp=2 tp=2",
            8,
            "host",
            "tied_llama",
            NORM,
            5,
            "rank 5 (pp=1 replicate=0 col=1) than on",
            marks=pytest.mark.quick,
        ),
    ],
)
def test_one_bit_on_one_rank_is_found_and_named_on_all(
    pool: Pool, plan: str, ranks: int, transport: str, family: str, name: str, culprit: int, found: str
) -> None:
    said = pool.over(transport).run(_one_bit_off, ranks, plan, family, name, culprit)
    assert said == [said[0]] * ranks
    assert f"copies of {name} are no longer the same\n" in said[0]
    assert f"given   : weights: different bits on {found}" in said[0]


DILOCO = "local_steps=2 outer=nesterov:0.7:0.9"


@pytest.mark.parametrize(
    ("plan", "ranks", "of", "found"),
    [
        ("dp=2 precision=bf16", 2, "master weights", "rank 1 (replicate=1)"),
        (f"dp=2 {DILOCO}", 2, "global weights", "rank 1 (replicate=1)"),
        (f"dp=4 zero=1 shard=2 {DILOCO}", 4, "outer momentum", "ranks 2, 3 than on ranks 0, 1"),
        (f"dp=4 zero=1 shard=2 {DILOCO}", 4, "weights", "rank 3 (replicate=1 shard=1) than on rank 2"),
    ],
)
def test_a_bit_of_a_state_or_inside_an_island_is_found_before_all_weights_differ(
    pool: Pool, plan: str, ranks: int, of: str, found: str
) -> None:
    said = pool.over("gloo").run(_one_bit_off, ranks, plan, "llama", UP, ranks - 1, of=of)
    assert said == [said[0]] * ranks
    assert f"given   : {of}: different bits on {found}" in said[0]


@pytest.mark.parametrize(
    ("plan", "ranks", "is_error"),
    [("tp=2", 2, False), ("dp=2 tp=2", 4, True), ("dp=2 zero=3 tp=2", 4, False)],
)
def test_on_gpus_copies_may_drift_over_a_tensor_parallel_grid_only(
    pool: Pool, plan: str, ranks: int, is_error: bool
) -> None:
    said = pool.run(_drift_on_gpus, ranks, plan)
    if is_error:
        assert all("are no longer the same" in error for error, _ in said)
        return
    assert [error for error, _ in said] == ["nothing"] * ranks
    assert [len(texts) for _, texts in said] == [1] + [0] * (ranks - 1)
    assert f"copies of {NORM} differ in bits between ranks of a tensor-parallel grid" in said[0][1][0]


def _drift_on_gpus(plan: str) -> tuple[str, list[str]]:
    """The error, and the warnings, with the tolerance of GPUs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = _one_bit_off(plan, "llama", NORM, 1, expects_equal_grids=False)
    return error, [str(w.message) for w in caught if "differ in bits" in str(w.message)]


def test_without_its_message_no_rank_finds_anything(pool: Pool) -> None:
    assert pool.run(_one_bit_off, 2, "dp=2", "llama", UP, 1, is_deaf=True) == ["nothing"] * 2


def _drifted(plan: str, silenced: str) -> str:
    """After steps in which ranks did not receive each other's gradients, of parameters that many have."""
    engine = programs.engine_of(programs.Task(programs.llama), plan)
    with programs.muted(silenced):
        for batch in programs.batches(2):
            engine.step(programs.share_of(batch, engine))
    with pytest.raises(RunError) as found:
        engine.check_replicas()
    return str(found.value)


@pytest.mark.parametrize(
    ("plan", "ranks", "silenced"),
    [
        ("dp=2 precision=fp64", 2, "start_all_reduce"),
        ("dp=4 zero=2 shard=2 precision=fp64", 4, "start_all_reduce"),
        ("tp=2 sp=true precision=fp64", 2, "all_reduce"),
    ],
)
def test_replicas_that_drift_apart_are_found(pool: Pool, plan: str, ranks: int, silenced: str) -> None:
    said = pool.run(_drifted, ranks, plan, silenced)
    assert said == [said[0]] * ranks
    assert "are no longer the same" in said[0]
    assert "other parameters" in said[0]
