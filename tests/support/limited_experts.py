"""Mixtures in one process that drop choices of experts beyond a capacity, written by hand."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.parallel.experts import capacity
from support import hf_models, programs


class Groups(NamedTuple):
    """How the tokens of a step are divided, into groups of which each has its own capacity. `runs`: positions
    of a row on each rank of cp, by the number of equal runs and their numbers."""

    capacity: float
    parts: int = 1  # data ranks x micro-batches, each with as many samples
    columns: int = 1
    runs: Sequence[Sequence[int]] = ((0,),)

    def tokens(self, samples: int, length: int) -> list[list[int]]:
        """Numbers of the tokens (samples x length) in each group, in order."""
        num_runs, found = sum(map(len, self.runs)), []
        size, run = samples // self.parts, length // num_runs
        for part in range(self.parts):
            for own in self.runs:
                tokens = [
                    sample * length + position
                    for sample in range(part * size, (part + 1) * size)
                    for number in own
                    for position in range(number * run, (number + 1) * run)
                ]
                for column in range(self.columns):
                    first, last = (len(tokens) * (column + at) // self.columns for at in (0, 1))
                    found.append(tokens[first:last])
        return found


def _limited_model(family: str, groups: Groups, dropped: list[int], *, on_meta: bool) -> Any:
    model = hf_models.model_of(family, on_meta=on_meta)
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module.forward = functools.partial(_limited, module.forward, module.num_experts, groups, dropped)
    return model


def _limited(
    forward: Any, number: int, groups: Groups, dropped: list[int], x: Tensor, chosen_Tk: Tensor, w_Tk: Tensor
) -> Tensor:
    kept = torch.zeros_like(w_Tk)
    for tokens in groups.tokens(len(chosen_Tk) // programs.LENGTH, programs.LENGTH):
        most, taken = math.ceil(groups.capacity * len(tokens) * chosen_Tk.shape[1] / number), Counter[int]()
        for token in tokens:
            for place, expert in enumerate(chosen_Tk[token].tolist()):
                taken[expert] += 1
                kept[token, place] = taken[expert] <= most
    dropped.append(int((kept == 0).sum()))
    return forward(x, chosen_Tk, w_Tk * kept)


def reference(
    family: str, groups: Groups, first_weights: dict[str, Tensor], steps: int
) -> tuple[programs.Trace, list[int]]:
    """Train in one process. Returns the choices that each step has dropped, too."""
    dropped: list[int] = []
    task = programs.Task(functools.partial(_limited_model, family, groups, dropped), steps=steps)
    trace = programs.one_process_task(task, first_weights, 1)
    layers = len(dropped) // steps
    return trace, [sum(dropped[step * layers :][:layers]) for step in range(steps)]


def trained(family: str, words: str, steps: int) -> tuple[programs.Trace, list[int | None]]:
    """Train on ranks. Returns the choices that each step has dropped, too."""
    dropped: list[int | None] = []
    task = programs.Task(hf_models.builder(family), own_loss=True, steps=steps)
    step = plait.Engine.step

    def counted(engine: plait.Engine, batch: Any) -> Any:
        result = step(engine, batch)
        dropped.append(result.dropped_choices)
        return result

    with programs.mock.patch.object(plait.Engine, "step", counted):
        return programs.train_task(task, f"{words} precision=fp64"), dropped


_SHAPES = (  # (samples, tokens) of the two micro-batches of the first rank, and of the second
    ((1, 5), (2, 7), (1, 5), (2, 7)),
    ((1, 5), (2, 7), (3, 7), (2, 7)),  # new to the second rank alone
    ((1, 5), (2, 7), (1, 5), (1, 5)),
    ((1, 5), (2, 7), (3, 7), (2, 7)),
)


def uneven_steps(words: str) -> tuple[list[float], list[list[str]]]:
    """Results of steps and evaluations with other shapes on each rank, and the labels of their messages to
    agree on sizes."""
    engine = programs.engine_of(programs.Task(hf_models.builder("mixtral"), own_loss=True), words)
    generator, results, messages = torch.Generator().manual_seed(4), list[float](), list[list[str]]()
    for number, shapes in enumerate(_SHAPES):
        ids = [torch.randint(0, programs.VOCABULARY, shape, generator=generator) for shape in shapes]
        micros = [{"input_ids": each, "labels": each} for each in ids]
        labels: list[str] = []
        with _labelled(labels):
            result = engine.step(micros[2 * engine.data_rank :][:2])
        evaluated = engine.evaluate(micros[1 + engine.data_rank])  # of one or more samples
        outputs = engine.outputs({"input_ids": ids[0]}, lambda found: found.logits.sum())
        results += [result.loss, result.grad_norm, evaluated.loss_sum, float(outputs)]
        messages.append(labels)
        if number == 0:  # outside of passes, too
            with torch.no_grad():
                results.append(float(engine.model(input_ids=ids[0]).logits.sum()))
            own = micros[2 * engine.data_rank :][:2]
            first, second = (engine.loss(micro) for micro in own)
            engine.backward(*first)
            engine.backward(*second)
            results.append(engine.update().grad_norm)
    return results, messages


@contextmanager
def _labelled(labels: list[str]) -> Iterator[None]:
    def recorded(function: Any, *args: Any, label: str = "") -> None:
        labels.append(label)
        function(*args, label=label)

    with ExitStack() as patches:
        for name in ("all_gather", "all_reduce"):
            replaced = functools.partial(recorded, getattr(capacity, name))
            patches.enter_context(programs.mock.patch.object(capacity, name, replaced))
        yield


def mixed_layers() -> list[str]:
    """The errors of two steps in which the first rank leaves out the first mixture, and the second rank
    another one."""
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True)
    engine, errors = programs.engine_of(task, "dp=2 ep=2 capacity=1"), list[str]()
    blocks: Any = engine.model.model.layers
    blocks[engine.data_rank].mlp.forward = lambda x: x
    for batch in programs.batches(2):
        try:
            engine.step(programs.share_of(batch, engine))
        except plait.PlaitError as error:
            errors.append(str(error))
    return errors


def fewer_tokens() -> str:
    """The error where the number of a layer's tokens does not follow from shapes."""
    task = programs.Task(hf_models.builder("mixtral"), own_loss=True)
    engine, batch = programs.engine_of(task, "dp=2 ep=2 capacity=1"), programs.batches(1)[0]
    engine.step(programs.share_of(batch, engine))
    for block in engine.model.model.layers:
        experts = block.mlp.experts
        forward = experts.forward
        experts.forward = lambda x, chosen, w, forward=forward: F.pad(
            forward(x[1:], chosen[1:], w[1:]), (0, 0, 1, 0)
        )
    try:
        engine.step(programs.share_of(batch, engine))
    except plait.PlaitError as error:
        return str(error)
    return ""
