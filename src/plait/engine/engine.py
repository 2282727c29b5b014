"""The engine: a plan, a model and an optimizer with a `.step()`. Created by `parallelize` in `api.py`.

[Note: a single division per step]
The loss of a step is the sum of its targets' losses over all micro-batches and data ranks, divided by the
number of those targets: never a mean of means. Gradients are therefore accumulated and reduced as sums.
`update` gets the number of targets in the same small all-reduce as the loss, and divides once, together with
clipping: a factor that fused optimizers apply as they read.

[Note: reproducible steps]
Inside `step` the random generators are seeded from (seed, step, micro-batch, data rank, stage), so dropout
needs no state in a checkpoint, and are restored afterwards. On CPUs gradients are summed in a fixed order;
for GPUs see [Note: reproducible bits] in numerics.py. Whether a step is skipped follows from the reduced
loss and norm, which are the same bits on every rank.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn

from plait.checkpoint import Saver
from plait.checkpoint.checkpoint import open_on_all_ranks
from plait.checkpoint.directory import step_path
from plait.checkpoint.manifest import json_facts
from plait.comm import Group, Mesh, broadcast
from plait.engine.adapters import EngineAdapters
from plait.engine.auto_compile import CompileTrial, Facts, TrialPasses
from plait.engine.build import EngineParts, build_engine_parts
from plait.engine.generation import Conversation, Generated, GenerationMemory, Generator, OnTokens
from plait.engine.inputs import Batch, Shares, share_of
from plait.engine.optimizer import EngineOptimizer, check_options, load_options, options_state
from plait.engine.runner import MicrobatchRunner
from plait.engine.spec import TrainingSpec
from plait.engine.totals import (
    EvalResult,
    ProbeResult,
    StepResult,
    StepTotals,
    SumLossScale,
    check_loss,
    read_count,
)
from plait.engine.trace import Trace
from plait.engine.update import LocalUpdater, Updater
from plait.engine.usage_checks import (
    check_batch_shape,
    check_facts,
    check_pick,
    inconsistent,
    no_gradient,
    no_trace,
    not_copyable,
    nothing_to_train,
    one_thread,
    second_backward,
    too_large_explained,
    too_many_micros,
)
from plait.errors import CheckpointError
from plait.fileio import to_path
from plait.models import FlopFacts, config_of_model
from plait.optim.clip import clip_factor
from plait.parallel.zero.sharded_model import ShardedStage
from plait.parallel.zero.state_io import InMemoryState, StateReader, StateShard, collect_shards
from plait.plan import MemoryUse
from plait.plan.compile_choice import CompileChoice
from plait.plan.distillation import Distillation
from plait.plan.sampling import Sampling

_NUM_STEPS, _OPTIONS = "engine/num_steps", "engine/param_groups."
_Keys = Collection[str] | None


class Engine:
    """Trains one model under one plan. Created by `parallelize`.

    plan        the plan, with `dp=auto` resolved
    model       the model that was passed in: in place with one stage; with several, only this rank's blocks
                are kept
    optimizer   an optimizer of torch, for schedulers of the learning rate; see `EngineOptimizer`
    num_steps   steps taken, skipped ones included; part of a checkpoint
    world       the ranks of the job: `world.rank`, `world.size`
    device      this rank's device, to which batches are moved
    seed        of initial weights and dropout
    layout      layout of the shards that this rank holds
    in_use      lock of the methods that one thread at a time may call
    probed      result of the self-check, if `probe` was set; `compile_choice`: of `compile=auto`, if made
    pairs       with loss=Preference(...): `take` returns rewards of pairs since the last call, on all ranks
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainingSpec,
        mesh: Mesh,
        make_updater: Callable[[EngineParts], Updater] | None = None,
    ) -> None:
        """Use `parallelize`. `make_updater`: None for a `LocalUpdater`."""
        self.plan, self.model, self.seed = spec.job, model, spec.given.seed
        self.world, self.device = mesh.world, mesh.world.device
        self.num_steps = 0
        self.probed: ProbeResult | None = None
        self.compile_choice = spec.compile_choice
        self._spec = spec
        self.in_use = threading.RLock()  # see `one_thread`
        self._flops = FlopFacts.from_model(model)
        self._adapters = EngineAdapters(model, spec.given)
        with too_large_explained():
            self._parts = build_engine_parts(model, spec, mesh)
        self._adapters.watch(self._parts)
        make_local = partial(LocalUpdater, clip_value=spec.given.clip_value, kept_zeros=spec.kept_zeros)
        self._updater: Updater = (make_updater or make_local)(self._parts)
        self._groups, self._inputs = self._parts.context.groups, self._parts.inputs
        self.layout, self.pairs = self._parts.layout, [*self._parts.stages.values()][-1].pairs
        self.optimizer = EngineOptimizer(self._parts, self.plan, self.world.rank, self._drop_gradients)
        self._runner = MicrobatchRunner(self._parts, spec.schedule)
        self._is_replica = self._groups.islands.rank > 0
        self._scale = SumLossScale(spec.loss_scaling)
        self._generator = Generator(self._parts, self._runner, spec.schedule)
        self._routers = [stage.routers for stage in self._parts.stages.values()]
        self._totals = StepTotals(self._groups.world, self.device, self._routers[0].totals.numel())
        self._is_inconsistent = False  # an update or load was interrupted
        self._micros_done = 0
        self._trace: Trace | None = None
        self._copied: torch.cuda.Event | None = None  # the state is being copied until then
        self.num_steps = self._updater.push_state(self.num_steps)

    def __reduce__(self) -> NoReturn:
        raise not_copyable()

    def __repr__(self) -> str:
        return (
            f"Engine of a {type(self.model).__name__} with {self.num_parameters:,} trainable parameters\n"
            f'  plan  : "{self.plan}"\n'
            f"  rank  : {self.world.rank} of {self.world.size}, on {self.device}\n"
            f"  steps : {self.num_steps}\n"
            f"  memory: {self.memory()}"
        )

    @property
    def _stages(self) -> Collection[ShardedStage]:
        return self._parts.sharded.stages.values()

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a step's batch, out of `data_ranks`."""
        return self._updater.data_rank

    @property
    def data_group(self) -> Group:
        """The data ranks of this part of the model: for `plait.all_gather` in a loss."""
        return self._groups.batch_shares

    @property
    def data_ranks(self) -> int:
        return self._updater.data_ranks

    @overload
    def shard(self, batches: Batch, *, trains: bool = True) -> dict[str, Tensor]: ...
    @overload
    def shard(self, batches: Iterable[Batch], *, trains: bool = True) -> Shares: ...
    def shard(self, batches: Batch | Iterable[Batch], *, trains: bool = True) -> dict[str, Tensor] | Shares:
        """This data rank's share of a global batch, or of each batch of a loader that gives the same ones on
        every rank. Shares consist of `plan.micro` micro-batches; with `trains=False`, for `evaluate` and
        `outputs`, of any number of samples. Raises PlanError, on all ranks, if a batch does not divide."""
        unit, ranks = (self.plan.micro if trains else 1) * self._inputs.rows, self._groups.batch_shares
        if trains:  # with servers, the other workers are not in a group
            ranks = Group(tuple(range(self.data_ranks)), self.data_rank, None)
        if isinstance(batches, Mapping):
            return share_of(batches, unit, ranks)
        return Shares(batches, unit, ranks, self.world.group, self.device)

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the full model, each counted once."""
        return self._parts.shard_map.num_parameters

    @one_thread
    def step(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """Run one optimizer step on this data rank's share of the batch.

        Dim 0 of every tensor counts samples and is split into `plan.micro` micro-batches; a list of
        `plan.micro` dicts, of any sizes, is used as it is. Raises PlanError if the batch does not divide.
        After an exception that every rank raises at the same point (under pp > 1: before the first
        micro-batch) the engine remains usable, without the step. If a rank raises alone, it must exit.
        """
        if self.plan.compile == "auto" and self.compile_choice is None:
            self.choose_compile(batch)
        self._check_ready()
        try:
            micros, barrier_s = self._inputs.of_step(batch), 0.0
            if self._trace is not None:
                self.world.barrier()
                barrier_s = time.perf_counter()
            seed, records = (self.seed, self.num_steps, self.data_rank), self._trace is not None
            with self._inputs.explained(micros):
                spans = self._runner.train(micros, self._add_loss, seed, records=records)
            if self._trace is not None:
                self._trace.add(self.num_steps, spans, barrier_s)
            self._micros_done = self.plan.micro
        except BaseException:
            self.discard_step()
            raise
        return self.update()

    @one_thread
    def choose_compile(
        self, batch: Batch | Sequence[Batch], num_steps: float = math.inf, kept: Facts | None = None
    ) -> CompileChoice | None:
        """Under `compile=auto`, decide by trial steps on a rank's share of a batch, as the first `step` does,
        for so many steps. `kept`: facts of an earlier choice. Every rank must call it."""
        if self.plan.compile != "auto":
            return None
        self._check_ready()
        passes = TrialPasses(self._parts, self._runner, self._add_loss, self.discard_step)
        self.compile_choice = CompileTrial(passes, self._inputs.of_step(batch)).choose(num_steps, kept)
        return self.compile_choice

    @one_thread
    def loss(self, micro: Batch) -> tuple[Tensor, int | Tensor]:
        """(summed loss, number of targets) of a micro-batch, for `backward`. With a causal language model's
        built-in loss, logits stay sharded over the columns of `tp`; `model` itself returns full ones. Dropout
        is as in `step`: see [Note: reproducible steps]. Only under pp=1."""
        batch = self._inputs.single(micro)
        with self._inputs.explained([batch]):
            return self._runner.loss(batch, (self.seed, self.num_steps, self.data_rank), self._micros_done)

    @one_thread
    def backward(self, loss: Tensor, num_targets: int | Tensor | None = None) -> None:
        """Add a micro-batch's gradient to the step's; call `plan.micro` times before `update`. Only under
        pp=1.

        `loss` is a sum over `num_targets` targets. Without `num_targets` it is a mean that counts as one
        target, so that the step's loss is the mean over micro-batches and data ranks.
        """
        check_loss(loss)
        stage = self._runner.only_stage("engine.backward")
        if self._micros_done == self.plan.micro:
            raise too_many_micros(self.plan)
        if not self._micros_done:
            self._check_ready()
        try:
            self._micros_done += 1
            last = self._micros_done == self.plan.micro
            stage.sharded.backward([self._add_loss(loss, num_targets)], [None], last=last)
        except BaseException as error:
            self.discard_step()
            raise second_backward(error) from error.__cause__

    def _check_ready(self) -> None:
        """Begin a step, if it may start."""
        if not self.num_parameters:
            raise nothing_to_train()
        self._adapters.check_can_train()
        self._totals.begin_step()
        self._check_consistent()
        self.optimizer.check()
        self._runner.refresh()
        for stage in self._stages:
            stage.check_unchanged()

    def _check_consistent(self) -> None:
        if self._is_inconsistent:
            raise inconsistent()

    def _add_loss(self, loss: Tensor, num_targets: int | Tensor | None) -> Tensor:
        """Add a micro-batch's loss and targets to the totals; return what backward starts from."""
        count = self._totals.add(loss, num_targets)
        return self._scale.scale_loss(loss, count, self._groups.dense.gradient_sum)

    @one_thread
    def update(self) -> StepResult:
        """Finish the reductions, clip, and update the weights. See [Note: a single division per step]."""
        if not self._micros_done:
            raise no_gradient()
        try:
            self.optimizer.check()
            return self._update()
        except BaseException:
            self.discard_step()
            raise

    def _update(self) -> StepResult:
        # Also over the ranks of tp grids, which have the same totals: if one rank has a non-finite loss, all
        # skip. Stages before the last one contribute zero.
        unit = self._scale.unit if self._runner.has_last_stage else 0.0
        for routers in self._routers:
            self._totals.of_routers.add_(routers.take_totals())
        work = self._totals.start_sum(unit, self._parts.sharded.start_remaining())
        sums = self._parts.sharded.finish_reductions()
        work.wait()
        loads = self._totals.of_routers.clone()
        # The step's only wait for the device, except for late gradients.
        totals, late, of_routers, (square_sum, *digests) = self._totals.read(sums)
        self._parts.sharded.check_digests(digests)
        if late:
            square_sum = self._parts.sharded.reduce_late().item()
        loss_sum, num_targets, units = (total / self._groups.tp.size for total in totals)
        loss_sum, num_targets, square_sum = self._updater.reduce_totals((loss_sum, num_targets, square_sum))
        self._scale.unit = units / self._groups.dense.gradient_sum.size
        scale, dtype = self._scale.factor, self._parts.context.precision.master
        loss, norm = self._scale.means(loss_sum, num_targets, square_sum, dtype)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        with self.optimizer.stepping(skipped=skipped):
            if not skipped:
                self._wait_for_copy()
                factor = clip_factor(norm, self._spec.given.clip_norm) / num_targets / scale
                self._updater.apply(factor, self.num_steps, self._mark_writing)
                for routers in self._routers:
                    routers.update_biases(loads)
        if num_targets:
            self._scale.update(skipped=skipped)
        scaled = self._scale.factor / scale
        for stage in self._stages:
            for buffer in stage.buffers():
                broadcast(buffer, self._groups.same_stage)  # they follow the first data rank's, as in DDP
            stage.end_step(skipped=skipped, scale=scaled)
        self._micros_done = 0
        if self.plan.local_steps:  # weights may change
            self._wait_for_copy()
        self.num_steps, exchanged = self._updater.end_step(self.num_steps, self._mark_writing)
        found = self._spec.routers.of_step([n / self._groups.tp.size for n in of_routers], num_targets)
        return StepResult(loss, norm, int(num_targets), skipped, exchanged, **found)

    def _mark_writing(self, is_writing: bool) -> None:
        self._is_inconsistent = is_writing

    def update_after(self, event: torch.cuda.Event) -> None:
        """Let the next change of weights and optimizer states wait for `event`: see `Saver.save`."""
        self._copied = event

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.wait()  # the stream
            self._copied = None

    @property
    def loss_scale(self) -> float | None:
        """fp16's current loss scale, for a mean loss; None for other precisions."""
        return self._scale.value

    @one_thread
    def evaluate(self, batch: Batch) -> EvalResult:
        """The loss over all data ranks, each evaluating its share of the batch in at most `plan.micro`
        micro-batches. Shares may differ in size; the training state is unchanged."""
        return self._runner.evaluate(batch)

    @one_thread
    def outputs(self, batch: Batch, pick: Callable[[Any], Any] | None = None) -> Any:
        """The model's outputs for the batch, in eval mode and without gradients, on every rank: all of them,
        or the result of `pick`, which runs on the last stage (under pp > 1 it returns tensors, or containers
        of tensors). Every rank must call it, with its share."""
        check_pick(pick)
        return self._inputs.ask(partial(self._runner.outputs, pick=pick), batch)

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each label's log-probability, and the entropy of its distribution, in nats: (B, S) as the batch's
        labels, 0 where there is no target. In eval mode. Every rank must call it, with its share."""
        found_BSN = self.label_statistics([batch])[0]
        return found_BSN[..., 0], found_BSN[..., 1]

    @one_thread
    def label_statistics(
        self, micros: Sequence[Batch], *, shifted: bool = False, distillation: Distillation | None = None
    ) -> list[Tensor]:
        """For the labels of each micro-batch, (B, S, 3): as `log_probs`, and 1 if no token is likelier, else
        0; with `distillation`, (B, S, 2 K + 1): `top_tokens` of cross_entropy.py. `shifted`: labels are
        those of the next tokens. All data ranks have as many micro-batches."""
        return self._runner.label_statistics(micros, shifts=not shifted, distillation=distillation)

    @one_thread
    def routing(self, batch: Batch) -> Tensor:
        """The experts of each token in each layer of a mixture, (samples, tokens, layers, k), in eval mode,
        for a batch's entry `routing`. Every rank must call it, with its share. Only under pp=1."""
        return self._inputs.ask(self._runner.routing, batch)

    @one_thread
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        tokenizer: Any = None,
        on_tokens: OnTokens | None = None,
        start: int = 0,
        conversation: Conversation | None = None,
    ) -> list[Generated]:
        """Continue prompts, lists of token ids, with a cache: one forward of all, then one for each token.
        Training goes on as without it. Every rank must call it, each data rank with any number of prompts of
        its own. `tokenizer`: for stop strings. `on_tokens`: called in each step with a list of (row, token),
        on the first rank of a model. `start`: the index of the first prompt of all, for draws.
        `conversation`: keeps the caches of one prompt. Raises ConfigError, ModelError, PlanError."""
        self.plan.check_no_servers("engine.generate")
        weights = self._parts.state, self._parts.state.num_loads, self.num_steps, self._adapters.in_use
        given = sampling or Sampling(), tokenizer, on_tokens, start
        return self._generator.generate(prompts, *given, (conversation or Conversation()).of(weights))

    def generation_memory(self, rows: int, tokens: int) -> GenerationMemory:
        """Estimate what `generate` adds on this rank for rows of so many tokens, with the new ones."""
        return self._generator.memory((rows, tokens))

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of the full weights that the optimizer updates, by the model's names: on rank 0, elsewhere
        {}. Every rank must call it, as `full_gradients` and `state`."""
        self._updater.pull_state()
        return {} if self._is_replica else self._parts.state.weights()

    def full_buffers(self) -> dict[str, Tensor]:
        """Copies of the persistent buffers: see above."""
        return {} if self._is_replica else self._parts.state.buffers()

    def full_gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's full gradients as the optimizer received them (clipped): see above."""
        return {} if self._is_replica else self._parts.state.gradients()

    def gradient_distance(self, name: str, full: Tensor) -> tuple[float, float] | None:
        """For this rank's shard of the last step's gradient: its squared distance from `full`, and the
        squared norm of that shard of `full`. None if the rank owns nothing of it."""
        return self._parts.state.gradient_distance(name, full)

    @one_thread
    def probe_gradients(self, batch: Batch, scale: float) -> dict[str, Tensor]:
        """The full gradients of the mean loss over `batch`, in eval mode, on rank 0; elsewhere {}. Every rank
        passes the same batch, before a step's first micro-batch. No step is taken. Within backward they are
        `scale` times as large."""
        self._runner.probe(self._inputs.uncompared(batch), scale)
        self._parts.sharded.finish_reductions()
        divisor = scale * self._groups.dense.gradient_sum.size / self._groups.sequence.size
        gradients = {name: gradient / divisor for name, gradient in self.full_gradients().items()}
        self.discard_step()
        return gradients

    def start_trace(self) -> None:
        """Start to record when each action of the schedule starts and ends."""
        self._trace = Trace(self._spec.schedule, self._groups.pp, self.device)

    def write_trace(self, path: str | Path) -> None:
        """End what `start_trace` started. Every rank must call it; rank 0 writes the actions of its
        pipeline's ranks, as JSON that Perfetto opens and `plait schedule --trace` reads. Raises RunError."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise no_trace()
        trace.write(to_path(path, "path"), is_first=self.world.rank == 0)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shapes of all weights, by their keys in `state`. No communication."""
        return self._parts.state.shapes()

    def state(self) -> dict[str, Tensor]:
        """Copies of the full training state, by name: on rank 0, elsewhere {}. Every rank must call it."""
        return collect_shards(self.state_shards(), self.world.group, self.device)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, under any plan: every rank passes all of it. Raises CheckpointError
        for another model's state, before anything changes."""
        self.load_from(InMemoryState(tensors))

    def _own_state(self) -> dict[str, Tensor]:
        options = {f"{_OPTIONS}{key}": value for key, value in options_state(self.optimizer).items()}
        return {**options, **self._scale.state(), _NUM_STEPS: torch.tensor(self.num_steps)}

    def state_shards(self) -> list[StateShard]:
        """This rank's share of the checkpoint: over all ranks, every element of `state` once. No
        communication."""
        self._check_consistent()
        self._updater.pull_state()
        own = self._own_state().items() if self._groups.world.rank == 0 else ()
        shards = [shard for shard in self._parts.state.shards() if shard.key not in self._adapters.frozen]
        shards += [StateShard.from_tensor(key, value) for key, value in own]
        return self._parts.islands.shards(shards)

    @one_thread
    def load_from(
        self, source: StateReader, *, weights_only: bool = False, options: bool = True, only: _Keys = None
    ) -> None:
        """Restore this rank's shards from `source`, saved under any plan. `weights_only`: weights and
        buffers; the optimizer starts fresh. `options`: also the hyper-parameters of the optimizer's groups,
        if they were saved. `only`: keys of weights; all else stays as it is. Every rank must call it. Raises
        CheckpointError, on all ranks: for another model's state, before anything changes; for damage, after
        which the engine has to load again.
        """
        source = self._parts.islands.reader(source, weights_only=weights_only)
        kept = self._adapters.kept(source.shapes, weights_only=weights_only)
        kept = kept if only is None else frozenset(self._parts.state.keys().difference(only))
        self._parts.state.check(source, weights_only=weights_only, kept=kept)
        keys = source.shapes if options and not weights_only else ()
        option_keys = [key.removeprefix(_OPTIONS) for key in keys if key.startswith(_OPTIONS)]
        check_options(self.optimizer, option_keys)
        self.discard_step()
        self._wait_for_copy()
        for stage in self._stages:
            stage.unsharder.wait_for_readers()
        self._is_inconsistent, problem = True, None
        try:
            self._parts.state.load_weights(source, kept)
            if only is None:
                self._parts.state.load_optimizer(source, weights_only=weights_only)
                self._scale.load(() if weights_only else source.shapes, source.read_full)
                self.num_steps = 0 if weights_only else read_count(source, _NUM_STEPS)
                load_options(self.optimizer, option_keys, lambda key: source.read_full(f"{_OPTIONS}{key}"))
            if only is None or not self.num_steps:
                self._parts.islands.load(source, self.num_steps)
        except CheckpointError as error:
            problem = error
        source.finish(self._groups.one_copy, self.world.group, self.device, problem)
        self._is_inconsistent = False
        self._totals.forget_steps()
        for stage in self._stages:
            stage.sync_params()
        self.num_steps = self._updater.push_state(self.num_steps)

    def save(self, folder: str | Path, facts: Mapping[str, Any] | None = None) -> Path:
        """Save the training state as a checkpoint, `step-00000120` in a folder that all hosts share: complete
        and synced to disk, or not at all. `facts`: additional JSON; the plan, the seed and the configuration
        of a Hugging Face model are added. Every rank must call it; of the workers of servers, only the first
        saves. Raises CheckpointError, which leaves earlier checkpoints intact; RunError: `check_replicas`."""
        folder, own_facts = to_path(folder, "folder"), json_facts(facts or {})
        check_facts(own_facts)
        if not self._updater.saves:
            return step_path(folder, self.num_steps)
        self.check_replicas()
        model = {} if (config := config_of_model(self.model)) is None else {"model": {"config": config}}
        all_facts = {**model, **self._adapters.checkpoint_facts(), **own_facts}
        all_facts |= {"plan": str(self.plan), "seed": self.seed}
        Saver(folder, self.world).save(self.num_steps, self.state_shards(), all_facts)
        return step_path(folder, self.num_steps)

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Continue from a checkpoint, saved under any plan, and return its facts. Each rank reads only what
        it needs. See `load_from`."""
        checkpoint = open_on_all_ranks(to_path(path, "path"), self.world)
        self._adapters.check(checkpoint)
        with checkpoint.reader() as reader:
            self.load_from(reader, weights_only=weights_only)
        return checkpoint.facts

    def adapters_off(self) -> AbstractContextManager[None]:
        """Between steps, a context without adapters: `evaluate`, `outputs` and `log_probs` are the base's."""
        return self._adapters.off(self._micros_done)

    def set_adapter(self, adapter: str) -> None:
        """Compute with another adapter; steps need those active in `parallelize`. Every rank must call."""
        self._adapters.use(adapter, self._micros_done)

    def save_adapter(self, folder: str | Path, adapter: str | None = None) -> None:
        """Save an adapter (None: the trained one) as PEFT's files, in `folder` or, unless it is `default`, in
        a folder of its name there. Gathers only adapters. Every rank must call it: see `save`."""
        if self._updater.saves:
            self._adapters.save(folder, adapter, self.state_shards(), self.world)

    def load_adapter(self, folder: str | Path, adapter: str | None = None) -> None:
        """Load what `save_adapter` or PEFT saved; over a trained adapter only before the first step. Every
        rank must call it. Raises CheckpointError, before anything changes."""
        found = self._adapters.read(folder, adapter, self.weight_shapes(), self.num_steps, self.world)
        self.load_from(InMemoryState(found), weights_only=True, only=found.keys())

    def check_replicas(self) -> None:
        """Raise RunError, on all ranks, if ranks that should hold identical weights differ in any bit; names
        the weight and the ranks. Every rank must call it, between steps."""
        self._parts.replicas.check()

    def memory(self) -> MemoryUse:
        """Bytes that this rank holds. Activations: the peak over the schedule of what micro-batches keep from
        forward to backward, from the bytes of one, measured in the first step (None before it)."""
        return self._updater.memory(self._parts.memory(self._runner.activation_bytes()))

    def estimated_memory(self, batch_shape: tuple[int, int]) -> MemoryUse:
        """`memory` of micro-batches of token ids of this shape. Activations: None if unknown."""
        check_batch_shape(batch_shape)
        activation_bytes = self._runner.estimated_bytes(batch_shape, self.device)
        return self._updater.memory(self._parts.estimated_memory(self._spec, activation_bytes))

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """FLOPs of forward and backward for one token: `training_flops_per_token` in plan/cost_model.py."""
        return self._flops.per_token(sequence, causal=causal)

    def server_counts(self) -> dict[str, Any]:
        """`ServerUpdater.counts`; {} without servers."""
        return self._updater.counts()

    def _drop_gradients(self) -> None:
        if self._micros_done:
            self.discard_step()

    def discard_step(self) -> None:
        """Discard the micro-batches of an unfinished step; also called after an exception."""
        for stage, routers in zip(self._stages, self._routers, strict=True):
            stage.reset()
            routers.take_totals()
        if self.pairs is not None:
            self.pairs.clear()
        self._totals.clear()
        self._micros_done = 0
