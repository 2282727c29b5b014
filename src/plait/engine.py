"""The engine: a plan, a model and an optimizer, assembled into something with `.step()`.

[Note: one division, at the end]
The loss of a step is the sum of its targets' losses over all micro-batches and data ranks, divided by
the number of those targets: never a mean of means. Gradients are therefore accumulated and reduced as
sums. `update` learns the number of targets in the same small all-reduce that brings the loss, and
divides once, together with clipping: a factor that fused optimizers apply as they read.

[Note: what makes a step repeatable]
Inside `step` the random generators are seeded from (seed, step, micro-batch, data rank), so dropout
needs no state in a checkpoint, and put back afterwards. Gradients are summed in a fixed order. Whether
a step is skipped follows from the reduced loss and norm, which are the same bits on every rank.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Mesh, World, all_reduce, broadcast, connect, start_all_reduce
from plait.errors import ConfigError, ModelError, PlanError
from plait.models import (
    Loss,
    blocks_of,
    choose_loss,
    flops_per_token,
    forward_inputs,
    meta_twin,
    saved_bytes,
    seeded,
    unit_facts,
    watch_saved,
)
from plait.optim import clip_factor, make_optimizer, scaled_step, state_kinds
from plait.parallel import DataParallel, Precision, bring_to_life, compile_blocks, recompute_blocks
from plait.parallel.state import EngineState, flat_slices, persistent_buffers
from plait.plan import Grid, Layout, MemoryUse, Plan, model_state_bytes


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    loss        mean over all targets of the step (NaN when there was none)
    grad_norm   2-norm of the step's gradient before clipping, each whole element once
    num_tokens  targets of the step, over all micro-batches and data ranks
    skipped     loss or norm was not finite, or there was no target: weights and optimizer are untouched
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skipped: bool


@dataclass(frozen=True)
class EvalResult:
    """Summed over all data ranks; the mean loss is `loss_sum / num_tokens`."""

    loss_sum: float
    num_tokens: int


class Engine:
    """Trains one model under one plan. Made by `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        mesh: Mesh,
        loss: Loss | None,
        optimizer: type[torch.optim.Optimizer],
        optimizer_args: Mapping[str, Any],
        clip_norm: float | None,
        seed: int,
    ) -> None:
        self.plan = plan
        self.model = model
        self.world = mesh.world
        self.device = mesh.world.device
        self.seed = seed
        self.clip_norm = clip_norm
        self.num_steps = 0
        self._loss = loss
        self._data_group = mesh.group("replicate", "shard")
        self._blocks = [block for _, block in blocks_of(model)]
        self.layout = Layout.of(unit_facts(model))
        self._units = bring_to_life(model, self.layout, plan, mesh, seed)
        recompute_blocks(self._blocks, plan.recompute)
        if plan.compile:
            compile_blocks(self._blocks, self.device)
        self._data = DataParallel(self._units, self._data_group, plan.micro)
        self._slices = flat_slices(self._units)
        self._state_kinds = state_kinds(optimizer, optimizer_args)
        self.optimizer = make_optimizer(optimizer, optimizer_args, self._slices)
        self._has_buffers = bool(persistent_buffers(model))
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, targets
        self._micros_done = 0
        self._saved_bytes: int | None = None  # known after the first step

    @property
    def data_rank(self) -> int:
        """Which share of a step's batch is this rank's, of `data_ranks`."""
        return self._data_group.rank

    @property
    def data_ranks(self) -> int:
        return self._data_group.size

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the whole model, each counted once."""
        return self.layout.num_parameters

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One optimizer step on this data rank's share of the batch.

        Every tensor's dim 0 counts samples and is split into `plan.micro` micro-batches. Raises
        PlanError when it does not divide. After an exception that every rank raises at the same point
        the engine can be used again: the step was not taken. A rank that raises alone has to end.
        """
        try:
            for number, micro in enumerate(self._micro_batches(batch)):
                with seeded(self.device, self.seed, self.num_steps, number, self.data_rank):
                    self.backward(*self._forward(micro))
        except BaseException:
            self._abandon()
            raise
        return self.update()

    def backward(self, loss: Tensor, num_targets: int | Tensor | None = None) -> None:
        """Adds a micro-batch's gradient to the step's; called `plan.micro` times before `update`.

        `loss` is a sum over `num_targets` targets. Without `num_targets` it is a mean that counts as
        one target, so that the step's loss is the mean over micro-batches and data ranks.
        """
        if self._micros_done == self.plan.micro:
            raise PlanError(
                "more micro-batches than the plan has",
                given=f"backward number {self._micros_done + 1} of a step, micro={self.plan.micro}",
                expected="engine.update() after the last one",
                hint=f"micro={self._micros_done + 1}",
            )
        self._micros_done += 1
        self._totals[0] += loss.detach()
        self._totals[1] += 1 if num_targets is None else num_targets
        self._data.begin_micro(last=self._micros_done == self.plan.micro)
        try:
            torch.autograd.backward(loss)
        except BaseException:
            self._abandon()
            raise

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
            self._abandon()
            raise

    def _update(self) -> StepResult:
        self._data.start_rest()
        pending = start_all_reduce(self._totals, self._data_group)
        square = self._data.finish()
        pending.wait()
        loss_sum, num_targets, square_sum = torch.stack([*self._totals, square]).tolist()
        self._totals.zero_()
        loss, norm = math.nan, math.nan
        if num_targets:
            loss, norm = loss_sum / num_targets, math.sqrt(square_sum) / num_targets
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            scaled_step(self.optimizer, clip_factor(norm, self.clip_norm) / num_targets)
            for unit in self._units:
                unit.publish()
        if self._has_buffers:  # what forward changes follows rank 0, as under DDP; it may be a new tensor
            for buffer in persistent_buffers(self.model).values():
                broadcast(buffer, self._data_group)
        self._data.reset()
        self._micros_done = 0
        self.num_steps += 1
        return StepResult(loss, norm, int(num_targets), skipped)

    def evaluate(self, batch: Mapping[str, Tensor]) -> EvalResult:
        """The loss of this data rank's share, summed over all; changes nothing of the training state.

        Runs in at most `plan.micro` parts, no larger than training's.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        parts = {key: value.chunk(self.plan.micro) for key, value in self._on_device(batch).items()}
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                for number in range(len(next(iter(parts.values())))):
                    loss, count = self._forward({key: chunks[number] for key, chunks in parts.items()})
                    totals[0] += loss
                    totals[1] += count
        finally:
            for module, training in modes:
                module.training = training
        all_reduce(totals, self._data_group)
        loss_sum, num_targets = totals.tolist()
        return EvalResult(loss_sum, int(num_targets))

    def whole_parameters(self) -> dict[str, Tensor]:
        """The weights that the optimizer updates, whole, by the model's names: on rank 0, elsewhere {}."""
        return self._state().weights() if self.world.rank == 0 else {}

    def whole_gradients(self) -> dict[str, Tensor]:
        """The last step's gradients as the optimizer saw them (clipped), whole: on rank 0, elsewhere {}."""
        return self._state().gradients() if self.world.rank == 0 else {}

    def state(self) -> dict[str, Tensor]:
        """All that continues the training, by name: views, to be copied or written before the next step."""
        return self._state().save(self.num_steps)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, under whatever plan. Raises CheckpointError for another model's."""
        self.num_steps = self._state().load(tensors)

    def memory(self) -> MemoryUse:
        """Bytes that this rank holds. Activations: what one micro-batch keeps from forward to backward,
        measured in the first step (None before it)."""
        return MemoryUse(
            parameters=sum(u.storage.nbytes for u in self._units),
            gradients=sum(u.gradient.nbytes for u in self._units) + self._data.buffer_bytes,
            master=sum(u.master.nbytes for u in self._units if u.master is not u.storage),
            optimizer=sum(
                value.nbytes
                for state in self.optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor)
            ),
            activations=self._saved_bytes,
        )

    def predicted_memory(self, batch_shape: tuple[int, int]) -> MemoryUse:
        """What `memory` will say, for micro-batches of token ids of this (batch, sequence) shape.

        Activations are None for a model that cannot run without values.
        """
        ids = torch.zeros(batch_shape, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        saved: int | None = None
        # Whatever the user's model raises without values (or cannot be copied), it can still be trained.
        with contextlib.suppress(Exception):
            twin = meta_twin(self.model)
            saved = saved_bytes(twin, self._choose_loss(), batch, self.device)
        return model_state_bytes(
            self.layout,
            self.plan,
            states_per_element=sum("." not in kind for kind in self._state_kinds),
            activation_bytes=saved,
            wire_bytes=self._data.buffer_bytes,
        )

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of forward and backward for one token; the formula stands in `plan/cost.py`."""
        return flops_per_token(self.model, sequence)

    def _forward(self, micro: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        if self._saved_bytes is not None or not torch.is_grad_enabled():
            return self._summed_loss(micro)
        with watch_saved(self.model) as watch:
            result = self._summed_loss(micro)
        self._saved_bytes = watch.total
        return result

    def _summed_loss(self, micro: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        found = self._choose_loss()(self.model(**forward_inputs(self.model, micro)), micro)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ModelError(
                "a loss is a sum and the number of targets that it sums over",
                given=f"loss returned a {type(found).__name__}",
                hint="return loss_sum, num_targets: the step divides once, by the targets of all ranks",
            )
        return found

    def _choose_loss(self) -> Loss:
        return choose_loss(self.model, self._loss)

    def _micro_batches(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        batch = self._on_device(batch)
        sizes = {key: value.shape[0] for key, value in batch.items()}
        if len(set(sizes.values())) != 1 or any(size % self.plan.micro for size in sizes.values()):
            raise PlanError(
                "this rank's batch does not split into micro-batches",
                given=f"{sizes}, micro={self.plan.micro}",
                expected="tensors of one size along dim 0, a multiple of micro",
            )
        parts = {key: value.chunk(self.plan.micro) for key, value in batch.items()}
        for number in range(self.plan.micro):
            yield {key: chunks[number] for key, chunks in parts.items()}

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Moves the batch; its floating inputs, labels excepted, are cast to what the model computes in."""
        if not isinstance(batch, Mapping):
            raise ModelError(
                "a batch is a dict of tensors",
                given=f"a {type(batch).__name__}",
                expected="what the model's forward takes, by its names, and labels, which only the loss sees",
            )
        compute = Precision.of(self.plan).compute
        return {
            key: value.to(
                self.device,
                compute if value.is_floating_point() and key != "labels" else value.dtype,
                non_blocking=True,
            )
            for key, value in batch.items()
        }

    def _abandon(self) -> None:
        """Forgets a step that an exception ended."""
        self._data.reset()
        self._totals.zero_()
        self._micros_done = 0

    def _state(self) -> EngineState:
        return EngineState(self.model, self._units, self._slices, self.optimizer, self._state_kinds)


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_args: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    world: World | None = None,
) -> Engine:
    """Makes `model` train under `plan` on the ranks of this job (one, when started alone).

    model           a Hugging Face causal LM or any nn.Module, unmodified. Built on meta, it gets its
                    initial weights here: a function of `seed` and the modules' names, the same under
                    every plan. Built with weights, rank 0's are taken. Its parameters become new
                    objects, views of flat storages: hand them to nobody before this call.
    optimizer       an element-wise torch.optim class, with `optimizer_args`; fused where it can be.
                    Weight decay leaves out norms and biases.
    clip_norm       limit of the gradient's global 2-norm
    loss            (outputs, micro-batch) -> (summed loss, number of targets); None: the next token's
                    cross entropy of a Hugging Face causal LM. The model is called with the micro-batch's
                    entries, but for `labels`, as keywords; floating ones in the plan's precision.

    A parameter that a step does not use counts as one with a zero gradient: its moments and weight decay
    go on, where a plain torch loop would leave it out. Buffers that forward changes follow rank 0's.
    Raises PlanError, ModelError or ConfigError.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            "clip_norm is not a limit", given=f"clip_norm={clip_norm}", expected="above 0, or None"
        )
    choose_loss(model, loss)
    world = connect() if world is None else world
    plan.check_ranks(world.size)
    return Engine(
        model if model.training else model.train(),
        plan,
        mesh=Mesh(world, Grid.of(plan)),
        loss=loss,
        optimizer=optimizer,
        optimizer_args=optimizer_args or {},
        clip_norm=clip_norm,
        seed=seed,
    )
