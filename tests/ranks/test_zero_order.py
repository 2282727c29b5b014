"""Ranks that do not do the same: blocks skipped on some of them, gradients that come late, twice or unasked.

At stage 3 these decide in which order ranks gather and reduce; none of them may hang or change a number.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import ModelError
from plait.models import causal_lm_on_meta
from plait.parallel.zero.grad_reduce import GradReducer
from support import edge_case_models, programs
from support.edge_case_models import Block, Stack, built
from support.pool import Pool, PoolOver
from support.programs import Task


@pytest.fixture(params=["host", "gloo"])
def pool(request: pytest.FixtureRequest, workers: Pool) -> PoolOver:
    """Both ways: at stage 3 parameters are memory that ranks share, or are gathered."""
    return workers.over(request.param)


class Skips(Stack):
    """A stack that leaves out one block, for some samples."""

    left_out = 1

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for number, block in enumerate(self.blocks):
            if number != self.left_out or int(input_ids[0, 0]) % 2 == 0:
                x = block(x)
        return self.head(self.norm(x))


class SkipsDeep(Skips):
    left_out = 9


class Backwards(Stack):
    """Registered in one order, run in the other."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Reentrant(Stack):
    """A block used twice, each time in a reentrant checkpoint: autograd gives its gradient twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.head(self.norm(x))


def skips(on_meta: bool = False) -> nn.Module:
    return built(lambda: Skips([Block(8) for _ in range(4)]), on_meta)


def skips_deep(on_meta: bool = False) -> nn.Module:
    return built(lambda: SkipsDeep([Block(8) for _ in range(12)]), on_meta)


def backwards(on_meta: bool = False) -> nn.Module:
    return built(lambda: Backwards([Block(8) for _ in range(10)]), on_meta)


def reentrant(on_meta: bool = False) -> nn.Module:
    return built(lambda: Reentrant([Block(8)]), on_meta)


def deep_tied(on_meta: bool = True) -> nn.Module:
    """Nine layers between the two uses of the embedding."""
    config = {**programs.tied_llama().config.to_dict(), "num_hidden_layers": 9}
    model: Any = causal_lm_on_meta(config)
    if not on_meta:
        model = type(model)(model.config)
    return programs.with_exact_norms(model)


def check(pool: Pool, build: Any, plan: str, ranks: int, micro: int = 1) -> None:
    ours = pool.run(programs.train, ranks, build, f"{plan} precision=fp64")[0]
    programs.assert_same(ours, programs.one_process(build, ours.first_weights, micros=ranks * micro))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_block_that_one_rank_skips_causes_no_deadlock(pool: Pool, prefetch: int) -> None:
    check(pool, skips_deep, f"dp=2 zero=3 prefetch={prefetch}", 2)
    check(pool, skips_deep, f"dp=3 zero=3 prefetch={prefetch} reshard=step", 3)


@pytest.mark.parametrize(
    "plan", ["dp=4 zero=3 shard=2", "dp=2 zero=3 shard=1 offload=cpu", "dp=4 zero=1 shard=2"]
)
def test_replicas_of_which_some_skip_a_block_stay_the_same(pool: Pool, plan: str) -> None:
    check(pool, skips, plan, int(plan[3]))


@pytest.mark.parametrize(
    "words", ["", "accumulate=unsharded", "accumulate=unsharded reshard=step", "prefetch=0"]
)
@pytest.mark.parametrize("build", [backwards, deep_tied])
def test_gradients_that_come_long_after_a_units_last_use_are_counted(
    pool: Pool, build: Any, words: str
) -> None:
    check(pool, build, f"dp=2 zero=3 micro=2 {words}", 2, micro=2)


@pytest.mark.parametrize("words", ["", "offload=cpu"])
def test_late_gradients_are_added_to_sums_over_replicas(pool: Pool, words: str) -> None:
    check(pool, backwards, f"dp=4 shard=2 zero=3 {words}", 4)


def _sums_twice(plan: str) -> Any:
    """A training in which every step looks for late gradients and finds none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradReducer, "num_late", 1)
        return programs.train(programs.tied_llama, plan)


def test_sums_over_stages_and_replicas_can_be_taken_again(pool: Pool) -> None:
    plan = "pp=2 dp=2 zero=3 shard=1 micro=2 precision=fp64"
    ours = pool.run(_sums_twice, 4, plan)[0]
    programs.assert_same(ours, programs.one_process(programs.tied_llama, ours.first_weights, micros=4))


def _refused_twice(plan: str) -> str:
    with pytest.raises(ModelError) as caught:
        programs.train(reentrant, plan)
    return str(caught.value)


@pytest.mark.parametrize("words", ["", "zero=1", "zero=2", "zero=3"])
def test_two_gradients_in_one_backward_are_refused(pool: Pool, words: str) -> None:
    for message in pool.run(_refused_twice, 2, f"dp=2 {words} precision=fp64"):
        assert "two gradients in one backward" in message


def _stray(plan: str) -> Any:
    engine = programs.engine_of(Task(edge_case_models.uneven), plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    with pytest.raises(ModelError, match="outside the engine's backward"):
        engine.model(batch["input_ids"]).square().sum().backward()
    spoilt = engine.step(batch)
    fresh = programs.engine_of(Task(edge_case_models.uneven), plan)
    return spoilt == fresh.step(batch)


@pytest.mark.parametrize("words", ["", "zero=2", "zero=3"])
def test_a_backward_of_the_users_own_reaches_no_step(pool: Pool, words: str) -> None:
    assert pool.run(_stray, 2, f"dp=2 {words} precision=fp32") == [True, True]


def _evaluates_unevenly(plan: str) -> Any:
    engine = programs.engine_of(Task(edge_case_models.uneven), plan)
    batch = programs.batches(1)[0]
    size = 5 if engine.data_rank == 0 else 2
    result = engine.evaluate({key: value[:size] for key, value in batch.items()})
    return result.num_tokens, engine.step(programs.share_of(batch, engine)).skipped


@pytest.mark.parametrize("words", ["zero=1", "zero=3", "zero=3 reshard=step"])
def test_ranks_may_evaluate_shares_of_other_sizes(pool: Pool, words: str) -> None:
    plain = pool.run(_evaluates_unevenly, 2, "dp=2 micro=3 precision=fp64")
    assert pool.run(_evaluates_unevenly, 2, f"dp=2 micro=3 {words} precision=fp64") == plain


def _decays_in_its_loss(plan: str) -> Any:
    model = edge_case_models.uneven()

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = programs.summed_loss(outputs, batch)
        return total + count * 1e-4 * sum(p.square().sum() for p in model.parameters()), count

    engine = plait.parallelize(model, plan, loss=loss)
    return [engine.step(programs.share_of(batch, engine)).loss for batch in programs.batches(3)]


def test_a_loss_may_read_the_weights(pool: Pool) -> None:
    plain = pool.run(_decays_in_its_loss, 2, "dp=2 precision=fp64")[0]
    for words in ("zero=1", "zero=3"):
        assert pool.run(_decays_in_its_loss, 2, f"dp=2 {words} precision=fp64")[0] == pytest.approx(plain)


def _fails_first(plan: str) -> Any:
    """An exception in the first forward, an evaluation, then a step; the walk that the ranks agreed on."""
    engine = programs.engine_of(Task(edge_case_models.borrowed), plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    handle = engine.model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step(batch)
    handle.remove()
    engine.evaluate(batch)
    results = [engine.step(batch), engine.step(batch)]
    return results, len(engine._parts.sharded.stages[0].unsharder._exec_order.walk_order(backward=False))


def test_a_first_step_that_failed_leaves_no_trace(pool: Pool) -> None:
    plain = pool.run(_fails_first_plain, 2, "dp=2 precision=fp64")[0]
    results, uses = pool.run(_fails_first, 2, "dp=2 zero=3 precision=fp64")[0]
    assert [r.loss for r in results] == pytest.approx([r.loss for r in plain])
    assert uses >= 3


def _fails_first_plain(plan: str) -> Any:
    engine = programs.engine_of(Task(edge_case_models.borrowed), plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    return [engine.step(batch), engine.step(batch)]


def _only_the_last_trains(on_meta: bool = False) -> nn.Module:
    def make() -> nn.Module:
        model = Stack([Block(256) for _ in range(12)])
        model.requires_grad_(False)
        model.blocks[11].requires_grad_(True)
        return model

    return built(make, on_meta)


def _buffers_of_frozen(plan: str) -> Any:
    engine = programs.engine_of(Task(_only_the_last_trains), plan)
    for batch in programs.batches(2):
        engine.step(programs.share_of(batch, engine))
    return engine.memory().buffers, sum(p.numel() for p in engine.model.parameters()) * 4


@pytest.mark.parametrize("words", ["", "prefetch=0", "prefetch=2"])
def test_a_frozen_model_is_never_whole_at_a_time(pool: Pool, words: str) -> None:
    for held, whole in pool.run(_buffers_of_frozen, 2, f"dp=2 zero=3 {words} precision=fp32"):
        assert held < 0.5 * whole


def _messages(plan: str) -> list[str]:
    engine = programs.engine_of(Task(edge_case_models.uneven), plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    hides = not engine._parts.sharded.units[0].unsharded.persistent
    logits = engine.model(batch["input_ids"])
    said = []
    for act in (
        lambda: engine.evaluate({}),
        lambda: engine.step({**batch, "labels": batch["labels"].tolist()}),
        lambda: engine.step({**batch, "number": torch.tensor(1.0)}),
        lambda: engine.backward(logits),
        lambda: engine.backward(logits.sum().detach()),
        lambda: engine.model.blocks.state_dict() if hides else engine.backward(None),
        lambda: engine.model.blocks[0].requires_grad_(False) and engine.step(batch),
    ):
        with pytest.raises(ModelError) as caught:
            act()
        said.append(str(caught.value))
    engine.model.blocks[0].requires_grad_(True)
    assert not engine.step(batch).skipped
    return said


@pytest.mark.parametrize("words", ["", "zero=3"])
def test_invalid_batches_losses_and_changed_settings_are_errors(pool: Pool, words: str) -> None:
    for messages in pool.run(_messages, 2, f"dp=2 {words} precision=fp32"):
        assert all("\n  given   : " in message for message in messages)


def _expanded_buffer(plan: str) -> float:
    model = edge_case_models.uneven()
    model.register_buffer("extra", torch.arange(4).expand(3, 4))
    engine = plait.parallelize(model, plan, loss=programs.summed_loss)
    return engine.step(programs.share_of(programs.batches(1)[0], engine)).loss


def test_a_buffer_that_is_an_expanded_view_is_received_into_memory_of_its_own(pool: Pool) -> None:
    first, second = pool.run(_expanded_buffer, 2, "dp=2")
    assert first == second


class Loops(Stack):
    """Walks its blocks once or twice, as a sample says: no gathers were agreed on for the second walk."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(1 + int(input_ids[0, 0]) % 2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def loops(on_meta: bool = False) -> nn.Module:
    return built(lambda: Loops([Block(8) for _ in range(4)]), on_meta)


def test_ranks_that_share_no_parameters_may_gather_in_any_order(pool: Pool) -> None:
    """Each has all pieces in its own host memory: no other rank has to do the same."""
    check(pool, loops, "dp=2 zero=3 shard=1 offload=cpu", 2)


def _different_digests(plan: str) -> str:
    engine = programs.engine_of(Task(edge_case_models.uneven), plan)
    engine._parts.sharded.stages[0].unsharder._digest = 5 + engine.data_rank
    with pytest.raises(ModelError) as caught:
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    return str(caught.value)


def test_ranks_that_gathered_different_parameters_are_an_error(pool: Pool) -> None:
    for message in pool.run(_different_digests, 2, "dp=2 zero=3"):
        assert "gathered different parameters" in message
