"""The engine: a plan, a model and an optimizer as something with `.step()`. `assembly.py` makes it.

[Note: one division, at the end]
The loss of a step is the sum of its targets' losses over all micro-batches and data ranks, divided by
the number of those targets: never a mean of means. Gradients are therefore accumulated and reduced as
sums. `update` learns the number of targets in the same small all-reduce that brings the loss, and
divides once, together with clipping: a factor that fused optimizers apply as they read.

[Note: what makes a step repeatable]
Inside `step` the random generators are seeded from (seed, step, micro-batch, data rank, stage), so dropout
needs no state in a checkpoint, and put back afterwards. Gradients are summed in a fixed order. Whether
a step is skipped follows from the reduced loss and norm, which are the same bits on every rank.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import Saver, open_together, place_of
from plait.comm import Mesh, all_reduce, broadcast, start_all_reduce
from plait.engine.batch import Batch, BatchPreparer, EvalResult, ProbeResult, StepResult, check_loss
from plait.engine.build import EngineParts, TrainingSpec
from plait.engine.loss_scale import SumLossScale
from plait.engine.runner import MicrobatchRunner
from plait.engine.trace import Trace
from plait.errors import CheckpointError, ModelError, PlanError, RunError
from plait.models import FlopFacts, seeded
from plait.optim import clip_factor, clip_values
from plait.parallel import (
    FlatParam,
    InMemoryState,
    Precision,
    StateReader,
    StateShard,
    allocated_bytes,
    persistent_buffers,
)
from plait.plan import MemoryUse, Plan

_NUM_STEPS = "engine/num_steps"


class Engine:
    """Trains one model under one plan. Made by `parallelize`.

    layout  of what this rank holds of it
    model   the one that was given: in place where it is one stage; of several, this rank's blocks of it
    probed  what its probe found, if it was asked for one
    """

    def __init__(
        self, model: nn.Module, plan: Plan, how: TrainingSpec, mesh: Mesh, blocks: list[tuple[str, nn.Module]]
    ) -> None:
        self.plan = plan
        self.model = model
        self.world = mesh.world
        self.device = mesh.world.device
        self.seed = how.seed
        self.num_steps = 0
        self.probed: ProbeResult | None = None
        self._how = how
        self._flops = FlopFacts.of(model)
        self._parts = EngineParts.build(model, plan, how, mesh, blocks)
        self._groups = self._parts.groups
        self._held = self._parts.held
        self.layout = self._parts.layout
        self._owned = self._parts.owned
        self._state = self._parts.state
        self._passes = MicrobatchRunner(self._parts, how.schedule)
        self._is_replica = mesh.coord["replicate"] > 0
        self.optimizer = self._owned.optimizer
        self._scale = SumLossScale(how.loss_scaling)
        self._totals = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, targets, scale's unit
        self._is_torn = False  # an update was interrupted half-way
        self._micros_done = 0
        self._trace: Trace | None = None
        compute = Precision.of(plan).compute
        self._intake = BatchPreparer(self.device, compute, self._groups.model, plan.micro)

    @property
    def data_rank(self) -> int:
        """Which share of a step's batch is this rank's, of `data_ranks`."""
        return self._groups.all.rank

    @property
    def data_ranks(self) -> int:
        return self._groups.all.size

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the whole model, each counted once."""
        return self._parts.shard_map.num_parameters

    def step(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """One optimizer step on this data rank's share of the batch.

        Every tensor's dim 0 counts samples and is split into `plan.micro` micro-batches; a list of so many
        dicts is taken as it is, and its micro-batches may differ in size. Raises PlanError when it does not
        divide. After an exception that every rank raises at the same point (under pp > 1: before the first
        micro-batch) the engine can be used again: the step was not taken. A rank that raises alone must end.
        """
        self._begin()
        try:
            micros, barrier_s = self._intake.micros(batch), 0.0
            if self._trace is not None:
                self.world.barrier()
                barrier_s = time.perf_counter()
            seed, records = (self.seed, self.num_steps), self._trace is not None
            spans = self._passes.train(micros, self._add_loss, seed, self.data_rank, records=records)
            if self._trace is not None:
                self._trace.add(self.num_steps, spans, barrier_s)
            self._micros_done = self.plan.micro
        except BaseException:
            self.abandon()
            raise
        return self.update()

    def loss(self, micro: Batch) -> tuple[Tensor, int | Tensor]:
        """(summed loss, number of targets) of a micro-batch: what `backward` takes. With a causal language
        model's own loss, logits stay cut over the columns of `tp`; those that `model` itself gives are
        whole. Dropout is as `step` has it: see [Note: what makes a step repeatable]. Under pp=1."""
        stage = self._passes.only_stage("engine.loss")
        batch = self._intake.checked(micro)
        with (
            seeded(self.device, self.seed, self.num_steps, self._micros_done, self.data_rank),
            stage.measured(),
        ):
            return stage.summed_loss(batch)

    def backward(self, loss: Tensor, num_targets: int | Tensor | None = None) -> None:
        """Adds a micro-batch's gradient to the step's; called `plan.micro` times before `update`. Under pp=1.

        `loss` is a sum over `num_targets` targets. Without `num_targets` it is a mean that counts as
        one target, so that the step's loss is the mean over micro-batches and data ranks.
        """
        check_loss(loss)
        stage = self._passes.only_stage("engine.backward")
        if self._micros_done == self.plan.micro:
            raise PlanError(
                "more micro-batches than the plan has",
                given=f"backward number {self._micros_done + 1} of a step, micro={self.plan.micro}",
                expected="engine.update() after the last one",
                hint=f"micro={self._micros_done + 1}",
            )
        if not self._micros_done:
            self._begin()
        try:
            self._micros_done += 1
            last = self._micros_done == self.plan.micro
            stage.zero.backward([self._add_loss(loss, num_targets)], [None], last=last)
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        """Of a step: nothing has happened that must not."""
        self._check_whole()
        self._held.check_unchanged()

    def _check_whole(self) -> None:
        if self._is_torn:
            fact = "the last update or load was interrupted: weights do not belong together"
            raise ModelError(fact, hint="engine.load with a checkpoint, or load_state")

    def _add_loss(self, loss: Tensor, num_targets: int | Tensor | None) -> Tensor:
        """Counts a micro-batch's; what backward starts from."""
        check_loss(loss)
        self._totals[0] += loss.detach()
        self._totals[1] += 1 if num_targets is None else num_targets
        return self._scale.of(loss, num_targets, self._groups.all)

    def update(self) -> StepResult:
        """Reduces what is left, clips, lets the optimizer update the weights. See [Note: one division]."""
        if not self._micros_done:
            raise PlanError(
                "an update without a gradient",
                expected="engine.backward(loss) before it, not loss.backward()",
            )
        try:
            return self._update()
        except BaseException:
            self.abandon()
            raise

    def _update(self) -> StepResult:
        # Over the ranks of grids too, which have the same: what one of them alone finds, all skip. Stages
        # before the last one have nothing.
        self._totals[2] = self._scale.unit if self._passes.has_last_stage else 0.0
        pending = start_all_reduce(self._totals, self._groups.everyone)
        sums = self._held.finish()
        pending.wait()
        totals = self._totals / self._groups.grid.size
        loss_sum, num_targets, units, square_sum, *digests = torch.cat([totals, sums]).tolist()
        self._totals.zero_()
        self._held.check_digests(digests)
        self._scale.unit = units / self._groups.all.size
        loss, norm = math.nan, math.nan
        scale = self._scale.factor
        if num_targets:
            loss, norm = loss_sum / num_targets, self._rounded(math.sqrt(square_sum) / num_targets / scale)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self._apply(clip_factor(norm, self._how.clip_norm) / num_targets / scale)
        if num_targets:
            self._scale.update(skipped=skipped)
        scaled = self._scale.factor / scale
        for stage in self._parts.stages.values():
            # What forward changes follows the first rank's, as under DDP; it may be a new tensor.
            for buffer in persistent_buffers(stage.part.module).values():
                broadcast(buffer, self._groups.stage)
        self._held.end_step(skipped=skipped, scale=scaled)
        self._micros_done = 0
        self.num_steps += 1
        return StepResult(loss, norm, int(num_targets), skipped)

    def _apply(self, factor: float) -> None:
        """The optimizer's step, gradients multiplied by `factor`."""
        if self._how.clip_value is not None:
            clip_values((unit.gradient for unit in self._held.trained), factor, self._how.clip_value)
            factor = 1.0

        def step(unit: FlatParam) -> None:
            self._owned.step(unit, factor, self.num_steps)
            self._is_torn = True  # until all units are a step further

        self._held.update(step)
        self._owned.has_states = True
        self._is_torn = False

    def _rounded(self, norm: float) -> float:
        """To the dtype of gradients: the last bits of a float64 sum depend on how units are cut."""
        return float(torch.tensor(norm, dtype=Precision.of(self.plan).master))

    @property
    def loss_scale(self) -> float | None:
        """fp16's current loss scale, for a mean loss; None for other precisions."""
        return self._scale.value

    def evaluate(self, batch: Batch) -> EvalResult:
        """The loss of this data rank's share, summed over all; changes nothing of the training state.

        Runs in at most `plan.micro` parts, no larger than training's. Ranks may have shares of other sizes.
        """
        moved = self._intake.checked(batch, trains=False)
        parts = {key: value.chunk(self.plan.micro) for key, value in moved.items()}
        num_parts = len(next(iter(parts.values())))
        most = torch.tensor([num_parts], device=self.device)
        all_reduce(most, self._groups.all, "max")
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)

        def add(loss: Tensor, count: int | Tensor) -> None:
            totals[0] += loss
            totals[1] += count

        micros = [{key: chunks[number] for key, chunks in parts.items()} for number in range(num_parts)]
        self._passes.evaluate(micros, add, missing=int(most.item()) - num_parts)
        all_reduce(totals, self._groups.all)
        broadcast(totals, self._groups.pipeline, self._passes.last_rank)
        loss_sum, num_targets = totals.tolist()
        return EvalResult(loss_sum, int(num_targets))

    def outputs(self, batch: Batch, pick: Callable[[Any], Any] | None = None) -> Any:
        """What the model returns for the batch, in eval mode and without gradients, on every rank: all of it,
        or what `pick` takes of it where it is computed (under pp > 1 tensors, and what holds such). Every
        rank must call it, with its share."""
        return self._passes.outputs(self._intake.checked(batch, trains=False), pick)

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of the weights that the optimizer updates, whole, by the model's names: on rank 0, elsewhere
        {}. Every rank must call it, as `full_gradients` and `state`."""
        return {} if self._is_replica else self._state.weights()

    def full_gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients as the optimizer saw them (clipped), whole: see above."""
        return {} if self._is_replica else self._state.gradients()

    def gradient_error(self, name: str, whole: Tensor) -> tuple[float, float] | None:
        """Of what this rank owns of the last step's gradient: its squared distance from `whole`, and the
        square of what it should be. None where it owns nothing of it."""
        return self._state.gradient_error(name, whole)

    def probe_gradients(self, batch: Batch, scale: float) -> dict[str, Tensor]:
        """The gradients of the mean loss over `batch`, in eval mode, whole, on rank 0; elsewhere {}. Every
        rank gives the same batch, before a step's first micro-batch. No step is taken. Within backward they
        are `scale` times as large."""

        def mean(loss: Tensor, count: int | Tensor) -> Tensor:
            check_loss(loss)
            return loss * (scale / float(count))

        with self._passes.eval_mode():
            self._passes.probe(self._intake.moved(batch), mean)
        self._held.finish()
        times = scale * self.data_ranks
        found = {name: gradient / times for name, gradient in self.full_gradients().items()}
        self.abandon()
        return found

    def start_trace(self) -> None:
        """From now on steps are recorded: when each action of the schedule began and ended."""
        self._trace = Trace(self._how.schedule, self._groups.pipeline, self.device)

    def write_trace(self, path: str | Path) -> None:
        """Ends what `start_trace` began. Every rank must call it; rank 0 writes what its pipeline's ranks
        did, as JSON that Perfetto opens and `plait schedule --trace` reads. Raises RunError."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise RunError("there is nothing to trace", hint="engine.start_trace() before the steps")
        trace.write(Path(path), is_first=self.world.rank == 0)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, by their keys in `state`; no rank has to be asked."""
        return self._state.shapes()

    def state(self) -> dict[str, Tensor]:
        """Copies of all that continues the training, whole, by name: on rank 0, elsewhere {}. Every rank must
        call it."""
        self._check_whole()
        if self._is_replica:
            return {}
        tensors = self._state.save()
        return tensors | self._own_state() if self.world.rank == 0 else tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, under whatever plan: every rank is given all of it.

        Raises CheckpointError for another model's, before it changes anything.
        """
        self.load_from(InMemoryState(tensors))

    def _own_state(self) -> dict[str, Tensor]:
        return {_NUM_STEPS: torch.tensor(self.num_steps), **self._scale.state()}

    def state_shards(self) -> list[StateShard]:
        """What this rank has to save: over all ranks, every element of `state` once. Nobody is asked."""
        self._check_whole()
        own = self._own_state().items() if self.world.rank == 0 else ()
        return [*self._state.kept(), *(StateShard.whole(key, value) for key, value in own)]

    def load_from(self, source: StateReader, *, weights_only: bool = False) -> None:
        """Each rank takes over its part, under whatever plan it was saved. `weights_only`: weights and
        buffers; the optimizer begins anew. Every rank must call it. Raises CheckpointError, on all of them:
        for another model's, before anything changes; for damage, after which the engine waits for another
        load."""
        self._state.check(source, weights_only=weights_only)
        self.abandon()
        self._held.wait_for_readers()
        self._is_torn, problem = True, None
        try:
            self._state.load(source, weights_only=weights_only)
            self._scale.load(() if weights_only else source.shapes, source.whole)
            self.num_steps = 0 if weights_only else int(source.whole(_NUM_STEPS))
        except CheckpointError as error:
            problem = error
        source.finish(self._groups.norm, self.world.group, self.device, problem)
        self._is_torn = False
        self._held.publish()

    def save(self, folder: str | Path, facts: Mapping[str, Any] | None = None) -> Path:
        """Saves a checkpoint of all that continues the training, `step-00000120` in a folder that all hosts
        share: complete and on the disk, or not at all. `facts`: JSON of your own. Every rank must call it.
        Raises CheckpointError, what was saved before then stands; RunError, see `check_replicas`."""
        self.check_replicas()
        said = {**(facts or {}), "plan": str(self.plan), "seed": self.seed}
        Saver(Path(folder), self.world).save(self.num_steps, self.state_shards(), said)
        return place_of(Path(folder), self.num_steps)

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Goes on from a checkpoint, saved under whatever plan, each rank reading what it needs; its facts.
        See `load_from`."""
        found = open_together(Path(path), self.world)
        with found.reader() as reader:
            self.load_from(reader, weights_only=weights_only)
        return found.facts

    def check_replicas(self) -> None:
        """Raises RunError, on all ranks alike, when ranks that hold the same weights hold other bits of them:
        tells which weight and which ranks. Every rank must call it, between steps."""
        self._parts.replicas.check()

    def memory(self) -> MemoryUse:
        """Bytes that this rank holds. Activations: what all micro-batches between their forward and their
        backward, or the other half of that, keep at a time, of what one keeps on a stage, measured in the
        first step (None before it)."""
        return allocated_bytes(self._held, self._owned, self.plan, self._passes.activation_bytes())

    def estimated_memory(self, batch_shape: tuple[int, int]) -> MemoryUse:
        """What `memory` will say, for micro-batches of token ids of this (batch, sequence) shape.

        Activations are None for a model that cannot run without values.
        """
        saved = self._passes.estimated_bytes(batch_shape, self.device)
        return self._parts.estimated_bytes(self.plan, saved)

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of forward and backward for one token; the formula stands in `plan/cost.py`."""
        return self._flops.per_token(sequence)

    def abandon(self) -> None:
        """Forgets the micro-batches of a step that will not be finished; also done after an exception."""
        self._held.reset()
        self._totals.zero_()
        self._micros_done = 0
