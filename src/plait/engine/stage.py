"""The forward of one stage: its outputs, or the loss on the last stage; and the bytes it keeps for
backward."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group
from plait.engine.inputs import prepared
from plait.engine.loss import Loss, LossReads, choose_loss, label_statistics
from plait.engine.preferences import PairLoss
from plait.engine.routers import PLAIN, Pass, StageRouters
from plait.errors import ModelError
from plait.models import (
    BlockOutputs,
    RecordedBatch,
    StageModule,
    activation_bytes,
    copy_to_meta,
    decided_on_cpu,
    forward_inputs,
    label_keys,
    receiving,
    running_on_meta,
    token_batch,
    watch_activations,
)
from plait.models.caches import StageCache, experts_left_out
from plait.models.routing import choices_by
from plait.models.task import ROUTING
from plait.parallel.context.tokens import SharedTokens, attention_of
from plait.parallel.pipeline.split_backward import DeferredBytes
from plait.parallel.tensor.cross_entropy import SINGLE_RANK, LossBuffers
from plait.parallel.tensor.linear import HeadOutput
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.sequence_forward import map_hidden_output
from plait.parallel.zero.parameter import UnitParameter, has_hooks
from plait.parallel.zero.sharded_model import ShardedStage
from plait.plan.distillation import Distillation


class StageRunner:
    """Runs micro-batches through a stage.

    activation_bytes    what one micro-batch keeps from forward to backward; None before the first
    """

    def __init__(
        self,
        part: StageModule,
        sharded: ShardedStage,
        head: HeadOutput,
        columns: Sequence[tuple[int, int]] | None,
        col: Group,
        tp: Group,
        loss: Loss | None,
        terms: Mapping[str, Any],
        tokens: SequenceShard | None,
        divide: Callable[[Mapping[str, Tensor], nn.Module], Mapping[str, Tensor]],
        routers: StageRouters,
        *,
        is_last: bool,
    ) -> None:
        """`columns`: (start, stop) of each rank of `col` in the logits, if they are sharded. `tp`: the ranks
        that hold shards of the model. `loss`: the user's. `terms`: of the built-in loss in training; `pairs`
        always. `tokens`: under sequence parallelism.
        `divide`: takes this rank's tokens of a prepared batch for a model."""
        self.activation_bytes: int | None = None
        self.loss_buffers = LossBuffers("")  # measured
        self.estimated_loss_bytes = 0  # by `estimated_bytes`
        self.module_part = part
        self.sharded = sharded
        in_blocks = {id(module) for _, block in part.blocks for module in block.modules()}
        outside = (module for module in part.module.modules() if id(module) not in in_blocks)
        self._embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
        self.routers = routers
        self.is_last = is_last
        self._is_checked = False  # its outputs were checked to use only its own weights
        self._checked_entries: set[frozenset[str]] = set()  # keys of batches
        self._head = head
        self._user_loss, self._terms = loss, terms
        self.pairs: PairLoss | None = terms.get("pairs")
        self._tokens = tokens
        self._divide = divide
        self._columns = columns
        self._loss_reads = LossReads(tp)
        self._col = SINGLE_RANK if self._columns is None else col

    def outputs(
        self,
        micro: Mapping[str, Tensor],
        received: Any = None,
        kind: Pass = PLAIN,
        others: Mapping[str, Any] | None = None,
    ) -> Any:
        """The stage's outputs: those of the model on the last stage. `others`: more arguments of forward."""
        received = self.routers.received(received)
        inputs = forward_inputs(self.module_part.module, {**micro, **(others or {})})
        inputs = self.routers.without_choices(inputs)
        is_first = not self.module_part.earlier
        if self._tokens is not None:
            received = self._tokens.receive(received)
        with (
            self.sharded.unsharder.watch_outside_uses(),
            attention_of(micro),
            choices_by(micro.get(ROUTING) if self.routers.layers else None),
            contextlib.nullcontext() if is_first else receiving(self.module_part.module, received),
            self.routers.watching(micro, kind),
        ):
            outputs = self._forward(inputs, micro)
        if not self._is_checked:
            self.module_part.check_taint(
                outputs if self._head.result is None else self._head.result, inputs if is_first else received
            )
            self._is_checked = True
        outputs = outputs if self._tokens is None else self._tokens.message(outputs)
        return outputs if self.is_last else self.routers.message(outputs)

    def _forward(self, inputs: Mapping[str, Any], micro: Mapping[str, Tensor]) -> Any:
        try:
            with decided_on_cpu(inputs), _no_fused_encoder(), self._sparse_gradients():
                return self.module_part.module(**inputs)
        except Exception as error:
            ignored = [key for key in micro if key not in (*inputs, *label_keys(self.module_part.module))]
            if ignored:  # such as a misspelt argument, without which forward fails
                error.add_note(f"(forward does not take these entries of the batch: {', '.join(ignored)})")
            raise

    @contextlib.contextmanager
    def _sparse_gradients(self) -> Iterator[None]:
        """Let embeddings compute gradients of the rows that they read, which units add as such: a dense
        gradient has all rows of the vocabulary. Not on GPUs, where a sparse one waits for the host."""
        changed = [each for each in self._embeddings if _may_be_sparse(each)]
        for each in changed:
            each.sparse = True
        try:
            yield
        finally:
            for each in changed:
                each.sparse = False

    def summed_loss(
        self, micro: Mapping[str, Tensor], received: Any = None, kind: Pass = PLAIN
    ) -> tuple[Tensor, int | Tensor]:
        """On the last stage: (loss summed over targets, number of targets). Raises ModelError for anything
        else."""
        if self.pairs is not None:
            self.pairs.is_counted = kind.is_counted and not kind.is_first
        loss = partial(self._call, self.loss(), batch=micro)
        with self.sharded.unsharder.watch_outside_uses(), self._head.calling(self._in_forward(loss)):
            outputs = self.outputs(micro, received, kind)
            result = loss(outputs) if self._head.result is None else self._head.result
        if not isinstance(result, tuple) or len(result) != 2:
            raise ModelError(
                "loss must return two values",
                given=f"a {type(result).__name__}",
                expected="the summed loss, which the step divides by all ranks' targets, and their number",
                hint="return loss_sum, num_targets",
            )
        total, count = result
        return self.routers.added(total, count, kind), count

    def label_statistics(
        self, micro: Mapping[str, Tensor], received: Any = None, distillation: Distillation | None = None
    ) -> Tensor:
        """On the last stage: see `label_statistics` in loss.py."""
        module = self.module_part.module

        def find(outputs: Any) -> Tensor:
            return label_statistics(
                module, outputs, micro, group=self._col, columns=self._columns, distillation=distillation
            )

        with self.sharded.unsharder.watch_outside_uses(), self._head.calling(find):
            self.outputs(micro, received)
            found: Tensor = self._head.result
        return found

    def _call(self, loss: Loss, outputs: Any, batch: Mapping[str, Tensor]) -> Any:
        """The loss's result. Check that a user's loss reads nothing that is sharded; and that new entries are
        used: [Note: entries of a batch]."""
        is_users = self._user_loss is not None
        micro = batch
        if is_users and isinstance(micro, SharedTokens):
            outputs, batch = micro.for_loss(outputs)
        recorded = None if frozenset(micro) in self._checked_entries else RecordedBatch(batch)
        batch = batch if recorded is None else recorded
        result = self._loss_reads.call(loss, outputs, batch) if is_users else loss(outputs, batch)
        if recorded is not None:
            recorded.read |= {ROUTING} if self.routers.layers else set()
            recorded.check_used(self.module_part.module)
            self._checked_entries.add(frozenset(micro))
        return result

    def measured(self) -> contextlib.AbstractContextManager[None]:
        """Context of a forward with gradients: the first one measures `activation_bytes`."""
        if self.activation_bytes is not None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._measuring()

    @contextlib.contextmanager
    def _measuring(self) -> Any:
        weights = [unit.storage for unit in self.sharded.units]  # these are not activations
        with watch_activations(self.module_part.module, weights) as watch:
            yield
        self.activation_bytes = watch.total

    def loss(self, buffers: LossBuffers | None = None) -> Loss:
        buffers = buffers or self.loss_buffers
        module = self.module_part.module
        of_head: dict[str, Any] = {"group": self._col, "columns": self._columns, "buffers": buffers}
        terms = self._terms if module.training else {"pairs": self.pairs}
        return choose_loss(module, self._user_loss, **of_head, **terms, of_inputs=True)

    def _in_forward(self, loss: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        """The built-in loss takes this rank's logits, within the forward; a user's loss takes full ones."""
        return loss if self._user_loss is None and self.is_last else None

    def estimated_bytes(
        self, batch_shape: tuple[int, int], device: torch.device, block_outputs: BlockOutputs | None
    ) -> tuple[int, int] | None:
        """Estimate `activation_bytes` for token ids of shape (batch, sequence), and the bytes kept between
        the two parts of a split backward; None if unknown. `block_outputs`: supplies the inputs of a later
        stage."""
        module = self.module_part.module
        batch = self._divide(prepared(token_batch(*batch_shape), module, self._user_loss), module)
        # Whatever the user's model raises on meta (or when copied), it can still be trained.
        with contextlib.suppress(Exception), self._on_meta(batch, block_outputs) as (meta_module, inputs):
            buffers = LossBuffers(device.type)

            def loss(outputs: Any) -> Any:
                return self.loss(buffers)(outputs, batch)

            def run() -> None:
                with self._head.calling(self._in_forward(loss)):
                    outputs = meta_module(**inputs)
                    if self.is_last and self._head.result is None:
                        loss(outputs)

            deferred = DeferredBytes()
            with deferred.recording(meta_module):
                kept_bytes = activation_bytes(meta_module, run, device)
                self.estimated_loss_bytes = buffers.peak_bytes
                return kept_bytes, deferred.total
        return None

    def cache_bytes(self, batch_shape: tuple[int, int], block_outputs: BlockOutputs | None) -> int | None:
        """Estimate the bytes of this stage's caches after so many (rows, tokens), as `estimated_bytes`."""
        batch = token_batch(*batch_shape)
        with (
            contextlib.suppress(Exception),
            self._on_meta(batch, block_outputs) as (meta_module, inputs),
            running_on_meta(torch.device("cpu")),
            torch.no_grad(),
        ):
            cache = StageCache(meta_module.eval(), is_stage=False)
            with experts_left_out(meta_module):
                meta_module(**inputs | cache.arguments)
            return sum(tensor.nbytes for tensor in cache.tensors())
        return None

    @contextlib.contextmanager
    def _on_meta(
        self, batch: Mapping[str, Tensor], block_outputs: BlockOutputs | None
    ) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Context of a forward on meta: a copy of the stage's module, and its inputs."""
        with self.sharded.unsharder.paused(), attention_of(batch):
            meta_module = copy_to_meta(self.module_part.module)
            inputs = forward_inputs(meta_module, batch)
            received: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.module_part.earlier:
                assert block_outputs is not None, "a stage without its meta model"
                output_of = partial(self._block_output, block_outputs, inputs)
                received = receiving(meta_module, self.module_part.received_from(output_of))
            with received:
                yield meta_module, inputs

    def _block_output(self, block_outputs: BlockOutputs, inputs: dict[str, Any], block: str) -> Any:
        """Return what this rank receives of an earlier stage's block, or of its own first one, on meta."""
        output = block_outputs.output_of(block, inputs, of_input=self.module_part.begins_with_input)
        if self._tokens is None:
            return output
        return map_hidden_output(self._tokens.shard, block, output)


def _may_be_sparse(embedding: nn.Embedding) -> bool:
    """Return whether the gradient goes from the embedding to a unit, and nothing else takes it."""
    weight = embedding._parameters.get("weight")  # None if it is computed
    if (
        not isinstance(weight, UnitParameter) or not weight.requires_grad
    ):  # adapters read a frozen one's options
        return False
    return weight.is_cpu and not (has_hooks(weight) or embedding.sparse or embedding.scale_grad_by_freq)


@contextlib.contextmanager
def _no_fused_encoder() -> Iterator[None]:
    """Call the modules of a torch.nn.TransformerEncoder also in evaluation: its fused kernel reads their
    weights, which may be shards, and passes nested tensors from block to block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
