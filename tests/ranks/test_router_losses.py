"""What belongs to all tokens of a micro-batch: the auxiliary loss of routers, the loads of experts, and their
biases, equal to one process under every plan."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from support import hf_models, programs
from support.pool import Pool

COEFFICIENT = 0.5  # large, so that an error is above rounding
PLANS = (
    "dp=2",
    "dp=2 ep=2",
    "dp=2 zero=1 micro=2",
    "dp=2 ep=2 zero=3 micro=2 recompute=full",
    "tp=2",
    "pp=2 micro=3",
    "pp=2 micro=4 chunks=2 schedule=interleaved",
    "pp=2 micro=2 schedule=zb-h1 recompute=full",
    "cp=2",
    "dp=2 cp=2 ep=2 zero=3",
    "dp=2 ep=2 tp=2 pp=2 micro=2 zero=1",
)


def model_of(family: str, *, on_meta: bool = True) -> Any:
    more = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "num_hidden_layers": 4}
    return hf_models.model_of(family, on_meta=on_meta, **more)


def loss_of_model(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The model's own loss times its targets: a micro-batch's share of the step."""
    total, count = programs.summed_loss(outputs, batch)
    return total + COEFFICIENT * outputs.aux_loss * count, count


def padded(steps: int) -> list[dict[str, Tensor]]:
    """Batches whose rows have padding at their ends."""
    found = programs.batches(steps)
    for batch in found:
        lengths = torch.arange(len(batch["input_ids"]))[:, None] % 5 + 12
        batch["attention_mask"] = (torch.arange(programs.LENGTH) < lengths).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return found


def task_of(family: str, data: Any = programs.batches) -> programs.Task:
    build = functools.partial(model_of, family)
    return programs.Task(build, data=data, own_loss=True, loss=loss_of_model, steps=3)


def by_micro(data: Any, micro: int, ranks: int, steps: int) -> list[list[dict[str, Tensor]]]:
    """Steps whose micro-batches are those that the ranks have at the same time."""
    found = []
    for batch in data(steps):
        shares = [{k: v.chunk(ranks)[rank] for k, v in batch.items()} for rank in range(ranks)]
        parts = [[{k: v.chunk(micro)[m] for k, v in share.items()} for m in range(micro)] for share in shares]
        found.append([{k: torch.cat([of[m][k] for of in parts]) for k in batch} for m in range(micro)])
    return found


def check(pool: Pool, family: str, words: str, data: Any = programs.batches) -> None:
    import plait

    plan = plait.Plan.parse(f"{words} precision=fp64")
    task = task_of(family, data)
    ours, *others = pool.run(programs.train_task, plan.num_ranks, task, str(plan))
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    alone = programs.Task(
        task.build, data=functools.partial(by_micro, data, plan.micro, plan.dp), loss=loss_of_model, steps=3
    )
    programs.assert_same(ours, programs.one_process_task(alone, ours.first_weights, 1))


@pytest.mark.parametrize("words", PLANS)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    check(pool, "mixtral", words)
