"""The forward of a training step: the model and its loss, and how many bytes it keeps for backward."""

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plait.comm import Group
from plait.errors import ModelError
from plait.models import ALONE, Loss, choose_loss, forward_inputs, meta_twin, saved_bytes, watch_saved
from plait.parallel import Zero
from plait.parallel.tensor import CutLayers
from plait.plan import TensorPlan


class Forward:
    """Runs micro-batches through a model that an engine trains.

    saved_bytes     what one micro-batch keeps from forward to backward; None before the first
    """

    def __init__(
        self, model: nn.Module, zero: Zero, cut: CutLayers, plan: TensorPlan, col: Group, loss: Loss | None
    ) -> None:
        """`plan` says how logits are cut over `col`. `loss`: the user's."""
        self.saved_bytes: int | None = None
        self._model = model
        self._zero = zero
        self._cut = cut
        self._given = loss
        self._columns = plan.logit_columns
        self._col = ALONE if self._columns is None else col

    def __call__(self, micro: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        """`summed_loss`; the first with gradients is measured."""
        if self.saved_bytes is not None or not torch.is_grad_enabled():
            return self.summed_loss(micro)
        self._zero.show()  # the weights' storages, which are no activations
        with watch_saved(self._model) as watch:
            result = self.summed_loss(micro)
        self.saved_bytes = watch.total
        return result

    def summed_loss(self, micro: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        """(the loss summed over targets, their number). Raises ModelError for what is no such pair."""
        loss = self._loss()
        with self._zero.watching(), self._logits():
            found = loss(self._model(**forward_inputs(self._model, micro)), micro)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ModelError(
                "a loss is a sum and the number of targets that it sums over",
                given=f"loss returned a {type(found).__name__}",
                hint="return loss_sum, num_targets: the step divides once, by the targets of all ranks",
            )
        return found

    def foretold_bytes(self, batch_shape: tuple[int, int], device: torch.device) -> int | None:
        """What `saved_bytes` will be for token ids of this (batch, sequence) shape, if that can be told."""
        ids = torch.zeros(batch_shape, dtype=torch.long, device="meta")
        # Whatever the user's model raises without values (or cannot be copied), it can still be trained.
        with contextlib.suppress(Exception), self._zero.paused(), self._logits():
            twin = meta_twin(self._model)
            return saved_bytes(twin, self._loss(), {"input_ids": ids, "labels": ids}, device)
        return None

    def _loss(self) -> Loss:
        return choose_loss(self._model, self._given, group=self._col, columns=self._columns)

    def _logits(self) -> contextlib.AbstractContextManager[None]:
        """Our own loss takes the logits that this rank has; a user's takes all."""
        return self._cut.logits_stay_cut() if self._given is None else contextlib.nullcontext()
