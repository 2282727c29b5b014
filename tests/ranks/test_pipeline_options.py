"""An engine's use of a model in stages other than training: evaluation, outputs, probes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import PlanError
from plait.parallel.pipeline.p2p import Outbox
from plait.parallel.zero.flat_param import FlatParam
from support import pipeline_faults, pipeline_models, pipeline_plans, programs
from support.pool import Pool, RankError

LAYERS, SEQUENCES = 5, 12


def engine_of(model: str, words: str, seed: int = 3) -> plait.Engine:
    return programs.engine_of(pipeline_plans.task(model, LAYERS, SEQUENCES), f"{words} precision=fp64", seed)


def batches(steps: int = 1, sequences: int = SEQUENCES) -> list[dict[str, Tensor]]:
    return programs.batches(steps, sequences=sequences, length=pipeline_plans.LENGTH)


# --- evaluation and outputs

PLANS = [
    "pp=2 schedule=1f1b",
    "pp=2 schedule=zbv dp=2 zero=3",
    "pp=3 schedule=zb-h1",
    "pp=2 schedule=interleaved dp=2 zero=3",
    "pp=2 schedule=interleaved dp=2 stages=0,2,3,0",
]


def _evaluates(words: str, shares: tuple[tuple[int, int], ...]) -> Any:
    """Before, and after, a step. `shares`: which samples each data rank has."""
    engine = engine_of("tied_llama", words)
    [batch] = batches()
    first, last = shares[engine.data_rank]
    share = {key: value[first:last] for key, value in batch.items()}
    before = engine.evaluate(share)
    engine.step(programs.share_of(batch, engine))
    return before, engine.evaluate(share), engine.evaluate(share)


@pytest.mark.parametrize("transport", ["host", "gloo"])
@pytest.mark.parametrize("words", PLANS)
def test_evaluation_of_uneven_shares_is_that_of_one_process_on_every_rank(
    pool: Pool, words: str, transport: str
) -> None:
    """One data rank has a sample, the other eleven: they run in one part, and in three."""
    alone = _evaluates("micro=3", ((0, 12),))
    plan = plait.Plan.parse(words)
    shares = ((0, 12),) if plan.dp == 1 else ((0, 1), (1, 12))
    for found in pool.over(transport).run(_evaluates, plan.num_ranks, f"{words} micro=3", shares):
        assert found[1] == found[2]
        for mine, theirs in zip(found, alone, strict=True):
            assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-9)
            assert mine.num_tokens == theirs.num_tokens


def _outputs(words: str, picks: bool) -> Any:
    engine = engine_of("tied_llama", words)
    share = programs.share_of(batches()[0], engine)
    training = engine.step(share)
    found = engine.outputs(share, _last_logits) if picks else engine.outputs(share).logits
    assert all(module.training for module in engine.model.modules())
    return found, engine.data_rank, training


def _last_logits(outputs: Any) -> Any:
    return {"last": outputs.logits[:, -1], "length": outputs.logits.shape[1]}


@pytest.mark.parametrize("words", [*PLANS, "pp=4 schedule=gpipe"])
def test_every_rank_gets_the_models_output_for_its_share(pool: Pool, words: str) -> None:
    whole, _, _ = _outputs("micro=3", False)
    plan = plait.Plan.parse(words)
    for found, data_rank, _ in pool.run(_outputs, plan.num_ranks, f"{words} micro=3", False):
        assert torch.allclose(found, whole.chunk(plan.dp)[data_rank], rtol=1e-9, atol=0)
    for found, data_rank, _ in pool.run(_outputs, plan.num_ranks, f"{words} micro=3", True):
        assert torch.allclose(found["last"], whole[:, -1].chunk(plan.dp)[data_rank], rtol=1e-9, atol=0)
        assert found["length"] == pipeline_plans.LENGTH


def _refused(words: str) -> list[str]:
    engine = engine_of("llama", words)
    [batch] = batches()
    messages = []
    calls: list[Callable[[], Any]] = [
        lambda: engine.loss(batch),
        lambda: engine.backward(torch.ones((), requires_grad=True), 1),
    ]
    for call in calls:
        with pytest.raises(PlanError) as caught:
            call()
        messages.append(str(caught.value))
    assert not engine.step(batch).skipped, "the engine goes on"
    return messages


def test_a_custom_loop_over_micro_batches_is_refused(pool: Pool) -> None:
    for messages in pool.run(_refused, 2, "pp=2 micro=2"):
        assert [message.splitlines()[0] for message in messages] == [
            "single micro-batches cannot run through a pipeline"
        ] * 2
        assert "engine.loss, and a model in 2 stages" in messages[0]
        assert "engine.backward, and a model in 2 stages" in messages[1]


def _without_targets(words: str) -> Any:
    engine = engine_of("tied_llama", words)
    one, two = batches(2)
    engine.step(programs.share_of(one, engine))
    before = engine.full_parameters()
    nothing = {**two, "labels": torch.full_like(two["labels"], -100)}
    result = engine.step(programs.share_of(nothing, engine))
    after = engine.full_parameters()
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return (result.skipped, result.num_tokens, unchanged), engine.step(programs.share_of(two, engine)).skipped


def test_a_step_without_targets_is_skipped_on_every_stage(pool: Pool) -> None:
    assert (
        pool.run(_without_targets, 4, "pp=2 dp=2 zero=2 schedule=zbv micro=3")
        == [((True, 0, True), False)] * 4
    )


# --- probes


def _probed(words: str, muted_ops: str = "") -> Any:
    """The probe's result, and the first step's loss."""
    model = pipeline_models.tied_llama(layers=LAYERS)
    with pipeline_faults.muted(muted_ops) if muted_ops else nullcontext():
        engine = plait.parallelize(model, f"{words} micro=3", probe=True, seed=3)
    assert engine.probed is not None
    found = engine.probed.difference, engine.probed.allowed
    return *found, engine.step(programs.share_of(batches()[0], engine)).loss


def _first_loss(words: str) -> float:
    engine = plait.parallelize(pipeline_models.tied_llama(layers=LAYERS), f"{words} micro=3", seed=3)
    return engine.step(programs.share_of(batches()[0], engine)).loss


@pytest.mark.parametrize("words", PLANS)
def test_a_probe_compares_a_pipelines_gradients_and_changes_nothing(pool: Pool, words: str) -> None:
    ranks = plait.Plan.parse(words).num_ranks
    plain = pool.run(_first_loss, ranks, words)[0]
    for difference, allowed, loss in pool.run(_probed, ranks, words):
        assert difference < allowed
        assert loss == plain


@pytest.mark.parametrize("what", ["activations", "gradients", "shared"])
def test_a_probe_finds_a_pipeline_without_communication(pool: Pool, what: str) -> None:
    with pytest.raises(RankError, match="the sharded model computes a different function"):
        pool.run(_probed, 2, "pp=2", what)


# --- gradients that other ranks wait for


def _order_of_backward(words: str) -> list[str]:
    """Return the order of events in a step's backwards: sends of gradients, products of weights."""
    engine, found = engine_of("llama", words), list[str]()
    send, accumulate = Outbox.send_tensors, FlatParam.accumulate_deferred

    def sent(self: Outbox, tensors: Any) -> None:
        found.append("send")
        send(self, tensors)

    def deferred(self: FlatParam, *given: Any) -> None:
        if found[-1:] != ["products"]:
            found.append("products")
        accumulate(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "send_tensors", sent)
        patch.setattr(FlatParam, "accumulate_deferred", deferred)
        engine.step(batches()[0])
    return found


def test_an_inputs_gradient_is_sent_before_the_gradients_of_weights_are_computed(pool: Pool) -> None:
    assert pool.run(_order_of_backward, 2, "pp=2 micro=3")[1] == ["send", "products"] * 3


def test_with_recomputation_a_backward_holds_no_gradients_of_outputs(pool: Pool) -> None:
    assert pool.run(_order_of_backward, 2, "pp=2 micro=3 recompute=full")[1] == ["send"] * 3
