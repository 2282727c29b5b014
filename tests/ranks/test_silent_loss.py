"""Errors that no exception tells of, in losses and what they are divided by: each of them happened elsewhere.

The whole list, with the test of each entry, is in docs/reliability.md.
"""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.errors import ModelError
from plait.models import forward_inputs
from support import programs, silent_error_models
from support.pool import Pool

GRIDS = [("tp=3", 3), ("tp=2 sp=true", 2), ("tp=2x2", 4), ("pp=2 dp=2 tp=2 micro=2 zero=1", 8)]
grids = pytest.mark.parametrize(("plan", "ranks"), GRIDS)


def model_of(family: str, **more: Any) -> torch.nn.Module:
    """The same weights in every process."""
    return silent_error_models.with_random_weights(family, **more).double()


def engine_of(family: str, plan: str, **how: Any) -> plait.Engine:
    options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.5}} | how
    words = silent_error_models.tensor_plan_of(family)
    return plait.parallelize(model_of(family), f"{plan} precision=fp64", tensor_plan=words, **options)


# --- the vocabulary


def smoothed_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """With label smoothing and a z-loss, both over the whole vocabulary."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum")
    z = torch.logsumexp(logits, -1).square() * (targets != -100)
    return total + 1e-2 * z.sum(), (targets != -100).sum()


def _smoothed_step(plan: str) -> tuple[float, dict[str, Tensor]]:
    engine = engine_of("llama", plan, loss=smoothed_loss)
    return engine.step(programs.share_of(programs.batches(1)[0], engine)).loss, engine.full_gradients()


def _alone(family: str, loss: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the one-process program."""
    model = model_of(family)
    total, count = loss(model(**forward_inputs(model, batch)), batch)
    (total / count).backward()
    return (total / count).item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@grids
def test_label_smoothing_and_z_loss_are_over_the_whole_vocabulary(pool: Pool, plan: str, ranks: int) -> None:
    """Megatron-LM#737, #7464: smoothed over the columns of the rank."""
    found = pool.run(_smoothed_step, ranks, plan)
    loss, gradients = _alone("llama", smoothed_loss, programs.batches(1)[0])
    assert [mine for mine, _ in found] == pytest.approx([loss] * ranks, rel=1e-10)
    silent_error_models.assert_each_same(found[0][1], gradients)


def _losses(family: str, plan: str) -> list[float]:
    """Losses of one batch: a step's by sharded and by full logits, an evaluation's, and the outputs'."""
    batch, found = programs.batches(1)[0], []
    for loss in (None, programs.summed_loss):
        engine = engine_of(family, plan, loss=loss)
        share = programs.share_of(batch, engine)
        evaluated = engine.evaluate(share)
        logits = engine.outputs(share, _logits)
        found += [evaluated.loss_sum / evaluated.num_tokens, engine.step(share).loss]
        assert logits.shape[-1] == programs.VOCABULARY
        total, count = programs.summed_loss(logits, share)
        both = torch.stack([total, count.double()])
        plait.comm.all_reduce(both, engine._groups.dense.gradient_sum)
        found.append(float(both[0] / both[1]))
    return found


def _logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs.logits
    return logits


@grids
@pytest.mark.parametrize("family", ["tied_llama", "gpt2"])
def test_sharded_and_gathered_logits_give_the_same_loss(
    pool: Pool, family: str, plan: str, ranks: int
) -> None:
    """Megatron-LM#7452: gathered logits, taken for cut ones, add log(tp) to the loss."""
    loss, _ = _alone(family, programs.summed_loss, programs.batches(1)[0])
    for mine in pool.run(_losses, ranks, family, plan):
        assert mine == pytest.approx([loss] * 6, rel=1e-10)


# --- what is added once, and where a token is


def _outputs(family: str, plan: str, batch: dict[str, Tensor]) -> Tensor:
    engine = engine_of(family, plan)
    return engine.outputs(batch, _logits)


@pytest.mark.parametrize(
    ("family", "plan", "ranks"),
    [
        ("biased_llama", "tp=2", 2),
        ("biased_llama", "tp=3 sp=true", 3),
        ("biased_llama", "tp=2x2", 4),
        ("gpt2", "tp=2 sp=true", 2),
        ("gpt_oss", "tp=2", 2),
        ("biased_llama", "pp=2 dp=2 tp=2", 8),
    ],
)
def test_a_bias_is_added_once(pool: Pool, family: str, plan: str, ranks: int) -> None:
    """AxoNN: a bias of a layer whose outputs are summed over ranks is added by each of them."""
    batch = {"input_ids": programs.batches(1)[0]["input_ids"]}
    model = model_of(family).eval()
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        rowwise = [p for n, p in model.named_parameters() if n.endswith(("o_proj.bias", "c_proj.bias"))]
        assert rowwise
        for bias in rowwise:
            bias.mul_(2)
        twice = model(**batch, use_cache=False).logits
    for logits in pool.run(_outputs, ranks, family, plan, batch):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert float((twice - expected).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("plan", "ranks"), [("tp=2 sp=true", 2), ("tp=3 sp=true", 3), ("pp=2 dp=2 tp=2 sp=true zero=3", 8)]
)
def test_positions_under_sp_are_those_of_the_whole_sequence(
    pool: Pool, plan: str, ranks: int, family: str
) -> None:
    """A rank with a part of a sequence that counts from its own first token trains another model."""
    ids = programs.batches(1, sequences=4)[0]["input_ids"]
    packed = torch.cat([torch.arange(11), torch.arange(5)]).expand(len(ids), -1)  # two documents in one
    model = model_of(family).eval()
    with torch.no_grad():
        expected = [
            model(input_ids=ids, **more, use_cache=False).logits for more in ({}, {"position_ids": packed})
        ]
    assert float((expected[0] - expected[1]).abs().max()) > 0.01
    for batch, logits in (
        ({"input_ids": ids}, expected[0]),
        ({"input_ids": ids, "position_ids": packed}, expected[1]),
    ):
        for mine in pool.run(_outputs, ranks, family, plan, batch):
            torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-9)


# --- what a loss is divided by


def uneven_micros(steps: int) -> list[list[dict[str, Tensor]]]:
    """Four micro-batches: one has every target, one has none, one has one, and the last has a few."""
    found = []
    for batch in programs.batches(steps, sequences=8):
        micros = []
        for number, ids in enumerate(batch["input_ids"].chunk(4)):
            labels = ids.clone()
            labels[:, (programs.LENGTH, 0, 0, 3)[number] :] = -100
            labels[0, 1] = ids[0, 1] if number == 2 else labels[0, 1]
            micros.append({"input_ids": ids, "labels": labels})
        found.append(micros)
    return found


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("micro=4", 1),
        ("dp=4", 4),
        ("dp=2 micro=2 zero=2", 2),
        ("pp=2 micro=4", 2),
        ("pp=2 dp=2 tp=2 micro=2 zero=3", 8),
    ],
)
def test_a_loss_is_a_mean_over_targets_and_not_over_micro_batches_or_ranks(
    pool: Pool, plan: str, ranks: int
) -> None:
    """transformers#35203, #37766; Megatron-LM#7452. One micro-batch has no target at all."""
    sgd = {"optimizer": "SGD", "arguments": {"lr": 0.3}}
    task = silent_error_models.task("llama", data=uneven_micros, **sgd)
    traces = pool.run(programs.train_task, ranks, task, f"{plan} precision=fp64")
    oracle = programs.one_process_task(task, traces[0].first_weights, 4)
    programs.assert_same(traces[0], oracle)
    assert all(trace.losses == traces[0].losses for trace in traces)
    means = [_alone("llama", programs.summed_loss, micro)[0] for micro in uneven_micros(1)[0]]
    of_means = sum(mean for mean in means if not math.isnan(mean)) / 4
    assert abs(of_means - oracle.losses[0]) > 0.01 * oracle.losses[0]


def _sgd_step(plan: str, micros: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """The weights after one step without clipping."""
    engine = engine_of("llama", plan)
    batch: Any = programs.batches(1, sequences=8)[0] if micros is None else micros
    engine.step(programs.share_of(batch, engine))
    return engine.full_parameters()


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("pp=2 micro=2", 2), ("pp=2 micro=8 schedule=zb-h1", 2), ("pp=2 dp=2 tp=2 micro=4", 8)],
)
def test_a_pipeline_steps_by_the_mean_and_not_by_the_sum_of_its_micro_batches(
    pool: Pool, plan: str, ranks: int
) -> None:
    """DeepSpeed#7773, and picotron, where AdamW hid it: here SGD shows the gradient's scale."""
    model = model_of("llama")
    _, gradients = _alone("llama", programs.summed_loss, programs.batches(1, sequences=8)[0])
    expected = {name: (p - 0.5 * gradients[name]).detach() for name, p in model.named_parameters()}
    silent_error_models.assert_each_same(pool.run(_sgd_step, ranks, plan)[0], expected)


def one_of_three(steps: int, number: int, data_ranks: int) -> list[list[dict[str, Tensor]]]:
    """Three micro-batches for each data rank, of which one alone has targets."""
    found = []
    for batch in programs.batches(steps, sequences=6 * data_ranks):
        parts = batch["input_ids"].chunk(3 * data_ranks)
        labels = [
            ids if place % 3 == number else torch.full_like(ids, -100) for place, ids in enumerate(parts)
        ]
        found.append([{"input_ids": ids, "labels": of} for ids, of in zip(parts, labels, strict=True)])
    return found


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp=2 zero=1", 2),
        ("dp=2 zero=2 accumulate=unsharded", 2),
        ("pp=2 schedule=zb-h1", 2),
        ("pp=2 dp=2 tp=2 zero=1", 8),
    ],
)
def test_every_micro_batchs_gradient_counts(pool: Pool, plan: str, ranks: int, number: int) -> None:
    """DeepSpeed PR #7985: at stage 1 the last micro-batch's gradient was left out of the step's."""
    data = functools.partial(one_of_three, number=number, data_ranks=2 if "dp=2" in plan else 1)
    task = silent_error_models.task("llama", data=data, optimizer="SGD", arguments={"lr": 0.3})
    ours = pool.run(programs.train_task, ranks, task, f"{plan} micro=3 precision=fp64")[0]
    oracle = programs.one_process_task(task, ours.first_weights, 3)
    programs.assert_same(ours, oracle)
    assert all(norm > 0.1 for norm in oracle.norms)


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1 micro=3 zero=1", 1), ("dp=2 micro=3 zero=1", 2)])
def test_in_bf16_a_last_micro_batch_counts_bit_for_bit_like_a_first_one(
    pool: Pool, plan: str, ranks: int
) -> None:
    """As above, where it happened; gradients of zero before or after it change no bit."""
    first, last = (pool.run(_rotated_gradients, ranks, plan, number)[0] for number in (0, 2))
    assert first.keys() == last.keys()
    for name, gradient in first.items():
        assert torch.equal(gradient, last[name]), name
        assert gradient.any(), name


def _rotated_gradients(plan: str, number: int) -> dict[str, Tensor]:
    """Gradients of a step whose micro-batch with targets comes as number `number`; the others have none."""
    engine = plait.parallelize(
        model_of("llama").float(), f"{plan} precision=bf16", optimizer_args={"lr": 0.0}
    )
    ids = programs.batches(1, sequences=4)[0]["input_ids"]
    share: Any = programs.share_of({"input_ids": ids, "labels": ids}, engine)
    nothing = {"input_ids": share["input_ids"], "labels": torch.full_like(share["labels"], -100)}
    micros = [nothing, nothing, nothing]
    micros[number] = share
    engine.step(micros)
    return engine.full_gradients()


def _negative_count_on_one_rank(plan: str) -> list[str]:
    """The errors of a step in which one rank's loss counts its targets below zero, and of the next one."""

    def loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        count = (batch["labels"] != -100).sum()
        is_wrong = engine.data_rank == 1 and engine.num_steps == 0 and not raised
        return outputs.logits.square().sum(), -count if is_wrong else count

    raised: list[str] = []
    engine = engine_of("llama", plan, loss=loss)
    for batch in programs.batches(2):
        try:
            engine.step(programs.share_of(batch, engine))
        except ModelError as error:
            raised.append(error.fact)
    return raised


@pytest.mark.parametrize(("plan", "ranks"), [("dp=2 micro=2", 2), ("pp=2 dp=2 micro=2", 4)])
def test_a_negative_number_of_targets_on_one_rank_is_an_error_on_all(
    pool: Pool, plan: str, ranks: int
) -> None:
    for raised in pool.run(_negative_count_on_one_rank, ranks, plan):
        assert raised == ["a loss's number of targets is negative or not finite"]
