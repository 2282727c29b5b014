"""Batches that are hard on a pipeline: micro-batches unlike each other, masks and positions that every stage
needs, micro-batches without a target; and the other things than training that an engine does with a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from support import pipeline_plans, programs
from support.pool import Pool

SIZES = ((1, 6), (3, 6), (2, 9), (4, 4))  # samples and length of the first step's micro-batches
WITHOUT_TARGETS = 2  # the number of such a micro-batch


def unlike_micros(steps: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of different shapes within every step, assigned to ranks differently in each step."""
    generator = torch.Generator().manual_seed(7)
    return [
        [_micro(generator, *SIZES[(step + number) % 4], number) for number in range(4)]
        for step in range(steps)
    ]


def _micro(generator: torch.Generator, samples: int, length: int, number: int) -> dict[str, Tensor]:
    ids = torch.randint(0, programs.VOCABULARY, (samples, length), generator=generator)
    masked = torch.rand(samples, length, generator=generator) < 0.3
    if number == WITHOUT_TARGETS:
        masked |= True
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100)}


def masked_micros(steps: int) -> list[list[dict[str, Tensor]]]:
    """With tokens that no other one sees, and positions that do not begin at zero."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for micros in unlike_micros(steps):
        masked = []
        for micro in micros:
            samples, length = micro["input_ids"].shape
            seen = torch.rand(samples, length, generator=generator) < 0.7
            seen[:, 0] = True
            positions = torch.arange(length) + torch.randint(0, 9, (samples, 1), generator=generator)
            labels = micro["labels"].masked_fill(~seen, -100)
            more = {"labels": labels, "attention_mask": seen.long(), "position_ids": positions}
            masked.append({**micro, **more})
        found.append(masked)
    return found


def _task(model: str, layers: int, data: Any) -> programs.Task:
    return programs.Task(pipeline_plans.build_of(model, layers), data, steps=3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama", "pp=2 schedule=1f1b"),
        ("tied_llama", "pp=3 schedule=zb-h1"),
        ("gpt2", "pp=2 schedule=interleaved chunks=2"),
        ("pair", "pp=2 schedule=zbv"),
        ("pair", "pp=4 schedule=gpipe recompute=full"),
        ("gpt2", "pp=2 schedule=dualpipev recompute=full"),
        ("llama", "pp=2 schedule=bfs chunks=2"),
        ("tied_llama", "pp=2 dp=2 schedule=1f1b zero=2"),
    ],
)
def test_micro_batches_of_other_sizes_and_lengths_and_without_targets_count_as_they_are(
    pool: Pool, model: str, words: str
) -> None:
    check_parity(pool, _task(model, 5, unlike_micros), words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama", "pp=3 schedule=1f1b recompute=full"),
        ("gpt2", "pp=2 schedule=zbv"),
        ("tied_llama", "pp=2 schedule=interleaved chunks=2"),
        ("gpt2", "pp=2 dp=2 zero=3 schedule=zb-h1"),
    ],
)
def test_every_stage_knows_masks_and_positions(pool: Pool, model: str, words: str) -> None:
    task = _task(model, 5, masked_micros)
    check_parity(pool, task, words)


def check_parity(pool: Pool, task: programs.Task, words: str) -> None:
    plan = plait.Plan.parse(f"{words} micro={2 if 'dp=2' in words else 4} precision=fp64")
    ours = pool.run(programs.train_task, plan.num_ranks, task, str(plan))[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def test_masks_and_positions_make_a_difference() -> None:
    """Or the test above shows nothing."""
    task = _task("gpt2", 2, masked_micros)
    first = masked_micros(1)[0][1]
    engine = programs.engine_of(task, "precision=fp64")
    losses = {
        engine.evaluate({key: value for key, value in first.items() if key != left_out}).loss_sum
        for left_out in ("", "attention_mask", "position_ids")
    }
    assert len(losses) == 3
