"""Stages without blocks: the first has the embedding alone, the last the final norm, head and loss."""

from dataclasses import replace

import pytest

import plait
from support import generation, pipeline_faults, pipeline_plans, programs
from support.pool import Pool

LAYERS, SEQUENCES = 4, 12


def task_of(model: str) -> programs.Task:
    return pipeline_plans.task(model, LAYERS, SEQUENCES, steps=2)


def check_parity(pool: Pool, task: programs.Task, words: str, timeout_s: float = 60.0) -> None:
    plan = plait.Plan.parse(f"{words} precision=fp64")
    ours, *others = pool.run(programs.train_task, plan.num_ranks, task, str(plan), timeout_s=timeout_s)
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))
    assert all((other.losses, other.norms) == (ours.losses, ours.norms) for other in others)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("llama", "pp=4 stages=0,2,2,0 micro=4 schedule=1f1b", marks=pytest.mark.quick),
        ("llama", "pp=3 stages=0,2,2 micro=4 schedule=zb-h1 recompute=full"),
        ("llama", "pp=2 stages=0,2,2,0 micro=4 schedule=dualpipev recompute=selective"),
        ("llama", "pp=3 dp=2 zero=3 stages=0,4,0 micro=2 schedule=gpipe"),
        ("llama", "pp=2 tp=2x2 stages=0,4 micro=2"),
        ("llama", "pp=3 tp=2 sp=true stages=0,4,0 micro=3 schedule=zb-h1 recompute=full"),
        ("llama", "pp=2 cp=2 stages=0,2,2,0 micro=3 schedule=zbv"),
        ("tied_llama", "pp=2 chunks=3 stages=0,1,1,1,1,0 micro=4 schedule=interleaved"),
        ("tied_llama", "pp=2 stages=4,0 micro=3 schedule=gpipe"),
        ("tied_llama", "pp=3 tp=2 zero=1 stages=0,4,0 micro=2 schedule=zb-h1 offload=cpu"),
        ("gpt2", "pp=2 stages=0,3,1,0 micro=4 schedule=zbv"),
        ("gpt2", "pp=3 dp=2 zero=2 stages=0,4,0 micro=3"),
        ("gpt2", "pp=2 tp=2 sp=true chunks=2 stages=0,1,3,0 micro=4 schedule=interleaved"),
        ("gpt2", "chunks=2 schedule=interleaved stages=0,4 micro=2"),  # on one rank
        ("pair", "pp=3 stages=0,2,2 micro=2"),  # the first block has two arguments of the embedding
        ("pair", "pp=2 dp=2 zero=3 reshard=step stages=0,2,2,0 micro=3 schedule=bfs"),
        ("frozen", "pp=3 stages=0,2,2 micro=2 schedule=zb-h1"),  # the first stage trains nothing
        ("frozen_tied_llama", "pp=3 stages=0,4,0 micro=2"),
    ],
)
def test_stages_without_blocks_train_as_the_one_process_program_does(
    pool: Pool, model: str, words: str
) -> None:
    task = task_of(model)
    if "cp=" in words:  # divides the tokens of plait's own loss
        task = replace(task, own_loss=True)
    check_parity(pool, task, words)


def test_compiled_blocks_between_stages_without_blocks_train_the_same(pool: Pool) -> None:
    check_parity(pool, task_of("gpt2"), "pp=3 stages=0,4,0 micro=2 compile=true", timeout_s=300.0)


@pytest.mark.parametrize("words", ["pp=3 stages=0,2,0 dp=2 zero=3", "pp=2 tp=2 sp=true stages=2,0"])
def test_stages_without_blocks_generate_the_same_tokens(pool: Pool, words: str) -> None:
    plan = plait.Plan.parse(f"{words} precision=fp64")
    found = pool.run(generation.on_ranks, plan.num_ranks, "llama", str(plan), generation.GREEDY)
    for data_rank, texts in found:
        for prompt, text in zip(generation.PROMPTS[data_rank :: plan.dp], texts, strict=True):
            generation.check_greedy_row("llama", "fp64", prompt, text)


def _train_deaf(words: str, what: str) -> programs.Trace:
    with pipeline_faults.muted(what):
        return programs.train_task(task_of("tied_llama"), f"{words} micro=2 precision=fp64")


@pytest.mark.parametrize(
    ("words", "what"), [("pp=2 stages=0,4", "activations"), ("pp=2 stages=4,0", "gradients")]
)
def test_without_their_messages_the_numbers_differ(pool: Pool, words: str, what: str) -> None:
    ours = pool.run(_train_deaf, 2, words, what)[0]
    with pytest.raises(AssertionError, match="gradient of"):
        programs.assert_same(ours, programs.one_process_task(task_of("tied_llama"), ours.first_weights, 1))
