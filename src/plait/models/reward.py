"""The score of a reward model: a sequence classification with one label, read at the last token of a row.

[Note: last token by the attention mask]
transformers computes a score for each token, and reads that of the last one whose id is not `pad_token_id`.
If that is also the end of a text, as in many tokenizers, it reads the token before; without the id it refuses
several rows. So the scores of a row are replaced by the one of its last token in the attention mask, before
transformers reads one of them, and it is the same whatever the id.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plait.models.task import Task, pretrained_base, task_of

SCORE = "score"  # the layer's name, in all decoders of transformers but two


def is_reward_model(model: nn.Module) -> bool:
    """Return whether it is a decoder with one score for each token."""
    base = pretrained_base(model)
    if base is None or task_of(model) is not Task.SEQUENCE_CLASSIFICATION:
        return False
    return base.config.num_labels == 1 and isinstance(getattr(base, SCORE, None), nn.Module)


class LastTokenScore:
    """Makes a model's output the scores of last tokens. See [Note: last token by the attention mask]."""

    def __init__(self) -> None:
        self._mask_BS: Tensor | None = None  # of the forward that runs
        self._lacks_id = False

    def watch(self, model: nn.Module) -> None:
        """Select in the forwards of this model, or of its last stage, and of its copies."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        getattr(pretrained_base(model), SCORE).register_forward_hook(self._select)
        model.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, _: Any) -> "LastTokenScore":
        return self

    def _begin(self, model: nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        self._mask_BS, config = inputs.get("attention_mask"), text_config(model)
        self._lacks_id = config.pad_token_id is None
        if self._lacks_id:  # any id will do
            config.pad_token_id = 0

    def _select(self, _: nn.Module, __: Any, scores_BS1: Tensor) -> Tensor:
        if self._mask_BS is None:
            return scores_BS1[:, -1:].expand_as(scores_BS1)
        columns_S = torch.arange(self._mask_BS.shape[1], device=scores_BS1.device)
        last_B11 = (columns_S * (self._mask_BS != 0)).argmax(1)[:, None, None]
        return scores_BS1.gather(1, last_B11).expand_as(scores_BS1)

    def _end(self, model: nn.Module, _: Any, __: Any) -> None:
        self._mask_BS = None
        if self._lacks_id:
            text_config(model).pad_token_id = None


def text_config(model: nn.Module) -> Any:
    """Return the configuration that has the model's `pad_token_id`."""
    base: Any = pretrained_base(model)
    return base.config.get_text_config()
