"""Parts of context parallelism without which the numbers are not those of one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.engine import inputs
from plait.models import Numbering, mask_decisions
from plait.models.attention import MaskRule
from plait.parallel.context import attention, kernels, keys, tokens
from support import hf_models, programs
from support.pool import Pool


def _labels_after_division(self: Any, micro: Any) -> Any:
    given = self._sequence, self._method, self._numbering, self.dropout
    own = inputs.own_tokens(micro, self._model, *given)
    return tokens.SharedTokens(inputs.shift_labels(own), own.attention)


def _own_positions(numbering: Numbering, batch: Any, length: int, device: torch.device) -> Tensor:
    if length % 4:  # the run that shows how the model numbers tokens
        return _positions(numbering, batch, length, device)
    run = torch.arange(length // 4)
    return torch.cat([run, run, length // 4 + run, length // 4 + run])[None]


def _backward_by_the_part(gradient: Tensor, block: Any, out: Tensor, lse: Tensor, scores: Any) -> Any:
    return kernels.attend_backward(gradient, block, *kernels.attend(block, scores), scores)


def _own_gradients(self: Any, gradients: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with mock.patch.object(keys, "start_scattered_sum", programs.MUTED["start_scattered_sum"]):
        return _summed(self, gradients, dtype)


def _first_gradients(self: Any, gradients: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (own, *_), _ = list(gradients), dtype
    return own


def _without_window(function: Any) -> MaskRule:
    return replace(_read(function), before=None)


_ONE_DOCUMENT = property(lambda documents: [[(0, documents.starts_BS.shape[1])]])
_summed, _read = keys.GatheredKeys.summed, MaskRule.read
_positions = Numbering.positions
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "labels shifted after division": (inputs.Inputs, "prepared", _labels_after_division),
    "positions of a rank": (Numbering, "positions", _own_positions),
    "log-sum-exp of a block": (attention, "attend_backward", _backward_by_the_part),
    "gradients of keys not summed": (keys.GatheredKeys, "summed", _own_gradients),
    "gradients of the ring not sent": (keys.RingKeys, "summed", _first_gradients),
    "no window": (MaskRule, "read", _without_window),
    "documents see each other": (mask_decisions.Documents, "intervals", _ONE_DOCUMENT),
}


def packed(steps: int) -> list[dict[str, Tensor]]:
    found = programs.batches(steps, sequences=2, length=24)
    for batch in found:
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1)
    return found


def plain(steps: int) -> list[dict[str, Tensor]]:
    return programs.batches(steps, sequences=2, length=24)


def _train(task: programs.Task, plan: str, mutation: str) -> programs.Trace:
    if not mutation:
        return programs.train_task(task, plan)
    with mock.patch.object(*MUTATIONS[mutation]):
        return programs.train_task(task, plan)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_part_is_needed(pool: Pool, mutation: str) -> None:
    """`mistral` has windows of 8 tokens, which are one block; without a window there are two."""
    data: Callable[[int], Any] = packed if "documents" in mutation else plain
    family = "llama" if "log-sum-exp" in mutation else "mistral"
    task = programs.Task(hf_models.builder(family), data, steps=1, own_loss=True)
    plan = f"cp=2 precision=fp64 cp_method={'ring' if 'ring' in mutation else 'allgather'}"
    ours = pool.run(_train, 2, task, plan, "")[0]
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    programs.assert_same(ours, oracle)
    mutated = pool.run(_train, 2, task, plan, mutation)[0]
    with pytest.raises(AssertionError, match=r"differs by|loss or norm"):
        programs.assert_same(mutated, oracle)
