"""The forward of a training step on one stage of the model: what is sent on, or the loss.

And how many bytes it keeps for backward.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm import Group
from plait.engine.loss import Loss, choose_loss
from plait.errors import ModelError
from plait.models import (
    BlockOutputs,
    StageModule,
    activation_bytes,
    copy_to_meta,
    forward_inputs,
    receiving,
    watch_activations,
)
from plait.parallel import ShardedStage
from plait.parallel.pipeline import DeferredBytes
from plait.parallel.tensor import ParallelLayers
from plait.parallel.tensor.cross_entropy import SINGLE_RANK
from plait.plan import TPPlan


class StageRunner:
    """Runs micro-batches through a stage that an engine trains.

    saved_bytes     what one micro-batch keeps from forward to backward; None before the first
    """

    def __init__(
        self,
        part: StageModule,
        zero: ShardedStage,
        cut: ParallelLayers,
        plan: TPPlan,
        col: Group,
        loss: Loss | None,
        *,
        is_last: bool,
    ) -> None:
        """`plan` says how logits are cut over `col`. `loss`: the user's."""
        self.activation_bytes: int | None = None
        self.part = part
        self.zero = zero
        self.is_last = is_last
        self._is_trusted = False  # it has been seen to compute with its own weights alone
        self._cut = cut
        self._given = loss
        self._columns = plan.logit_columns
        self._col = SINGLE_RANK if self._columns is None else col

    def outputs(self, micro: Mapping[str, Tensor], received: Any = None) -> Any:
        """What the stage returns: the last one what the model does."""
        inputs = forward_inputs(self.part.module, micro)
        is_first = self.part.before is None
        with (
            self.zero.watch_outside_uses(),
            contextlib.nullcontext() if is_first else self.part.receiving(received),
        ):
            found = self.part.module(**inputs)
        if not self._is_trusted:
            self.part.check_taint(found, inputs if is_first else received)
            self._is_trusted = True
        return found

    def summed_loss(self, micro: Mapping[str, Tensor], received: Any = None) -> tuple[Tensor, int | Tensor]:
        """Of the last stage: (the loss summed over targets, their number). Raises ModelError for what is no
        such pair."""
        loss = self.loss()
        with self.zero.watch_outside_uses(), self.logits():
            found = loss(self.outputs(micro, received), micro)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ModelError(
                "a loss is a sum and the number of targets that it sums over",
                given=f"loss returned a {type(found).__name__}",
                hint="return loss_sum, num_targets: the step divides once, by the targets of all ranks",
            )
        return found

    def measured(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward with gradients: the first one is counted."""
        if self.activation_bytes is not None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._measuring()

    @contextlib.contextmanager
    def _measuring(self) -> Any:
        self.zero.point_to_storage()  # the weights' storages, which are no activations
        with watch_activations(self.part.module) as watch:
            yield
        self.activation_bytes = watch.total

    def loss(self) -> Loss:
        return choose_loss(self.part.module, self._given, group=self._col, columns=self._columns)

    def logits(self) -> contextlib.AbstractContextManager[None]:
        """Our own loss takes the logits that this rank has; a user's takes all."""
        return self._cut.keep_logits_sharded() if self._given is None else contextlib.nullcontext()

    def estimated_bytes(
        self, batch_shape: tuple[int, int], device: torch.device, whole: BlockOutputs | None
    ) -> tuple[int, int] | None:
        """Estimate `activation_bytes` for token ids of shape (batch, sequence), and the bytes kept between
        the two parts of a split backward where they are known. `whole`: supplies a later stage's inputs."""
        ids = torch.zeros(batch_shape, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        # Whatever the user's model raises without values (or cannot be copied), it can still be trained.
        with contextlib.suppress(Exception), self.zero.paused(), self.logits():
            twin = copy_to_meta(self.part.module)
            inputs = forward_inputs(twin, batch)
            received: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.part.previous_block is not None:
                assert whole is not None, "a stage without a twin of its model"
                received = receiving(twin, whole.output_of(self.part.previous_block, inputs))

            def run() -> None:
                outputs = twin(**inputs)
                if self.is_last:
                    self.loss()(outputs, batch)

            rest = DeferredBytes()
            with received, rest.recording(twin):
                return activation_bytes(twin, run, device), rest.total
        return None
