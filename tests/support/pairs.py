"""A batch of pairs of answers, for losses of preferences, and log-probabilities of rows in plain torch."""

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
