"""Options of a loss of preferences. The loss itself is in engine/preferences.py."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import ConfigError

PairLossName = Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "kto", "reward"]


@dataclass(frozen=True)
class Preference:
    """A loss of pairs for `parallelize(loss=)`. With d = (chosen - rejected) of log-probabilities summed over
    the trained tokens of a row, each relative to the reference:

    sigmoid  -log sigmoid(beta d): DPO (Rafailov et al. 2023). `label_smoothing`: the fraction of pairs in the
             wrong order, for cDPO (Mitchell 2023)
    robust   its unbiased estimate for that fraction (Chowdhury et al. 2024)
    hinge    max(0, 1 - beta d) (SLiC: Zhao et al. 2023)
    ipo      (d - 1 / (2 beta))^2 (Azar et al. 2024), of means over tokens instead of sums, as in TRL
    orpo     -beta log sigmoid(log odds ratio) of means over tokens, without a reference, and the mean loss of
             the chosen row's tokens (Hong et al. 2024)
    kto      of single answers, each good or bad, of which it takes the first row of two: the second has the
             same prompt and another answer. 1 - sigmoid(beta (r - z)) of a good one with the log-probability
             r, 1 - sigmoid(beta (z - r)) of a bad one; z is the mean of r over the step's second rows, and at
             least 0 (Ethayarajh et al. 2024). Entries `loss_weights` below 0 are those of bad answers;
             `good_weight` and `bad_weight` multiply their losses
    reward   -log sigmoid(difference of scores): of a sequence classification with one label, a reward model,
             by the likelihood of Bradley and Terry (1952), as in InstructGPT (Ouyang et al. 2022); less the
             entry `margin` of a batch (Llama 2: Touvron et al. 2023). No other option

    `sft_weight`: of the mean loss of the chosen row's tokens, added to any of them (Pang et al. 2024); None:
    1 for orpo, else 0. A step's loss is the mean over its pairs. Raises ConfigError.
    """

    loss: PairLossName = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float | None = None
    good_weight: float = 1.0
    bad_weight: float = 1.0

    def __post_init__(self) -> None:
        names = get_args(PairLossName)
        smooths, beta = self.loss in ("sigmoid", "robust"), self.beta
        checks = {
            "loss": (self.loss in names, " | ".join(names), "loss='sigmoid'"),
            "beta": (
                math.isfinite(beta) and beta > 0 and (not self.is_reward or beta == Preference.beta),
                "a number above 0; for loss = reward none",
                "beta=0.1",
            ),
            "label_smoothing": (
                0 <= self.label_smoothing < 0.5 and (smooths or not self.label_smoothing),
                "from 0, below 0.5, with loss = sigmoid or robust",
                "label_smoothing=0.1, or none",
            ),
            "sft_weight": (
                self.sft_weight is None
                or (0 <= self.sft_weight < math.inf and self.loss not in ("kto", "reward")),
                "a number from 0; for loss = kto or reward none",
                "sft_weight=None",
            ),
            **{
                name: (
                    0 < value < math.inf and (value == 1 or self.of_single_answers),
                    "a number above 0; for another loss than kto none",
                    f"{name}=1.0",
                )
                for name, value in (("good_weight", self.good_weight), ("bad_weight", self.bad_weight))
            },
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
        return self.loss not in ("orpo", "reward")

    @property
    def of_single_answers(self) -> bool:
        """True for a loss of single answers, of which a second row is not trained."""
        return self.loss == "kto"

    @property
    def trained_rows(self) -> int:
        """The number of rows of a sample that are trained, of two."""
        return 1 if self.of_single_answers else 2

    @property
    def is_reward(self) -> bool:
        """True for the loss of a reward model's scores."""
        return self.loss == "reward"
