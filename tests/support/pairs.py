"""A batch of pairs of answers, for losses of preferences, and log-probabilities of rows in plain torch."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import programs

PAIRS, LENGTH = 8, 16


def pairs() -> dict[str, Tensor]:
    """Rows of uneven length: chosen and rejected of each pair; one pair has no trained token left."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, programs.VOCABULARY, (2 * PAIRS, LENGTH), generator=generator)
    columns = torch.arange(LENGTH)
    prompt = torch.randint(1, 5, (PAIRS,), generator=generator).repeat_interleave(2)
    ends = torch.randint(6, LENGTH + 1, (2 * PAIRS,), generator=generator)
    inside = columns < ends[:, None]
    labels = ids.masked_fill((columns < prompt[:, None]) | ~inside, -100)
    labels[5] = -100
    return {"input_ids": ids.masked_fill(~inside, 0), "labels": labels, "attention_mask": inside.long()}


def row_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-probability of each row, and the number of its tokens, in plain torch."""
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    log_probs = model(**given).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    chosen = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    return chosen.sum(1), (labels != -100).sum(1)


def check_steps(
    ranks: Iterable[Any], loss: float, gradients: Mapping[str, Tensor], facts: Mapping[str, float]
) -> None:
    """Compare what each rank found with a loss by hand, its gradients, and facts about its samples: a step,
    full gradients, which some ranks have, an evaluation, and the results of `engine.pairs` of both."""
    owners = 0
    for step, found, evaluated, before, during in ranks:
        assert step.loss == pytest.approx(loss, rel=1e-9)
        assert step.num_tokens == evaluated.num_tokens == facts["pairs"]
        assert evaluated.loss_sum / evaluated.num_tokens == pytest.approx(loss, rel=1e-9)
        for key, value in facts.items():
            assert getattr(during, key) == pytest.approx(value, rel=1e-9), key
            assert getattr(before, key) == pytest.approx(value, rel=1e-9), key
        if found:
            owners += 1
            assert found.keys() == gradients.keys()
            assert all(torch.allclose(found[key], gradients[key], rtol=1e-9, atol=1e-12) for key in found)
    assert owners
