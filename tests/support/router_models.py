"""Mixtures with an auxiliary loss of routers or with biases, and their one-process programs."""

import functools
from typing import Any

import torch
from torch import Tensor

import plait
from support import hf_models, programs

COEFFICIENT = 0.5  # large, so that an error is above rounding
RATE = 0.05  # of biases, which then change choices


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


def biased(words: str) -> tuple[list[Any], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Loads and losses of four steps, with evaluations, and the biases before and after; the last step is
    that of another engine, which has loaded the state."""
    build = hf_models.builder("deepseek_v3")
    task = programs.Task(build, own_loss=True, router_bias_update=RATE)
    engine, loads, losses = programs.engine_of(task, f"{words} precision=fp64"), [], []
    for number, batch in enumerate(programs.batches(4)):
        if number == 3:
            states = engine.world.group, engine.state()
            engine = programs.engine_of(task, f"{words} precision=fp64", seed=4)
            engine.load_state(_broadcast(*states))
        result = engine.step(programs.share_of(batch, engine))
        loads.append(dict(result.expert_loads))
        losses.append(result.loss)
        if number == 0:
            first = _biases(engine)
        engine.evaluate(programs.share_of(batch, engine))
    return loads, losses, first, _biases(engine)


def _broadcast(group: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    values = [state]
    if group.size > 1:
        torch.distributed.broadcast_object_list(values, 0)
    return values[0]


def _biases(engine: plait.Engine) -> dict[str, Tensor]:
    return {name: bias for name, bias in engine.full_buffers().items() if name.endswith("correction_bias")}


def one_process(task: programs.Task, plan: plait.Plan, first_weights: dict[str, Tensor]) -> programs.Trace:
    """The loop over the micro-batches that all ranks have at the same time."""
    data = functools.partial(by_micro, task.data, plan.micro, plan.dp)
    alone = programs.Task(task.build, data=data, loss=loss_of_model, steps=task.steps)
    return programs.one_process_task(alone, first_weights, 1)
