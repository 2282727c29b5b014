"""The loss of a step: a sum over targets and their count, so that it is divided once, by the count of all
ranks.

# B batch  S sequence  V vocabulary  C classes  T targets;  lower case = this rank's shard
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Group
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, Task, pretrained_base, task_of
from plait.parallel.tensor.cross_entropy import SINGLE_RANK, LossBuffers, cross_entropy

# (outputs of the model, micro-batch) -> (loss summed over its targets, number of targets)
Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, int | Tensor]]


_EXPECTED_LABELS = {
    "labels": "labels as the model itself takes them; for a causal language model the input_ids, "
    "with -100 at positions without a target"
}


def choose_loss(
    model: nn.Module,
    loss: Loss | None,
    *,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
    buffers: LossBuffers | None = None,
) -> Loss:
    """The user's loss, or that of a Hugging Face model's task: the loss that the model itself returns, but
    summed over targets instead of averaged. Raises ModelError if neither applies.

    Losses of language models accept logits that are sharded over the vocabulary: `columns` are (start, stop)
    of each rank of `group`. None: full logits. `buffers`: see `cross_entropy`.
    """
    if loss is not None:
        return loss
    base, task = pretrained_base(model), task_of(model)
    if base is None or task is None:
        raise ModelError(
            "this model has no default loss",
            given=type(base or model).__name__,
            expected=f"a Hugging Face model for one of: {', '.join(known.value for known in Task)}; or loss=",
            hint="parallelize(..., loss=lambda outputs, batch: (summed_loss, number_of_targets))",
        )
    if getattr(base.config, "output_router_logits", False):
        raise ModelError(
            "the model's auxiliary router loss is not part of the loss over tokens",
            given="output_router_logits=True",
            expected="the loss over tokens alone",
            hint="output_router_logits=False, or loss= with the auxiliary term in it",
        )
    if task is Task.NGRAM_LM:
        return partial(ngram_loss, base.config, group=group, columns=columns, buffers=buffers)
    if task in (Task.CAUSAL_LM, Task.IMAGE_LM, Task.ALIGNED_LM):
        of_language = image_token_loss if task is Task.IMAGE_LM else token_loss
        shift = task is not Task.ALIGNED_LM
        return partial(of_language, shift=shift, group=group, columns=columns, buffers=buffers)
    if task is Task.QUESTION_ANSWERING:
        return answer_loss
    return (
        token_classification_loss if task is Task.TOKEN_CLASSIFICATION else partial(class_loss, base.config)
    )


def token_loss(
    outputs: Any,
    batch: Mapping[str, Tensor],
    *,
    shift: bool,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
    buffers: LossBuffers | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of tokens, summed. `labels` (B, S): positions with -100 are not targets.

    `shift`: each position predicts the label of the next one. Computed in float32 or wider, for any dtype of
    logits; see `choose_loss` for sharded ones. Raises ModelError for labels that are missing, have another
    shape than the logits, or are outside the vocabulary.
    """
    return _summed(outputs.logits, _labels(batch), shift, group, columns, buffers)


def image_token_loss(outputs: Any, batch: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """`token_loss` of the last positions, as many as labels: those of an image are before them."""
    labels_BS = _labels(batch)
    return _summed(outputs.logits[:, -labels_BS.shape[1] :], labels_BS, **options)


def ngram_loss(
    config: Any, outputs: Any, batch: Mapping[str, Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    """Cross entropy of ProphetNet's n-grams, summed: each label is the target of `ngram` positions, of which
    n - 1 are in `logits_ngram` (B, n - 1, S, V); smoothed by `config.eps`."""
    labels_BS, smoothing = _labels(batch), config.eps
    total, count = _summed(outputs.logits, labels_BS, False, **options, label_smoothing=smoothing)
    if config.disable_ngram_loss:
        return total, count
    for n in range(config.ngram - 1):
        logits_BSV = outputs.logits_ngram[:, n]
        total = total + _summed(logits_BSV, labels_BS, False, **options, label_smoothing=smoothing)[0]
    return total, count * config.ngram


def _summed(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    shift: bool,
    group: Group,
    columns: Sequence[tuple[int, int]] | None,
    buffers: LossBuffers | None,
    *,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _check_shape(labels_BS, logits_BSV.shape[:-1], "one per position of the logits")
    if shift:
        labels_BS = F.pad(labels_BS, (0, 1), value=IGNORED_LABEL)[:, 1:]
    targets = labels_BS.reshape(-1)
    columns = columns or [(0, logits_BSV.shape[-1])]
    logits_TV = logits_BSV.flatten(0, 1)
    total = cross_entropy(
        logits_TV,
        targets,
        group,
        columns,
        ignore_index=IGNORED_LABEL,
        label_smoothing=label_smoothing,
        buffers=buffers,
    )
    return total, (targets != IGNORED_LABEL).sum()


def token_classification_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of tokens' classes, summed. `labels` (B, S): positions with -100 are not targets."""
    logits_BSC, labels_BS = outputs.logits, _labels(batch)
    _check_shape(labels_BS, logits_BSC.shape[:-1], "one per position of the logits")
    return _cross_entropy(logits_BSC.flatten(0, -2), labels_BS.reshape(-1))


def class_loss(config: Any, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
    """The loss of a sequence's classes by the configuration's `problem_type`, summed over samples and, except
    for a single label, over classes.

    `labels`: (B,) of a single label, (B, C) of several or of a regression. Without a `problem_type`, one
    class means a regression, and integers a single label, as in transformers.
    """
    logits_BC, labels = outputs.logits, _labels(batch)
    problem = config.problem_type
    if problem is None:
        is_single = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if is_single else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else problem
    if problem == "single_label_classification":
        _check_shape(labels.reshape(-1), logits_BC.shape[:1], "one per sample")
        return _cross_entropy(logits_BC, labels.reshape(-1))
    if config.num_labels == 1:
        labels = labels.reshape(-1, 1)
    _check_shape(labels, logits_BC.shape, "one per sample and class")
    wide = _widened(logits_BC)
    if problem == "regression":
        return F.mse_loss(wide, labels.to(wide.dtype), reduction="sum"), labels.numel()
    return F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="sum"), labels.numel()


def answer_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of the positions at which answers start and end, summed over both. A position after the
    end of the sequence is not a target.

    If as many starts as ends are targets, the mean is the same as in transformers, the mean of two means.
    """
    total, count = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for key in ("start", "end"):
        logits_BS = getattr(outputs, f"{key}_logits")
        positions = _labels(batch, f"{key}_positions").reshape(-1)
        _check_shape(positions, logits_BS.shape[:1], "one per sample")
        is_inside = positions.clamp(min=0) < logits_BS.shape[1]
        targets = torch.where(is_inside, positions.clamp(min=0), IGNORED_LABEL)
        summed, targets_of_key = _cross_entropy(logits_BS, targets)
        total, count = total.to(summed) + summed, count.to(targets_of_key) + targets_of_key
    return total, count


def _cross_entropy(logits_TC: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    columns = [(0, logits_TC.shape[-1])]
    total = cross_entropy(logits_TC, targets_T, SINGLE_RANK, columns, ignore_index=IGNORED_LABEL)
    return total, (targets_T != IGNORED_LABEL).sum()


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _labels(batch: Mapping[str, Tensor], key: str = "labels") -> Tensor:
    if key not in batch:
        raise ModelError(
            f"the batch has no {key} to compute a loss from",
            given=f"a batch with {', '.join(batch)}",
            expected=_EXPECTED_LABELS.get(key, "start_positions and end_positions"),
            hint="loss=, for a loss that needs no labels",
        )
    return batch[key]


def _check_shape(labels: Tensor, expected: Sequence[int], words: str) -> None:
    if tuple(labels.shape) != tuple(expected):
        raise ModelError(
            "the labels do not fit the model's outputs",
            given=f"labels {tuple(labels.shape)}",
            expected=f"{tuple(expected)}, {words}",
            hint=f"labels.reshape{tuple(expected)}"
            if labels.numel() == math.prod(expected)
            else "labels that are padded like the inputs, or loss=",
        )
