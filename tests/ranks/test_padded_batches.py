"""Samples of unequal length, padded: losses, gradients and weights are those of the samples one by one.

The reference runs each sample alone, without padding and without a mask, in plain PyTorch, float64.
"""

from dataclasses import replace
from math import prod

import pytest
import torch

import plait
from support import programs
from support.pool import Pool
from support.programs import Batch, Task

MICROS = 4  # of a step, over all data ranks


def samples(steps: int) -> list[list[torch.Tensor]]:
    """Two samples for each micro-batch, of 1 to 14 tokens: the shortest has no target."""
    generator = torch.Generator().manual_seed(2)
    lengths = [[5, 14, 1, 3, 9, 9, 2, 6], [2, 3, 4, 5, 6, 7, 8, 9]]
    return [
        [torch.randint(0, programs.VOCABULARY, (n,), generator=generator) for n in lengths[step % 2]]
        for step in range(steps)
    ]


def padded(steps: int) -> list[Batch]:
    collate = plait.PaddingCollator(pad_token=7, multiple_of=4)
    return [[collate(step[2 * n : 2 * n + 2]) for n in range(MICROS)] for step in samples(steps)]


def one_by_one(steps: int) -> list[Batch]:
    return [[{"input_ids": ids[None], "labels": ids[None]} for ids in step] for step in samples(steps)]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("dp=2 micro=2", marks=pytest.mark.quick),
        "dp=2 micro=2 zero=3",
        "pp=2 micro=4",
        "tp=2 micro=4 sp=true",
        "dp=2 tp=2 zero=1 micro=2 recompute=full",
    ],
)
def test_padded_samples_train_as_each_on_its_own(pool: Pool, plan: str) -> None:
    task = Task(programs.llama, data=padded, own_loss=True)
    degrees = dict(word.split("=") for word in plan.split())
    ranks = prod(int(degrees.get(axis, 1)) for axis in ("dp", "tp", "pp"))
    ours = pool.run(programs.train_task, ranks, task, f"{plan} precision=fp64")[0]
    programs.assert_same(
        ours, programs.one_process_task(replace(task, data=one_by_one), ours.first_weights, 1)
    )
