"""The loss of a distillation: that of the labels, and the divergence from a teacher's likeliest tokens.

# B batch  S sequence  K of the teacher's likeliest tokens  C = K + 1 classes  T tokens

[Note: likeliest tokens]
A teacher's logits of all tokens are as large as the student's, and under tp each rank has columns of them.
Batches have the teacher's K likeliest tokens of each position instead, with their log-probabilities and that
of all other tokens together, at the temperature of the loss. They are the same on all ranks of a model: ranks
of tp send K candidates for each token, never their columns. They are entries of tokens, so they are divided
and shifted as labels are.

The divergence is that of K + 1 classes, a lower bound of that of all tokens (merging classes never raises
it), and 0 where the models agree. A teacher's K probabilities that are divided by their sum would have no
such minimum: the student's others would be pushed to 0. The operator of the cross entropy has K targets and
the rest in place of one target. The teacher's entropy, which has no gradient, makes it a divergence.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.engine.inputs import divide
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, LOSS_WEIGHTS
from plait.models.task import TEACHER, TEACHER_IDS
from plait.parallel.tensor.cross_entropy import SoftTargets
from plait.plan.distillation import Distillation

_PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0}  # terms of the labels' loss


def distilled_loss(
    given: Distillation,
    summed: Callable[..., tuple[Tensor, Tensor]],
    outputs: Any,
    batch: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """(loss summed over targets, their number). `summed`: the cross entropy of tokens. With `loss_weights`,
    the sums are weighted. Raises ModelError for a batch without the teacher's tokens."""
    labels_BS, weights_BS = batch["labels"], batch.get(LOSS_WEIGHTS)
    total, count = summed(outputs.logits, labels_BS, weights=weights_BS)
    if labels_BS.is_meta:  # an estimate: the second pass holds as much
        return total, count
    if not {TEACHER, TEACHER_IDS} <= batch.keys():
        raise ModelError(
            "the batch has no tokens of the teacher",
            given=f"a batch with {', '.join(batch)}",
            expected=f"{TEACHER_IDS} and {TEACHER}, of each position",
            hint="plait.with_teacher(teacher_engine, batch, loss)",
        )
    temperature = given.temperature
    is_target_T = labels_BS.flatten() != IGNORED_LABEL
    log_probs_TC = batch[TEACHER].flatten(0, 1)
    probs_TC = log_probs_TC.exp() * is_target_T[:, None]
    soft = SoftTargets(batch[TEACHER_IDS].flatten(0, 1), probs_TC[:, :-1], probs_TC[:, -1])
    crossed, _ = summed(outputs.logits / temperature, labels_BS, weights=weights_BS, soft=soft, **_PLAIN)
    weights_T = is_target_T if weights_BS is None else is_target_T * weights_BS.flatten()
    entropies_T = torch.where(probs_TC > 0, probs_TC * log_probs_TC, 0.0).sum(1)
    divergence = crossed + (entropies_T * weights_T).sum()
    return (1 - given.weight) * total + given.weight * temperature**2 * divergence, count


def with_teacher(teacher: Any, batch: Any, given: Distillation) -> Any:
    """Return the batch of a step, or its micro-batches, with the likeliest tokens of each label's position by
    the engine of another model with the same vocabulary, and their log-probabilities: see
    [Note: likeliest tokens]. Every rank calls it, with its share. The engine has the plan of the one that
    trains, with the loss `given`."""
    if not isinstance(batch, Mapping):
        return [_with_tokens(teacher, micro, given) for micro in batch]
    micros = [_with_tokens(teacher, micro, given) for micro in divide(batch, teacher.plan.micro)]
    return {key: torch.cat([micro[key] for micro in micros]) for key in micros[0]}


def _with_tokens(teacher: Any, micro: Mapping[str, Tensor], given: Distillation) -> dict[str, Tensor]:
    (found_BSN,) = teacher.label_statistics([micro], distillation=given)
    number = found_BSN.shape[-1] // 2
    return {**micro, TEACHER_IDS: found_BSN[..., :number].long(), TEACHER: found_BSN[..., number:]}
