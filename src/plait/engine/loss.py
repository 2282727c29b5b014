"""The loss of a step: a sum over targets and their count, so that it is divided once, by the count of all
ranks.

# S sequence  V vocabulary  B batch
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Group
from plait.errors import ModelError
from plait.models import is_pretrained_model
from plait.parallel.tensor.cross_entropy import SINGLE_RANK, cross_entropy

# (outputs of the model, micro-batch) -> (loss summed over its targets, number of targets)
Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, int | Tensor]]

IGNORED = -100  # labels with this value are not targets, as in transformers


def choose_loss(
    model: nn.Module,
    loss: Loss | None,
    *,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
) -> Loss:
    """The user's loss, else that of a causal language model. Raises ModelError if neither applies.

    The latter takes logits sharded over the vocabulary: `columns` are (start, stop) of each rank of `group`.
    None: full logits.
    """
    if loss is not None:
        return loss
    if not is_pretrained_model(model) or model.get_output_embeddings() is None:
        raise ModelError(
            "this model has no default loss",
            given=type(model).__name__,
            expected="a Hugging Face causal language model, or loss=",
            hint="parallelize(..., loss=lambda outputs, batch: (summed_loss, number_of_targets))",
        )
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "the model's auxiliary router loss is not part of the loss over tokens",
            given="output_router_logits=True",
            hint="output_router_logits=False, or loss= with the auxiliary term in it",
        )
    return partial(causal_lm_loss, group=group, columns=columns)


def causal_lm_loss(
    outputs: Any,
    batch: Mapping[str, Tensor],
    *,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the next token, summed. `labels` (B, S) are shifted here; -100 is ignored.

    Computed in float32 or wider, for any dtype of logits; see `choose_loss` for sharded ones. Raises
    ModelError without labels, or for a label outside the vocabulary.
    """
    if "labels" not in batch:
        raise ModelError(
            "the batch has no labels to compute a loss from",
            given=f"a batch with {', '.join(batch)}",
            expected="labels: the input_ids, with -100 at positions without a target",
        )
    logits_BSV, labels_BS = outputs.logits, batch["labels"]
    targets = F.pad(labels_BS, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
    columns = columns or [(0, logits_BSV.shape[-1])]
    total = cross_entropy(logits_BSV.flatten(0, 1), targets, group, columns, ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()
