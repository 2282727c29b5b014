"""Mixtures with given choices of experts: batches with them, and one-process models whose routers are
written by hand."""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from support import hf_models, programs, routed_experts

LAYERS = {"mixtral": 2, "qwen3_moe": 2, "deepseek_v3": 2, "gpt_oss": 2}  # with experts
_GROUPED = {"num_hidden_layers": 3, "n_group": 2, "topk_group": 1}  # a router that chooses groups first


def model_of(family: str, *, on_meta: bool = True) -> Any:
    if family == "shared":  # a layer's experts also in another layer
        return routed_experts.model_of("shared")
    return hf_models.model_of(family, on_meta=on_meta, **(_GROUPED if family == "deepseek_v3" else {}))


def batches(family: str, steps: int, length: int = programs.LENGTH) -> list[dict[str, Tensor]]:
    """Batches with random choices of two of four experts, in any order."""
    generator, found = torch.Generator().manual_seed(8), programs.batches(steps, length=length)
    for batch in found:
        scores = torch.rand(*batch["input_ids"].shape, LAYERS[family], 4, generator=generator)
        batch["routing"] = scores.argsort(-1)[..., :2]
    return found


def by_hand(family: str, *, on_meta: bool = False) -> Any:
    """The model, whose forward takes the choices too: its routers compute the weights of these."""
    model, forward = model_of(family, on_meta=on_meta), None
    given: list[Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == LAYERS[family]
    for place, router in enumerate(routers):
        router.forward = functools.partial(_routed, family, router, given, place)
    forward = model.forward

    def run(*, routing: Tensor, **inputs: Any) -> Any:
        given[:] = [routing]
        return forward(**inputs)

    model.forward = run
    return model


def _routed(family: str, router: Any, given: list[Tensor], place: int, hidden: Tensor) -> Any:
    chosen = given[0][:, :, place].flatten(0, 1)
    logits = F.linear(hidden.flatten(0, -2), router.weight, getattr(router, "bias", None))
    rows = torch.arange(len(chosen))[:, None]
    if family == "gpt_oss":
        return logits, torch.softmax(logits[rows, chosen], -1), chosen
    scores = torch.sigmoid(logits) if family == "deepseek_v3" else torch.softmax(logits, -1)
    weights = scores[rows, chosen]
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1), chosen


def task_of(family: str, steps: int = 2) -> programs.Task:
    build, data = functools.partial(model_of, family), functools.partial(batches, family)
    return programs.Task(build, data=data, steps=steps, own_loss=True)


def reference(family: str, first_weights: dict[str, Tensor], steps: int = 2) -> programs.Trace:
    build, data = functools.partial(by_hand, family), functools.partial(batches, family)
    return programs.one_process_task(programs.Task(build, data=data, steps=steps), first_weights, 1)


class Replayed(NamedTuple):
    """Results for a rank's share. `is_same`: a step, an evaluation and outputs with the model's `own` choices
    have the bits of those without. `recorded`: where random choices are `given`."""

    is_same: bool
    own: Tensor
    recorded: Tensor
    given: Tensor


def replayed(family: str, words: str) -> Replayed:
    task, results = task_of(family), []
    batch, random = programs.batches(1)[0], batches(family, 1)[0]
    for replays in (False, True):
        engine = programs.engine_of(task, f"{words} precision=fp64")
        share = programs.share_of(batch, engine)
        own = engine.routing(share)
        given = share | ({"routing": own} if replays else {})
        evaluated, outputs = engine.evaluate(given), engine.outputs(given, lambda found: found.logits)
        result = engine.step(given)
        numbers = torch.tensor([result.loss, result.grad_norm, evaluated.loss_sum])
        results.append([numbers, outputs, *engine.full_parameters().values()])
    is_same = all(map(torch.equal, *results))
    other = programs.share_of(random, engine)
    return Replayed(is_same, own, engine.routing(other), other["routing"])


def error_of(family: str, words: str, entries: dict[str, Tensor]) -> str:
    """Return what a step with these entries raises."""
    engine = programs.engine_of(task_of(family), words)
    try:
        engine.step(programs.share_of(programs.batches(1)[0] | entries, engine))
    except plait.PlaitError as error:
        return str(error)
    return ""


def loads(words: str, length: int) -> tuple[list[list[int]], list[float]]:
    """The loads of a step with random choices, and its loss: by `step`, and by `loss` and `backward`."""
    batch, results = batches("mixtral", 1, length)[0], []
    for by_micro in (False, True):
        engine = programs.engine_of(task_of("mixtral"), f"{words} precision=fp64")
        share = programs.share_of(batch, engine)
        if by_micro:
            engine.backward(*engine.loss(share))
        results.append(engine.update() if by_micro else engine.step(share))
    first, second = results
    assert first.expert_loads == second.expert_loads
    return [*first.expert_loads.values()], [first.loss, first.grad_norm, second.loss, second.grad_norm]
