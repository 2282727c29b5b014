"""A batch of pairs of answers, for losses of preferences."""

import torch
from torch import Tensor

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
