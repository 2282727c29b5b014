"""Expert parallelism: the one-process program's numbers, for families, ZeRO stages, mixes and routings."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ModelError, PlaitError
from plait.models.routers import routers_of
from plait.verify.model_spec import ModelSource, parse_source
from plait.verify.result import Outcome, Verdict
from plait.verify.sweep import simpler_plans
from support import hf_models, programs, routed_experts, verify_models
from support.pool import Pool

PLANS = (
    "dp=2 ep=2",
    "dp=2 ep=2 zero=1",
    "dp=2 ep=2 zero=2 micro=2",
    "dp=2 ep=2 zero=3 recompute=full",
    "dp=4 ep=2",
    "dp=4 ep=2 zero=1",
    "dp=4 ep=4 zero=2",
    "dp=4 ep=2 zero=3",
    "dp=4 ep=2 zero=1 shard=2",
    "dp=4 ep=2 zero=3 shard=2 micro=3 accumulate=sharded",
    "dp=2 ep=2 pp=2 micro=2 zero=1",
    "dp=2 ep=2 pp=2 micro=2 zero=3 schedule=zb-h1",
    "dp=2 ep=2 tp=2 zero=1",
    "dp=2 ep=2 tp=2 pp=2 zero=3 micro=2",
    "dp=4 ep=2 tp=2 zero=3 recompute=full",
    "dp=2 ep=2 tp=4 zero=1",  # columns have parts of each expert: two do not divide by four
    "dp=2 ep=2 tp=2 sp=true zero=2 micro=2",
    "dp=2 ep=2 tp=2 sp=true pp=2 micro=2 zero=3 schedule=zb-h1",
    "tp=2 sp=true",
    "dp=4 ep=4 zero=1 shard=2",
    "dp=4 ep=4 zero=3 shard=2 micro=3",
    "dp=1 cp=2 ep=2",
    "dp=1 cp=2 ep=2 zero=1",
    "dp=1 cp=2 ep=2 zero=2 micro=2",
    "dp=1 cp=2 ep=2 zero=3 recompute=full",
    "dp=2 cp=2 ep=2",
    "dp=2 cp=2 ep=2 zero=3",
    "dp=2 cp=2 ep=4 zero=1",
    "dp=2 cp=2 ep=4 zero=3 shard=1",
    "dp=1 cp=4 ep=2 zero=2 cp_method=ring",
    "dp=1 cp=2 ep=2 tp=2 zero=1",
    "dp=2 ep=2 zero=3 offload=cpu",
)


@pytest.mark.parametrize("words", PLANS)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True, steps=3)
    programs.check_parity(pool, task, f"{words} precision=fp64")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_no_token_is_so_near_to_another_choice_that_rounding_could_change_it(family: str) -> None:
    """Scores of the last chosen expert and the next one. Those of plans differ by some 1e-14."""
    model, gaps = hf_models.model_of(family, on_meta=False), []
    chosen = model.config.num_experts_per_tok
    for name, at in routers_of(model).items():

        def record(_: Any, __: Any, outputs: Any, at: int = at) -> None:
            logits = outputs if isinstance(outputs, Tensor) else outputs[at]
            scores = logits.detach().topk(chosen + 1, dim=-1).values
            gaps.append(float((scores[..., -2] - scores[..., -1]).min()))

        model.get_submodule(name).register_forward_hook(record)
    for batch in programs.batches(3):
        model(input_ids=batch["input_ids"])
    assert len(gaps) == 3 * model.config.num_hidden_layers
    assert min(gaps) > 1e-8, gaps


# minimax differs by 2e-8 under dp=2 too: its attention computes a part in float32.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "llama4_text")
OTHER_FAMILIES = """
    afmoe deepseek_v2 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe granitemoehybrid
    granitemoeshared hunyuan_v1_moe jamba jetmoe lfm2_moe minimax_m2 nemotron_h olmoe phimoe qwen2_moe
    qwen3_next solar_open zaya
"""


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHER_FAMILIES.split())]
)
def test_families_train_as_in_one_process(pool: Pool, family: str) -> None:
    source = parse_source(family, layers=3, length=11)
    _check_same(pool, source, "dp=2 ep=2 zero=1", 2)


def _check_same(pool: Pool, source: ModelSource, words: str, ranks: int) -> None:
    verdict, *_ = pool.run(verify_models.verify_on_ranks, ranks, source, words, timeout_s=180)
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.SAME, verdict.message


# Of granitemoe, the tensor plan is derived and leaves experts complete; llama4's mixture flattens its output.
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "dp=2 ep=2 tp=2 zero=1"),
        ("granitemoe", "dp=2 ep=2 tp=2 zero=1"),
        ("qwen2_moe", "dp=2 ep=2 tp=2 sp=true zero=1"),
        ("llama4_text", "tp=2 sp=true"),
    ],
)
def test_families_train_as_in_one_process_over_columns(pool: Pool, family: str, words: str) -> None:
    source = parse_source(family, layers=3, length=11)
    _check_same(pool, source, words, 4 if "ep" in words else 2)


def test_experts_with_a_capacity_for_each_sequence_train_as_in_one_process(pool: Pool) -> None:
    """Their router leaves out tokens, for which nothing is sent."""
    source = ModelSource(build="support.verify_models:switch")
    verdict, _ = pool.run(verify_models.verify_on_ranks, 2, source, "dp=2 ep=2 zero=1", timeout_s=180)
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.SAME, verdict.message


@pytest.mark.parametrize("routing", ["one", "one rank", "all"])
@pytest.mark.parametrize("words", ["dp=2 ep=2 zero=1", "dp=4 ep=4 zero=3", "dp=2 ep=2 tp=2 recompute=full"])
def test_experts_and_ranks_without_tokens_train_as_in_one_process(
    pool: Pool, routing: str, words: str
) -> None:
    task = programs.Task(functools.partial(routed_experts.model_with, routing), own_loss=True, steps=3)
    programs.check_parity(pool, task, f"{words} precision=fp64")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("list", "dp=2 ep=2 zero=1"),
        ("list", "dp=4 ep=4"),
        ("list", "dp=4 ep=2 zero=3 micro=3"),
        ("list", "dp=2 ep=2 pp=2"),
        ("plain", "dp=2 cp=2 ep=4 zero=2"),
        ("shared", "dp=2 ep=2 zero=1"),
        ("shared", "dp=4 ep=2 zero=3 recompute=full micro=3"),
        ("plain", "dp=2 ep=2 zero=3 reshard=step"),
    ],
)
def test_experts_in_other_forms_train_as_in_one_process(pool: Pool, form: str, words: str) -> None:
    task = programs.Task(functools.partial(routed_experts.model_of, form), own_loss=True, steps=3)
    programs.check_parity(pool, task, f"{words} precision=fp64")


def _compiled(words: str) -> list[float]:
    build = functools.partial(hf_models.model_of, "mixtral", exact=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is compiled in parts only")
        return programs.train_task(programs.Task(build, own_loss=True, steps=3), words).losses


def test_blocks_are_compiled_around_their_experts(pool: Pool) -> None:
    plans = [f"dp=2 ep=2 zero=3 recompute=full{words} precision=fp32" for words in ("", " compile=true")]
    plain, compiled = (pool.run(_compiled, 2, plan, timeout_s=180)[0] for plan in plans)
    assert compiled == pytest.approx(plain, rel=1e-5)


def _asked(words: str) -> tuple[list[float], Tensor]:
    """The loss of an evaluation, in which the second rank has one row, and logits."""
    engine = programs.engine_of(programs.Task(hf_models.builder("mixtral"), own_loss=True), words)
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    (rows,) = programs.batches(1, sequences=5, length=9)
    own = [slice(0, 4), slice(4, 5)][engine.data_rank] if engine.data_ranks > 1 else slice(0, 5)
    evaluated = engine.evaluate({key: value[own] for key, value in rows.items()})
    logits = engine.outputs({"input_ids": rows["input_ids"][:2]}, lambda outputs: outputs.logits)
    return [evaluated.loss_sum, evaluated.num_tokens], logits


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_evaluation_of_uneven_shares_and_outputs_are_those_of_one_process(pool: Pool, transport: str) -> None:
    (alone,) = pool.run(_asked, 1, "micro=2 precision=fp64")
    for evaluated, logits in pool.over(transport).run(_asked, 2, "dp=2 ep=2 micro=2 precision=fp64"):
        assert evaluated == pytest.approx(alone[0], rel=1e-9)
        torch.testing.assert_close(logits, alone[1], rtol=1e-9, atol=1e-12)


def _trained_in(precision: str, words: str, implementation: str) -> list[float]:
    build = functools.partial(
        routed_experts.model_with, "balanced", exact=False, experts_implementation=implementation
    )
    task = programs.Task(build, own_loss=True, steps=3)
    return programs.train_task(task, f"{words} precision={precision}").losses


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_grouped_products_of_fewer_experts_are_those_of_all(
    pool: Pool, precision: str, tolerance: float, implementation: str
) -> None:
    (alone,) = pool.run(_trained_in, 1, precision, "dp=1", implementation)
    for losses in pool.over("gloo").run(_trained_in, 2, precision, "dp=2 ep=2 zero=1", implementation):
        assert losses == pytest.approx(alone, rel=tolerance)


def _in_different_layers() -> str:
    """The error where the first rank leaves out the first mixture, and the second rank another one."""
    engine = programs.engine_of(programs.Task(hf_models.builder("mixtral"), own_loss=True), "dp=2 ep=2")
    blocks: Any = engine.model.model.layers
    blocks[engine.data_rank].mlp.forward = lambda x: x
    with pytest.raises(ModelError) as caught:
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    return str(caught.value)


def test_ranks_in_different_layers_are_an_error(pool: Pool) -> None:
    for text in pool.run(_in_different_layers, 2):
        assert "the ranks of ep are not in the same layer" in text


def _saved(folder: Path) -> None:
    engine = programs.engine_of(programs.Task(hf_models.builder("mixtral"), own_loss=True), "dp=2 ep=2")
    with pytest.raises(PlaitError, match="full_parameters"):
        engine.model.save_pretrained(folder)


def test_files_of_some_experts_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_saved, 2, tmp_path)
    assert not [*tmp_path.iterdir()]


def _probed() -> tuple[float, list[str]]:
    """The error of a self-check next to what it allows; and plans that are simpler."""
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True, probe=True)
    engine = programs.engine_of(task, "dp=2 ep=2 zero=1 precision=fp64")
    assert engine.probed is not None
    return engine.probed.difference / engine.probed.allowed, [*simpler_plans(engine.plan)]


def test_a_self_check_passes_and_verify_takes_ep_away(pool: Pool) -> None:
    for error, simpler in pool.run(_probed, 2):
        assert error < 1
        assert simpler == ["dp", "ep", "zero"]
