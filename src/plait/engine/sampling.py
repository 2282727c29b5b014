"""The choice of the next tokens from logits.  # B rows  V vocabulary

[Note: draws]
A row draws one number in [0, 1) for each token, from a generator seeded with (seed, index of the row in the
global batch). It takes the token at which the cumulative probabilities, in the order of the vocabulary, pass
that number. So draws depend on neither the plan nor the batch size.
"""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.plan.sampling import Sampling


class TokenChooser:
    """Chooses the next tokens of a batch's rows."""

    def __init__(self, sampling: Sampling, indices: Sequence[int]) -> None:
        """`indices`: of the rows in the global batch. See [Note: draws]."""
        self._sampling = sampling
        self._draws = [random.Random(f"{sampling.seed} {index}") for index in indices]

    def choose(self, logits_BV: Tensor, seen: Sequence[Sequence[int]]) -> Tensor:
        """Return each row's token and its log-probability, (B, 2) in float64. The latter is the log-softmax
        of the logits themselves: before the penalty, the temperature and the limits. `seen`: each row's
        tokens so far, for the penalty."""
        logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        scores_BV = self._penalized(logits_BV, seen)
        if self._sampling.temperature == 0:
            ids_B1 = scores_BV.argmax(-1, keepdim=True)
        else:
            probabilities_BV = limited(scores_BV, self._sampling).double().softmax(-1)
            draws = [[draw.random()] for draw in self._draws]
            ids_B1 = _drawn(
                probabilities_BV, torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)
            )
        log_probs_B1 = logits_BV.log_softmax(-1).gather(-1, ids_B1)
        return torch.cat([ids_B1.double(), log_probs_B1.double()], -1)

    def _penalized(self, logits_BV: Tensor, seen: Sequence[Sequence[int]]) -> Tensor:
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits_BV
        scores_BV = logits_BV.clone()
        for row_V, ids in zip(scores_BV, seen, strict=True):
            index = torch.tensor(sorted({*ids}), device=row_V.device)
            of_seen = row_V[index]
            row_V[index] = torch.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
        return scores_BV


def limited(scores_BV: Tensor, sampling: Sampling) -> Tensor:
    """Divide scores by the temperature, and give -inf to tokens that the limits leave out."""
    scores_BV = scores_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores_BV.shape[-1]:
        least_B1 = scores_BV.topk(sampling.top_k).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered_BV, order_BV = scores_BV.sort(descending=True)
        probabilities_BV = ordered_BV.softmax(-1)
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV  # the first is always kept
        left_out_BV = (before_BV >= sampling.top_p).scatter(-1, order_BV, before_BV >= sampling.top_p)
        scores_BV = scores_BV.masked_fill(left_out_BV, -math.inf)
    if sampling.min_p:
        probabilities_BV = scores_BV.softmax(-1)
        least_B1 = sampling.min_p * probabilities_BV.max(-1, keepdim=True).values
        scores_BV = scores_BV.masked_fill(probabilities_BV < least_B1, -math.inf)
    return scores_BV


def _drawn(probabilities_BV: Tensor, draws_B1: Tensor) -> Tensor:
    """See [Note: draws]. A token without probability is never drawn, and any token of probabilities that are
    NaN."""
    sums_BV = probabilities_BV.cumsum(-1)
    totals_B1 = sums_BV[:, -1:].contiguous()
    found_B1 = torch.searchsorted(sums_BV, draws_B1 * totals_B1, right=True)
    last_B1 = torch.searchsorted(sums_BV, totals_B1)  # with a probability
    return found_B1.minimum(last_B1).clamp(max=sums_BV.shape[-1] - 1)
