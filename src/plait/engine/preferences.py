"""Losses of preferences: of pairs of rows, of which the first was chosen and the second rejected.

# B rows of a micro-batch, 2 for each pair  P pairs  S sequence;  lower case = this rank's tokens (s: over `cp`)

[Note: two passes of the head]
A loss of pairs depends on the log-probability of a row, a sum over its tokens, through a sigmoid. So the
head runs twice. The first pass, without gradients, finds the log-probability of each label; these are summed
over the row's tokens, and over the ranks of cp, in float64, and give the pairs' losses and their derivative
by the sum of each row. The second pass is the built-in loss of tokens, weighted by this derivative: its
gradient is that of the pairs' losses. Both passes hold the logits of a few tokens at a time, in this rank's
columns. The cost is a fourth product of the head, next to the three of a loss of tokens.

[Note: reference]
`reference_log_probs` are those of the labels by the model before training, from `engine.log_probs`: that is
the first pass, of the same micro-batch. As long as the weights are the same, so is each bit, the difference
is 0, and the sigmoid loss is log 2 exactly. They are one number for each token, not for each row, so that
both models' sums have the same order under cp.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import all_reduce
from plait.errors import ConfigError, ModelError
from plait.models import IGNORED_LABEL, LOSS_WEIGHTS
from plait.models.task import REFERENCE
from plait.parallel.zero.rank_context import RankGroups

ROWS = 2  # of a pair: chosen and rejected, one after the other
PairLossName = Literal["sigmoid", "ipo", "hinge", "robust", "orpo"]


@dataclass(frozen=True)
class Preference:
    """A loss of pairs for `parallelize(loss=)`. With d = (chosen - rejected) of log-probabilities summed over
    the trained tokens of a row, each relative to the reference:

    sigmoid  -log sigmoid(beta d): DPO (Rafailov et al. 2023). `label_smoothing`: the fraction of pairs in the
             wrong order, for cDPO (Mitchell 2023)
    robust   its unbiased estimate for that fraction (Chowdhury et al. 2024, equation 12)
    hinge    max(0, 1 - beta d) (SLiC: Zhao et al. 2023)
    ipo      (d - 1 / (2 beta))^2, of means over tokens instead of sums (Azar et al. 2024)
    orpo     -beta log sigmoid(log odds ratio) of means over tokens, without a reference, and the mean loss of
             the chosen row's tokens (Hong et al. 2024)

    `sft_weight`: of the mean loss of the chosen row's tokens, added to any of them (Pang et al. 2024); None: 1
    for orpo, else 0. A step's loss is the mean over its pairs. Raises ConfigError.
    """

    loss: PairLossName = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float | None = None

    def __post_init__(self) -> None:
        names = get_args(PairLossName)
        smooths, beta = self.loss in ("sigmoid", "robust"), self.beta
        checks = {
            "loss": (self.loss in names, " | ".join(names), "loss='sigmoid'"),
            "beta": (math.isfinite(beta) and beta > 0, "a number above 0", "beta=0.1"),
            "label_smoothing": (
                0 <= self.label_smoothing < 0.5 and (smooths or not self.label_smoothing),
                "from 0, below 0.5, with loss = sigmoid or robust",
                "label_smoothing=0.1, or none",
            ),
            "sft_weight": (
                self.sft_weight is None or 0 <= self.sft_weight < math.inf,
                "a number from 0",
                "sft_weight=1.0",
            ),
        }
        for name, (is_valid, expected, hint) in checks.items():
            if not is_valid:
                raise ConfigError(
                    f"{name} is not valid for a loss of pairs",
                    given=f"loss={self.loss!r} {name}={getattr(self, name)!r}",
                    expected=expected,
                    hint=hint,
                )

    @property
    def needs_reference(self) -> bool:
        return self.loss != "orpo"

    def of_rows(self, policy_B: Tensor, reference_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return each pair's loss, and the rewards (P, 2) of its rows. Log-probabilities are sums over
        `tokens_B` tokens."""
        per_token = self.loss in ("ipo", "orpo")
        length_B = tokens_B.clamp(min=1)
        relative_B = (policy_B - reference_B) / length_B if per_token else policy_B - reference_B
        chosen_P, rejected_P = relative_B.view(-1, ROWS).unbind(1)
        d_P, smoothing = chosen_P - rejected_P, self.label_smoothing
        if self.loss == "ipo":
            losses_P = (d_P - 1 / (2 * self.beta)).square()
        elif self.loss == "hinge":
            losses_P = F.relu(1 - self.beta * d_P)
        elif self.loss == "orpo":
            odds_P = d_P - _log_of_rest(chosen_P) + _log_of_rest(rejected_P)
            losses_P = -self.beta * F.logsigmoid(odds_P)
        else:
            right_P, wrong_P = -F.logsigmoid(self.beta * d_P), -F.logsigmoid(-self.beta * d_P)
            sign = -1 if self.loss == "robust" else 1
            losses_P = right_P
            if smoothing:
                losses_P = (1 - smoothing) * right_P + sign * smoothing * wrong_P
            if self.loss == "robust":
                losses_P = losses_P / (1 - 2 * smoothing)
        weight = float(self.loss == "orpo") if self.sft_weight is None else self.sft_weight
        if weight:
            losses_P = losses_P - weight * (policy_B / length_B).view(-1, ROWS)[:, 0]
        return losses_P, self.beta * relative_B.detach().view(-1, ROWS)


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p); of p = 1, that of the largest number below 1."""
    return torch.log(-torch.expm1(log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)))


class PairResult(NamedTuple):
    """Of the pairs since the last call of `take`: their number, their trained tokens, the means of chosen and
    rejected rewards, and the share of pairs whose chosen reward is the higher one."""

    pairs: int
    tokens: int
    chosen_reward: float
    rejected_reward: float
    reward_accuracy: float

    @property
    def reward_margin(self) -> float:
        return self.chosen_reward - self.rejected_reward


class PairLoss:
    """Computes the loss of micro-batches of pairs, and keeps sums for `take`."""

    def __init__(self, preference: Preference, groups: RankGroups, device: torch.device) -> None:
        self._preference, self._sequence = preference, groups.sequence
        self._world, self._copies = groups.world, groups.tp.size
        self._totals = torch.zeros(5, dtype=torch.float64, device=device)

    def __call__(
        self,
        summed: Callable[..., tuple[Tensor, Tensor]],
        statistics: Callable[[Any, Mapping[str, Tensor]], Tensor],
        outputs: Any,
        batch: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """(loss summed over pairs, their number), of which the first rank of `sequence` has both. `summed`: the
        weighted loss of tokens; `statistics`: log-probabilities of labels. See
        [Note: two passes of the head]."""
        labels_BS = batch["labels"]
        if labels_BS.is_meta:  # an estimate: the second pass is the larger one
            return summed(outputs.logits, labels_BS)
        _check(batch, needs_reference=self._preference.needs_reference)
        with torch.no_grad():
            log_probs_BS = statistics(outputs, batch)[..., 0]
        is_target_BS = labels_BS != IGNORED_LABEL
        columns = [log_probs_BS, is_target_BS]
        if self._preference.needs_reference:
            columns.insert(1, batch[REFERENCE])
        sums = torch.stack([(each.double() * is_target_BS).sum(1) for each in columns])
        all_reduce(sums, self._sequence, label="loss: sums over the tokens of rows")
        policy_B, tokens_B = sums[0].requires_grad_(), sums[-1]
        reference_B = sums[1] if self._preference.needs_reference else torch.zeros_like(tokens_B)
        is_pair_P = (tokens_B.view(-1, ROWS) > 0).all(1)
        with torch.enable_grad():
            losses_P, rewards_P2 = self._preference.of_rows(policy_B, reference_B, tokens_B)
            value = (losses_P * is_pair_P).sum()
            (slope_B,) = torch.autograd.grad(value, policy_B)
        count = is_pair_P.sum()
        is_first = self._sequence.rank == 0
        if is_first:
            self._add(rewards_P2, tokens_B.view(-1, ROWS), is_pair_P)
        # Its gradient is the pairs'; d loss of a token / d log-probability is -1.
        tokens_loss, _ = summed(outputs.logits, labels_BS, weights=-slope_B[:, None].expand(labels_BS.shape))
        total = tokens_loss - tokens_loss.detach() + (value.detach() if is_first else 0.0)
        return total, count if is_first else torch.zeros_like(count)

    def _add(self, rewards_P2: Tensor, tokens_P2: Tensor, is_pair_P: Tensor) -> None:
        chosen_P, rejected_P = (rewards_P2 * is_pair_P[:, None]).unbind(1)
        right_P = (chosen_P > rejected_P) & is_pair_P
        sums = (is_pair_P, tokens_P2 * is_pair_P[:, None], chosen_P, rejected_P, right_P)
        self._totals += torch.stack([each.sum().double() for each in sums])

    def take(self) -> PairResult:
        """Return the result of all ranks, and forget it. Collective."""
        totals = self._totals.clone()
        self._totals.zero_()
        all_reduce(totals, self._world, label="rewards of pairs")
        pairs, tokens, *sums = (totals / self._copies).tolist()
        return PairResult(
            round(pairs), round(tokens), *(each / pairs if pairs else math.nan for each in sums)
        )


def _check(batch: Mapping[str, Tensor], *, needs_reference: bool) -> None:
    """Raise ModelError for a micro-batch without pairs or their reference."""
    rows = len(batch["labels"])
    if rows % ROWS:
        raise ModelError(
            "a micro-batch has half a pair",
            given=f"{rows} rows",
            expected="the chosen row of each pair, followed by its rejected row",
            hint="a batch of pairs that plan.micro and the data ranks divide",
        )
    if LOSS_WEIGHTS in batch:
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


def with_reference(reference: Any, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> Any:
    """The batch as a list of micro-batches, for `engine.step`, with `reference_log_probs` by the engine of
    another model, or by the same one before it is trained: see [Note: reference]. Every rank calls it, with
    its share. The engine has the plan of the one that trains."""
    if isinstance(batch, Mapping):
        rows = len(next(iter(batch.values())))
        size = ROWS * -(-rows // (ROWS * reference.plan.micro))
        parts = {key: value.split(size) for key, value in batch.items()}
        batch = [{key: of[number] for key, of in parts.items()} for number in range(-(-rows // size))]
    return [{**micro, REFERENCE: reference.log_probs(micro)[0]} for micro in batch]
