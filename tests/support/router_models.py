"""Mixtures with an auxiliary loss of routers or with biases, and their one-process programs."""

import functools
from typing import Any

import torch
from torch import Tensor

import plait
from support import hf_models, programs

COEFFICIENT = 0.5  # large, so that an error is above rounding
Z_LOSS = 0.2  # its coefficient
RATE = 0.05  # of biases, which then change choices


def model_of(family: str, *, on_meta: bool = True, **more: Any) -> Any:
    if family != "deepseek_v3":  # which has no auxiliary loss
        more |= {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return hf_models.model_of(family, on_meta=on_meta, num_hidden_layers=4, **more)


_LOGITS: list[Tensor] = []  # of the last forward of `watched`


def watched(build: Any, *, on_meta: bool) -> Any:
    """The model, whose routers note their logits."""
    model = build(on_meta=on_meta)
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, output: _LOGITS.append(output[0]))
    return model


def loss_of_model(outputs: Any, batch: Any, z_loss: float | None = None) -> tuple[Tensor, Tensor]:
    """The model's own loss times its targets: a micro-batch's share of the step. With `z_loss`, and the mean
    over tokens of squared log-sum-exps, layers added up."""
    total, count = programs.summed_loss(outputs, batch)
    logits, _LOGITS[:] = list(_LOGITS), []
    if (aux_loss := getattr(outputs, "aux_loss", None)) is not None:
        total = total + COEFFICIENT * aux_loss * count
    if z_loss is not None:
        is_seen_T = batch.get("attention_mask", torch.ones_like(batch["labels"])).flatten() == 1
        total = total + sum(of[is_seen_T].logsumexp(-1).pow(2).mean() for of in logits) * z_loss * count
    return total, count


def padded(steps: int) -> list[dict[str, Tensor]]:
    """Batches whose rows have padding at their ends."""
    found = programs.batches(steps)
    for batch in found:
        lengths = torch.arange(len(batch["input_ids"]))[:, None] % 5 + 12
        batch["attention_mask"] = (torch.arange(programs.LENGTH) < lengths).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return found


def task_of(
    family: str, data: Any = programs.batches, *, z_loss: float | None = None, **more: Any
) -> programs.Task:
    build = functools.partial(model_of, family, **more)
    loss = functools.partial(loss_of_model, z_loss=z_loss)
    return programs.Task(build, data=data, own_loss=True, loss=loss, steps=3, router_z_loss=z_loss)


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
    """The loop over the micro-batches that all ranks have at the same time; or over full batches, if the plan
    has counts of the step."""
    parts = (1, 1) if plan.router_balance == "step" else (plan.micro, plan.dp)
    data = functools.partial(by_micro, task.data, *parts)
    build = functools.partial(watched, task.build)
    alone = programs.Task(build, data=data, loss=task.loss, steps=task.steps)
    return programs.one_process_task(alone, first_weights, 1)
