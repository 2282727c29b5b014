"""Runs micro-batches through the stages of this rank: training, evaluation, outputs.

[Note: one seed per stage]
Each stage draws random numbers from its own generator, or blocks at the same position of two stages would
drop the same elements. The first stage's seed does not include the stage, so that a model of one stage draws
the same numbers as without stages.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.comm import Group, all_reduce, broadcast, broadcast_text
from plait.engine.build import EngineParts
from plait.engine.loss import check_replicated, named_tensors
from plait.engine.preferences import ROWS
from plait.engine.routers import Pass
from plait.engine.stage import StageRunner
from plait.engine.totals import EvalResult, check_loss, valid_count
from plait.engine.usage_checks import no_counts
from plait.errors import ModelError, PlanError
from plait.models import BlockOutputs
from plait.models.caches import experts_left_out
from plait.models.init_weights import seeded_rng
from plait.parallel.experts.capacity import MessageSizes, MicroSizes, sizes_of
from plait.parallel.pipeline.executor import Stage
from plait.parallel.pipeline.serialize import PackedOutput, pack, unpack
from plait.parallel.zero.sharded_model import ShardedStage
from plait.plan.distillation import Distillation
from plait.plan.schedule import Schedule, Span, forwards_only, one_micro_batch, peak_activation_bytes

Micro = Mapping[str, Tensor]
OnLoss = Callable[[Tensor, int | Tensor], Any]  # (summed loss, targets) -> root of backward
Seeds = Callable[[int, int], Any]  # (stage, micro-batch) -> context of a pass
# (last stage, micro-batch, what the stage received, kind of its pass) -> root of backward, or anything
AtEnd = Callable[[StageRunner, Micro, Any, Pass], Any]


class MicrobatchRunner:
    """Runs an engine's schedule, and others over the same stages."""

    def __init__(self, parts: EngineParts, schedule: Schedule) -> None:
        self._parts = parts
        self._schedule = schedule
        self._last = schedule.num_stages - 1
        self._is_broken = False  # an exception left messages that no rank will receive
        self._collected = self._collected_outputs()
        context = parts.context
        is_limited = context.plan.capacity != "none"
        self._sizes = MessageSizes(context.groups.experts, context.device) if is_limited else None

    @property
    def has_last_stage(self) -> bool:
        return self._last in self._parts.stages

    @property
    def last_rank(self) -> int:
        """The `pp` coordinate of the last stage."""
        return self._schedule.rank_of[self._last]

    def only_stage(self, caller: str) -> StageRunner:
        """The only stage. Raises PlanError if the model has several."""
        if self._last:
            raise PlanError(
                "single micro-batches cannot run through a pipeline",
                given=f"{caller}, and a model in {self._last + 1} stages",
                expected="all micro-batches of a step in one call",
                hint="engine.step, engine.evaluate or engine.outputs",
            )
        return self._parts.stages[0]

    def loss(self, micro: Micro, seed: tuple[int, int, int], number: int) -> tuple[Tensor, int | Tensor]:
        """The loss of a single micro-batch of a step, the one with this number. Raises PlanError if a step
        begins with forwards of all its micro-batches, or has several stages."""
        stage, plan = self.only_stage("engine.loss"), self._parts.context.plan
        if plan.counts_first:
            raise no_counts(plan)
        if self._finds_others:
            raise PlanError(
                "a single micro-batch cannot be compared with answers of other prompts",
                given="engine.loss, and loss='kto'",
                expected="all micro-batches of a step in one call",
                hint="engine.step",
            )
        with sizes_of(*self.sizes([micro])), self.seeded(seed, 0, number), stage.measured():
            return stage.summed_loss(self._parts.inputs.prepared(micro), None, Pass(trains=True))

    @property
    def _finds_others(self) -> bool:
        pairs = [*self._parts.stages.values()][-1].pairs
        return pairs is not None and pairs.of_single_answers

    def train(
        self,
        micros: Sequence[Micro],
        on_loss: OnLoss,
        seed: tuple[int, int, int],
        *,
        records: bool = False,
    ) -> list[Span]:
        """Forward and backward of a step; with `records`, return the spans of its actions."""
        self.check_no_messages()
        seeds = partial(self.seeded, seed)
        micros = self._answers(micros, seeds, self._parts.context.groups.dense.gradient_sum)
        sizes = self.sizes(micros)
        if self._parts.context.plan.counts_first:
            self._count(micros, seeds, sizes)
        return self._run(self._schedule, micros, _loss_to(on_loss), seeds, sizes=sizes, records=records)

    def _count(self, micros: Sequence[Micro], seeds: Seeds, sizes: Sequence[MicroSizes | None]) -> None:
        """Forwards that count for losses of routers: see routers.py [Note: counts of the step]."""
        with self._first_pass():
            schedule = forwards_only(self._schedule, len(micros))
            self._run(schedule, micros, _loss_to(_nothing), seeds, sizes=sizes, is_first=True)
        for stage in self._parts.stages.values():
            stage.routers.end_first_pass()

    @contextmanager
    def kept_buffers(self) -> Iterator[None]:
        """Passes after which buffers are as before, also if one of them fails."""
        stages = [stage.module_part.module for stage in self._parts.stages.values()]
        all_buffers = [module._buffers for stage in stages for module in stage.modules()]
        named = [(of, name, b, b.clone()) for of in all_buffers for name, b in of.items() if b is not None]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffers, name, buffer, values in named:
                    buffers[name] = buffer.copy_(values)

    @contextmanager
    def _first_pass(self) -> Iterator[None]:
        """Forwards without gradients, after which buffers are as before."""
        with self.kept_buffers(), torch.no_grad():
            yield

    def _answers(
        self, micros: Sequence[Micro], seeds: Seeds | None, ranks: Group, num_counted: int | None = None
    ) -> Sequence[Micro]:
        """The micro-batches of the loss, which `ranks` have. Of single answers these are every other row,
        after forwards of the others: see preferences.py [Note: answers of other prompts]."""
        pairs = [*self._parts.stages.values()][-1].pairs
        if pairs is None or not self._finds_others:
            return micros
        own, others = ([{k: v[row::ROWS] for k, v in micro.items()} for micro in micros] for row in (0, 1))
        with self._first_pass(), pairs.of_others(ranks):
            schedule = forwards_only(self._schedule, len(others))
            self._run(schedule, others, _loss_to(_nothing), seeds, num_counted=num_counted)
        return own

    def seeded(self, seed: tuple[int, int, int], stage: int, micro: int) -> AbstractContextManager[None]:
        """Seed the random generators for a pass of a micro-batch through a stage; those of the device inside
        the context. `seed`: the engine's, the step, and the data rank, which workers of parameter servers
        have too. See [Note: one seed per stage]."""
        (*step, data_rank), suffix = seed, (stage,) if stage else ()
        tokens = self._parts.context.groups.sequence
        self._parts.inputs.dropout.seed(*step, micro, data_rank, *suffix)
        return seeded_rng(self._device, *step, micro, data_rank * tokens.size + tokens.rank, *suffix)

    def sizes(self, micros: Sequence[Micro]) -> Sequence[MicroSizes | None]:
        """See [Note: sizes of messages] in parallel/experts/capacity.py. Collective under a capacity."""
        if self._sizes is None:
            return [None] * len(micros)
        return self._sizes.exchanged([_key_of(micro) for micro in micros])

    def probe(self, micro: Micro, scale: float) -> None:
        """Forward and backward of one micro-batch in eval mode, of `scale` times its mean loss."""
        tokens = self._parts.context.groups.sequence

        def mean(loss: Tensor, count: int | Tensor) -> Tensor:
            check_loss(loss)
            targets = torch.tensor(float(count), dtype=torch.float64, device=self._device)
            all_reduce(targets, tokens)
            return loss * (scale / float(targets))

        with self.eval_mode():
            self._run(one_micro_batch(self._schedule), [micro], _loss_to(mean), None)

    def evaluate(self, batch: Micro) -> EvalResult:
        """Forwards only, in eval mode, and their loss over all data ranks. If ranks communicate in forwards,
        for parameters or experts, this rank joins those of others that have more micro-batches, with forwards
        of a sample that is not counted."""
        context, device, inputs = self._parts.context, self._device, self._parts.inputs
        micros = inputs.of_evaluation(batch)
        has_router_loss = any(stage.routers.adds for stage in self._parts.stages.values())
        communicates = not context.keeps_params_unsharded or context.plan.ep > 1 or has_router_loss
        most = torch.tensor([len(micros)], device=device)
        all_reduce(most, context.groups.tokens, "max")
        sample = {key: value[: inputs.rows] for key, value in micros[0].items()}
        padding = [sample] * ((int(most.item()) - len(micros)) if communicates else 0)
        totals, counted = torch.zeros(2, dtype=torch.float64, device=device), len(micros)
        remaining = counted

        def add(loss: Tensor, count: int | Tensor) -> None:
            nonlocal remaining
            if remaining:
                remaining -= 1
                check_loss(loss, trains=False)
                totals[0] += loss
                totals[1] += valid_count(count)

        with inputs.explained(micros), self.inference():
            micros = self._answers([*micros, *padding], None, context.groups.tokens, counted)
            schedule = forwards_only(self._schedule, len(micros))
            self._run(schedule, micros, _loss_to(add), None, num_counted=counted)
        all_reduce(totals, context.groups.tokens)
        broadcast(totals, context.groups.pp, self.last_rank)
        return EvalResult.of(*totals.tolist())

    def outputs(self, micro: Micro, pick: Callable[[Any], Any] | None) -> Any:
        """The result of `pick` on the model's outputs (None: all of them), on every rank of the pipeline."""
        collected: list[Any] = []
        with self.inference():
            self._run(forwards_only(self._schedule, 1), [micro], _outputs_to(collected.append), None)
            return self._broadcast_from_last(
                lambda: self._picked(self._parts.inputs.complete(collected[0], micro), pick)
            )

    def label_statistics(
        self, batches: Sequence[Micro], *, shifts: bool, distillation: Distillation | None = None
    ) -> list[Tensor]:
        """`label_statistics` of loss.py for the labels of each micro-batch, on every rank of the pipeline;
        all data ranks have as many. `shifts`: see `Inputs.prepared`."""
        found: list[Tensor] = []
        inputs = self._parts.inputs
        micros = [inputs.single(batch, trains=False) for batch in batches]

        def find(stage: StageRunner, micro: Micro, received: Any, _kind: Pass) -> None:
            found.append(stage.label_statistics(micro, received, distillation))

        def completed() -> list[Tensor]:
            values = [inputs.complete(*pair) for pair in zip(found, micros, strict=True)]
            return [inputs.of_labels(value) for value in values] if shifts else values

        schedule = forwards_only(self._schedule, len(micros))
        prepare = partial(inputs.prepared, shifts=shifts)
        with inputs.explained(micros), self.inference():
            self._run(schedule, micros, find, None, prepare=prepare)
            result: list[Tensor] = self._broadcast_from_last(completed)
        return result

    def routing(self, micro: Micro) -> Tensor:
        """See `Engine.routing`."""
        routers = self.only_stage("engine.routing").routers
        with self.inference(), routers.recording() as recorded:
            self._run(forwards_only(self._schedule, 1), [micro], _outputs_to(_nothing), None)
        samples, shapes = max(len(value) for value in micro.values()), {each.shape for each in recorded}
        compiles, layers = self._parts.context.plan.compile, routers.layers
        if compiles or len(shapes) != 1 or len(recorded) != len(layers) or len(recorded[0]) % samples:
            raise ModelError(
                "the model has no routers whose choices can be recorded",
                given=f"{len(layers)} layers with experts, {[*map(tuple, shapes)]}, compile={compiles}",
                expected="routers of transformers that choose as many experts for each token in each layer",
                hint="engine.outputs, for all that the model returns",
            )
        chosen_BSLk = torch.stack(recorded, 1).unflatten(0, (samples, -1))
        complete: Tensor = self._parts.inputs.complete(chosen_BSLk, micro)
        return complete

    def _picked(self, outputs: Any, pick: Callable[[Any], Any] | None) -> Any:
        """The part of the outputs that is asked for, checked to be full on every rank of `tp`."""
        picked = outputs if pick is None else pick(outputs)
        check_replicated(named_tensors(picked), self._parts.context.groups.tp)
        return picked

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Context of forwards in eval mode without gradients. Raises ModelError if one changes a parameter:
        sharded ones would lose the change."""
        before = self._versions()
        with self.eval_mode(), torch.no_grad():
            yield
        changed = [name for name, version in self._versions().items() if version != before[name]]
        if changed:
            raise ModelError(
                "the model's forward changes a parameter in eval mode",
                given=", ".join(changed[:2]),
                expected="a forward that leaves all weights as they are",
                hint="an option of the model that does: for RWKV, config.rescale_every = 0",
            )

    def _versions(self) -> dict[str, int]:
        units = [unit for stage in self._parts.stages.values() for unit in stage.sharded.units]
        return {name: parameter._version for unit in units for name, parameter in unit.parameters.items()}

    def refresh(self) -> None:
        """Adopt what was changed on the model since the last pass. See models/stages/shell.py."""
        for stage in self._parts.stages.values():
            if stage.module_part.modules is not None:
                stage.module_part.modules.refresh()
        if self._collected != self._collected_outputs():
            raise ModelError(
                "the model collects other outputs of blocks than when it was split into stages",
                given=", ".join(self._collected_outputs()) or "none of " + ", ".join(self._collected),
                expected="the configuration of parallelize, which decided what stages send",
                hint="set it before parallelize; or no pipeline",
            )

    def _collected_outputs(self) -> list[str]:
        """The options of a transformers configuration that are on and collect outputs of all blocks."""
        module = next(iter(self._parts.stages.values())).module_part.module
        config = getattr(module, "config", None) if self._last else None
        names = ("output_hidden_states", "output_attentions")
        return [name for name in names if getattr(config, name, False)]

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.refresh()
        modules = [m for stage in self._parts.stages.values() for m in stage.module_part.module.modules()]
        modes = [(module, module.training) for module in modules]
        for stage in self._parts.stages.values():
            stage.module_part.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @property
    def _device(self) -> torch.device:
        return self._parts.pipeline.device

    def _run(
        self,
        schedule: Schedule,
        micros: Sequence[Micro],
        at_end: AtEnd,
        seeds: Seeds | None,
        *,
        sizes: Sequence[MicroSizes | None] | None = None,
        prepare: Callable[[Micro], Micro] | None = None,
        records: bool = False,
        num_counted: int | None = None,
        is_first: bool = False,
    ) -> list[Span]:
        self.check_no_messages()
        if self._parts.dataflow is not None:
            for micro in micros:
                routers = next(iter(self._parts.stages.values())).routers
                self._parts.dataflow.check(routers.without_choices(micro), self._parts.loss)
        counted = len(micros) if num_counted is None else num_counted
        sizes = self.sizes(micros) if sizes is None else sizes
        given = (micros, prepare or self._parts.inputs.prepared, at_end, seeds, sizes)
        stages = {
            number: _StagePass(stage, *given, number, counted, is_first)
            for number, stage in self._parts.stages.items()
        }
        trains = any(stage.module_part.module.training for stage in self._parts.stages.values())
        return self.run_stages(schedule, stages, [(_key_of(m), trains) for m in micros], records=records)

    def run_stages(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        keys: Sequence[Hashable],
        *,
        records: bool = False,
    ) -> list[Span]:
        """Run a pass of micro-batches through this rank's stages: see `Pipeline.run`."""
        try:
            return self._parts.pipeline.run(schedule, stages, keys, records=records)
        except BaseException:
            self._is_broken = self._last > 0 and schedule.num_ranks > 1
            self._parts.context.mesh.world.was_interrupted |= self._is_broken
            raise
        finally:
            for stage in self._parts.stages.values():
                if stage.module_part.modules is not None:
                    stage.module_part.modules.end_pass()

    def check_no_messages(self) -> None:
        """Raise ModelError if a pass was interrupted between stages."""
        if self._is_broken:
            raise ModelError(
                "a step was interrupted while micro-batches were in flight between stages",
                given=f"pp={self._schedule.num_ranks}",
                expected="no messages in transfer between stages",
                hint="restart all ranks, and load a checkpoint",
            )

    def _broadcast_from_last(self, make: Callable[[], Any]) -> Any:
        """Broadcast the result of `make` on the last stage's rank. If it fails there, all ranks raise."""
        group, root = self._parts.context.groups.pp, self.last_rank
        if group.size == 1:
            return make()
        text, failure = "", None
        if group.rank == root:
            try:
                packed, tensors = pack(make(), source="the model")
                text = packed.to_json()
            except Exception as error:
                failure = error
        text = broadcast_text(root, text, group, self._device)
        if failure is not None:
            raise failure
        if not text:
            raise ModelError(
                "the last stage failed to return the model's outputs",
                given="an error on its rank, of the model or of pick",
                expected="tensors, or containers of tensors",
                hint="see its exception",
            )
        packed = PackedOutput.from_json(text)
        if group.rank != root:
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in packed.specs]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            broadcast(tensor, group, root)
        return unpack(packed, tensors)

    # --- bytes

    def activation_bytes(self) -> int | None:
        """Peak bytes kept for backward."""
        deferred_bytes = self._parts.pipeline.deferred_bytes
        kept = {
            number: None
            if stage.activation_bytes is None
            else (stage.activation_bytes, deferred_bytes.get(number, 0))
            for number, stage in self._parts.stages.items()
        }
        return self._peak(kept)

    def estimated_bytes(self, batch_shape: tuple[int, int], device: torch.device) -> int | None:
        block_outputs = self._block_outputs(device)
        kept = {
            number: stage.estimated_bytes(batch_shape, device, block_outputs)
            for number, stage in self._parts.stages.items()
        }
        return self._peak(kept)

    def cache_bytes(self, batch_shape: tuple[int, int]) -> int | None:
        """Estimate the bytes of this rank's caches after so many (rows, tokens); None if unknown."""
        dataflow, outputs = self._parts.dataflow, self._block_outputs(self._device)
        with nullcontext() if dataflow is None else experts_left_out(dataflow.meta_model):
            found = [stage.cache_bytes(batch_shape, outputs) for stage in self._parts.stages.values()]
        return None if None in found else sum(each for each in found if each is not None)

    def _block_outputs(self, device: torch.device) -> BlockOutputs | None:
        dataflow = self._parts.dataflow
        return None if dataflow is None else BlockOutputs(dataflow.meta_model, device)

    def _peak(self, kept: Mapping[int, tuple[int, int] | None]) -> int | None:
        return peak_activation_bytes(self._schedule, self._parts.context.groups.pp.rank, kept)


@dataclass
class _StagePass:
    """One pass through one of this rank's stages."""

    stage: StageRunner
    micros: Sequence[Micro]
    prepare: Callable[[Micro], Micro]
    at_end: AtEnd
    seeds: Seeds | None
    sizes: Sequence[MicroSizes | None]
    number: int
    num_counted: int  # of the micro-batches; in the others this rank joins the forwards of other ranks
    is_first: bool  # see `MicrobatchRunner._count`
    sharded: ShardedStage = field(init=False)

    def __post_init__(self) -> None:
        self.sharded = self.stage.sharded

    def forward(self, number: int, received: Any) -> Any:
        micro, stage = self.prepare(self.micros[number]), self.stage
        seeds = None if self.seeds is None else self.seeds(self.number, number)
        measured = stage.measured() if seeds else nullcontext()  # a probe is not a step
        with seeds or nullcontext(), measured, sizes_of(self.sizes[number]):
            trains = seeds is not None and not self.is_first and torch.is_grad_enabled()
            kind = Pass(number < self.num_counted, trains, self.is_first)
            if not stage.is_last:
                return stage.outputs(micro, received, kind)
            return self.at_end(stage, micro, received, kind)


def _loss_to(on_loss: Callable[..., Any]) -> AtEnd:
    return lambda stage, micro, received, kind: on_loss(*stage.summed_loss(micro, received, kind))


def _outputs_to(on_outputs: Callable[[Any], Any]) -> AtEnd:
    return lambda stage, micro, received, _kind: on_outputs(stage.outputs(micro, received))


def _nothing(*_: Any) -> None:
    """Ignore a loss or outputs: of forwards whose side effects count."""


def _key_of(micro: Micro) -> Hashable:
    """Equal for micro-batches whose stage outputs have the same shapes."""
    return tuple((name, tuple(value.shape), str(value.dtype)) for name, value in sorted(micro.items()))
