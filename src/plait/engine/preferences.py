"""Losses of preferences: of pairs of rows, of which the first was chosen and the second rejected.

# B rows of a micro-batch, 2 for each pair  P pairs  S sequence, or this rank's tokens of it

[Note: two passes of the head]
A loss of pairs depends on the log-probability of a row, a sum over its tokens, through a sigmoid. So the
head runs twice. The first pass, without gradients, finds the log-probability of each label; these are summed
over the row's tokens, and over the ranks of cp, in float64, and give the pairs' losses and their derivative
by the sum of each row. The second pass is the built-in loss of tokens, weighted by this derivative: its
gradient is that of the pairs' losses. Both passes hold the logits of a few tokens at a time, in this rank's
columns. The cost is a fourth product of the head, next to the three of a loss of tokens.

[Note: answers of other prompts]
KTO compares the log-probability of an answer, relative to the reference, with its mean over answers of other
prompts. That is a number of the step, which the loss of its first micro-batch needs. So forwards of all
second rows come first, without gradients, and the first rows' micro-batches are the step. The mean is over
all data ranks: it depends neither on micro-batches nor on the plan.

[Note: reference]
`reference_log_probs` are those of the labels by the model before training, from `engine.log_probs`: that is
the first pass, of the same micro-batch. As long as the weights are the same, so is each bit, the difference
is 0, and the sigmoid loss is log 2 exactly. They are one number for each token, not for each row, so that
both models' sums have the same order under cp.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import Group, all_reduce
from plait.engine.inputs import divide
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, LOSS_WEIGHTS
from plait.models.task import MARGIN, REFERENCE
from plait.parallel.zero.rank_context import RankGroups
from plait.plan.preference import Preference

ROWS = 2  # of a pair: chosen and rejected, one after the other


def losses_of_rows(
    given: Preference, policy_B: Tensor, reference_B: Tensor, tokens_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each pair's loss, and the rewards (P, 2) of its rows. Log-probabilities are sums over
    `tokens_B` tokens."""
    per_token = given.loss in ("ipo", "orpo")
    length_B = tokens_B.clamp(min=1)
    relative_B = (policy_B - reference_B) / length_B if per_token else policy_B - reference_B
    chosen_P, rejected_P = relative_B.view(-1, ROWS).unbind(1)
    d_P, smoothing = chosen_P - rejected_P, given.label_smoothing
    if given.loss == "ipo":
        losses_P = (d_P - 1 / (2 * given.beta)).square()
    elif given.loss == "hinge":
        losses_P = F.relu(1 - given.beta * d_P)
    elif given.loss == "orpo":
        odds_P = d_P - _log_of_rest(chosen_P) + _log_of_rest(rejected_P)
        losses_P = -given.beta * F.logsigmoid(odds_P)
    else:
        right_P, wrong_P = -F.logsigmoid(given.beta * d_P), -F.logsigmoid(-given.beta * d_P)
        sign = -1 if given.loss == "robust" else 1
        losses_P = right_P
        if smoothing:
            losses_P = (1 - smoothing) * right_P + sign * smoothing * wrong_P
        if given.loss == "robust":
            losses_P = losses_P / (1 - 2 * smoothing)
    weight = float(given.loss == "orpo") if given.sft_weight is None else given.sft_weight
    if weight:
        losses_P = losses_P - weight * (policy_B / length_B).view(-1, ROWS)[:, 0]
    return losses_P, given.beta * relative_B.detach().view(-1, ROWS)


def losses_of_answers(
    given: Preference, relative_B: Tensor, is_good_B: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each answer's loss, and its reward. `relative_B`: log-probabilities relative to the reference;
    `others`: the mean of those of other prompts' answers. See [Note: answers of other prompts]."""
    gain_B = torch.where(is_good_B, relative_B - others, others - relative_B)
    weight_B = torch.where(is_good_B, given.good_weight, given.bad_weight)
    return weight_B * (1 - torch.sigmoid(given.beta * gain_B)), given.beta * relative_B.detach()


def losses_of_scores(scores_P2: Tensor, margin_P: Tensor | None) -> Tensor:
    """Return each pair's loss: its negative log-likelihood (Bradley and Terry 1952) by the scores of its
    rows, whose difference is to be larger than the margin."""
    d_P = scores_P2[:, 0] - scores_P2[:, 1]
    return -F.logsigmoid(d_P if margin_P is None else d_P - margin_P)


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p); of p = 1, that of the largest number below 1."""
    return torch.log(-torch.expm1(log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)))


@dataclass(frozen=True)
class PairResult:
    """Facts about the pairs since the last call of `take`: their number, their trained tokens, the means of
    chosen and rejected rewards, and the share of pairs whose chosen reward is the higher one. Of single
    answers: the means of good and bad ones, and the share of those on the right side of other prompts'."""

    REWARDS: ClassVar = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")

    pairs: int
    num_tokens: int
    chosen_reward: float
    rejected_reward: float
    reward_accuracy: float

    @property
    def reward_margin(self) -> float:
        return self.chosen_reward - self.rejected_reward

    @property
    def rewards(self) -> dict[str, Any]:
        """By their names in metrics."""
        return {name: getattr(self, name) for name in self.REWARDS}

    @property
    def text(self) -> str:
        return f"margin {self.reward_margin:.4f}  right {self.reward_accuracy:.1%} of {self.pairs:,}"


class PairLoss:
    """Computes the loss of micro-batches of pairs, and keeps sums for `take`."""

    def __init__(self, preference: Preference, groups: RankGroups, device: torch.device) -> None:
        self._preference, self._sequence = preference, groups.sequence
        self._world, self._copies = groups.world, groups.tp.size
        self._totals = torch.zeros(7, dtype=torch.float64, device=device)
        self._others = torch.zeros(2, dtype=torch.float64, device=device)  # sum, number
        self._is_of_others = False  # the forward: see `of_others`
        self.is_counted = True  # the forward: see `Pass`

    @property
    def of_single_answers(self) -> bool:
        return self._preference.of_single_answers

    @contextmanager
    def of_others(self, ranks: Group) -> Iterator[None]:
        """Forwards inside are of answers to other prompts, for the loss of those after it; `ranks`: those of
        the mean. Collective. See [Note: answers of other prompts]."""
        self._others.zero_()
        self._is_of_others = True
        try:
            yield
        finally:
            self._is_of_others = False
        all_reduce(self._others, ranks, label="log-probabilities of other answers")

    def __call__(
        self,
        summed: Callable[..., tuple[Tensor, Tensor]],
        statistics: Callable[[Any, Mapping[str, Tensor]], Tensor],
        outputs: Any,
        batch: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """(loss summed over pairs, their number); 0 except on the first rank of `cp`. `summed`: the weighted
        loss of tokens; `statistics`: log-probabilities of labels. See [Note: two passes of the head]."""
        labels_BS = batch["labels"]
        if self._preference.is_reward:
            return self._of_scores(outputs.logits, batch)
        if labels_BS.is_meta:  # an estimate: the second pass is the larger one
            return summed(outputs.logits, labels_BS)
        needs_reference = self._preference.needs_reference
        _check(batch, needs_reference=needs_reference, has_signs=self.of_single_answers)
        with torch.no_grad():
            log_probs_BS = statistics(outputs, batch)[..., 0]
        is_target_BS = labels_BS != IGNORED_LABEL
        zeros_BS = torch.zeros_like(log_probs_BS)
        reference_BS = batch[REFERENCE] if self._preference.needs_reference else zeros_BS
        signs_BS = batch.get(LOSS_WEIGHTS, zeros_BS).sign()
        columns = (log_probs_BS, reference_BS, is_target_BS, signs_BS)
        sums = torch.stack([(each.double() * is_target_BS).sum(1) for each in columns])
        all_reduce(sums, self._sequence, label="loss: sums over the tokens of rows")
        policy_B, (reference_B, tokens_B, signs_B) = sums[0].requires_grad_(), sums[1:]
        of_rows = self._of_answers if self.of_single_answers else self._of_pairs
        with torch.enable_grad():
            value, count = of_rows(policy_B, reference_B, tokens_B, signs_B)
        if self._is_of_others:
            return value.detach(), count
        (slope_B,) = torch.autograd.grad(value, policy_B)
        is_first = self._sequence.rank == 0
        # Its gradient is the pairs'; d loss of a token / d log-probability is -1.
        tokens_loss, _ = summed(outputs.logits, labels_BS, weights=-slope_B[:, None].expand(labels_BS.shape))
        total = tokens_loss - tokens_loss.detach() + (value.detach() if is_first else 0.0)
        return total, count if is_first else torch.zeros_like(count)

    def _of_pairs(
        self, policy_B: Tensor, reference_B: Tensor, tokens_B: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(loss summed over pairs, their number)."""
        losses_P, rewards_P2 = losses_of_rows(self._preference, policy_B, reference_B, tokens_B)
        tokens_P2 = tokens_B.view(-1, ROWS)
        is_pair_P = (tokens_P2 > 0).all(1)
        right_P = rewards_P2[:, 0] > rewards_P2[:, 1]
        is_chosen_P2 = torch.tensor([True, False], device=tokens_P2.device).expand_as(tokens_P2)
        self._add(rewards_P2, tokens_P2, is_chosen_P2, right_P, is_pair_P)
        return (losses_P * is_pair_P).sum(), is_pair_P.sum()

    def _of_answers(
        self, policy_B: Tensor, reference_B: Tensor, tokens_B: Tensor, signs_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of single answers; of other prompts' it keeps the sum. See the note."""
        is_answer_B, is_good_B, relative_B = tokens_B > 0, signs_B >= 0, policy_B - reference_B
        if self._is_of_others:
            found = torch.stack([(relative_B.detach() * is_answer_B).sum(), is_answer_B.sum()])
            self._others += found * self.is_counted
            return found[0], is_answer_B.sum()
        others = (self._others[0] / self._others[1].clamp(min=1)).clamp(min=0)
        losses_B, rewards_B = losses_of_answers(self._preference, relative_B, is_good_B, others)
        right_B = (relative_B > others) == is_good_B
        rewards_B1, tokens_B1, is_good_B1 = (each[:, None] for each in (rewards_B, tokens_B, is_good_B))
        self._add(rewards_B1, tokens_B1, is_good_B1, right_B, is_answer_B)
        return (losses_B * is_answer_B).sum(), is_answer_B.sum()

    def _of_scores(self, scores_B1: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same of a reward model: see `losses_of_scores`."""
        _check(batch, needs_reference=False)
        scores_P2 = scores_B1.to(torch.promote_types(scores_B1.dtype, torch.float32)).view(-1, ROWS)
        tokens_P2 = (batch["labels"] != IGNORED_LABEL).sum(1).view(-1, ROWS)
        is_pair_P = (tokens_P2 > 0).all(1)
        margin_B = batch.get(MARGIN)
        losses_P = losses_of_scores(scores_P2, None if margin_B is None else margin_B.view(-1, ROWS)[:, 0])
        if not scores_B1.is_meta:
            is_chosen_P2 = torch.tensor([True, False], device=scores_P2.device).expand_as(scores_P2)
            right_P = scores_P2[:, 0] > scores_P2[:, 1]
            self._add(scores_P2.detach(), tokens_P2, is_chosen_P2, right_P, is_pair_P)
        return torch.where(is_pair_P, losses_P, 0.0).sum(), is_pair_P.sum()

    def _add(
        self, rewards_PR: Tensor, tokens_PR: Tensor, is_chosen_PR: Tensor, right_P: Tensor, is_used_P: Tensor
    ) -> None:
        """Add P samples of R rows."""
        if not self.is_counted or self._sequence.rank:
            return
        is_used_P1 = is_used_P[:, None]
        chosen_PR, rejected_PR = is_chosen_PR & is_used_P1, ~is_chosen_PR & is_used_P1
        rewards = (rewards_PR * chosen_PR, rewards_PR * rejected_PR)
        sums = (is_used_P, tokens_PR * is_used_P1, right_P & is_used_P, chosen_PR, rejected_PR, *rewards)
        self._totals += torch.stack([each.sum().double() for each in sums])

    def clear(self) -> None:
        """Drop the sums of an unfinished step."""
        self._totals.zero_()

    def take(self) -> PairResult:
        """Return the result of all ranks, and begin again. Collective."""
        totals = self._totals.clone()
        self.clear()
        all_reduce(totals, self._world, label="rewards of pairs")
        pairs, tokens, right, *of_rows = (totals / self._copies).tolist()
        ratios = ((of_rows[2], of_rows[0]), (of_rows[3], of_rows[1]), (right, pairs))
        return PairResult(round(pairs), round(tokens), *(a / b if b else math.nan for a, b in ratios))


def _check(batch: Mapping[str, Tensor], *, needs_reference: bool, has_signs: bool = False) -> None:
    """Raise ModelError for a micro-batch with weights of tokens that are no signs, or without its
    reference."""
    if LOSS_WEIGHTS in batch and not has_signs:
        raise ModelError(
            "pairs have no weights of tokens",
            given=LOSS_WEIGHTS,
            expected="labels alone, -100 where a token is not of the answer",
            hint=f"a batch without {LOSS_WEIGHTS}",
        )
    if needs_reference and REFERENCE not in batch:
        raise ModelError(
            "the batch has no log-probabilities of the reference",
            given=f"a batch with {', '.join(batch)}",
            expected=f"{REFERENCE}, of the model before training",
            hint="plait.with_reference(reference_engine, batch), or loss='orpo'",
        )


def with_reference(reference: Any, batch: Any, given: Preference | None = None) -> Any:
    """Return the batch of a step or an evaluation, or its micro-batches, with `reference_log_probs` by the
    engine of another model, or by the same one before it is trained: see [Note: reference]. Every rank calls
    it, with its share. The engine has the plan of the one that trains, with the loss `given`: for that of
    single answers the rows are computed as the loss computes them."""
    if not isinstance(batch, Mapping):
        return [{**micro, REFERENCE: _log_probs(reference, micro, given)} for micro in batch]
    micros = divide(batch, reference.plan.micro, ROWS)
    return {**batch, REFERENCE: torch.cat([_log_probs(reference, micro, given) for micro in micros])}


def _log_probs(reference: Any, micro: Mapping[str, Tensor], given: Preference | None) -> Tensor:
    if given is None or not given.of_single_answers:
        found: Tensor = reference.log_probs(micro)[0]
        return found
    parts = [{key: value[row::ROWS] for key, value in micro.items()} for row in range(ROWS)]
    of_parts = [reference.log_probs(part)[0] for part in parts]
    return torch.stack(of_parts, 1).flatten(0, 1)
