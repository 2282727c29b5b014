"""The training loop. Every rank runs it (of parameter servers, worker 0); rank 0 also logs and writes files.

[Note: skipped steps that end a run]
A step with a non-finite loss or gradient is skipped, and run.max_skipped such steps in a row end the run. In
fp16, overflowing gradients are how the loss scale finds its level: going from 65536 down to 1 takes sixteen
steps, more with hysteresis, and none of them means that the run has diverged. In fp16 a skipped step
therefore counts only if no smaller scale could have saved it: its loss is not finite (the scale does not
affect that), or the scale is at its minimum or fixed.

[Note: signals]
SIGTERM and Ctrl-C stop a run, SIGUSR1 saves: they are recorded, and handled between steps. Schedulers repeat
SIGTERM. After one of these has stopped the run, further ones are ignored until the process ends: it has
saved, and its exit code tells the scheduler so.

[Note: collections at fixed steps]
By itself, Python collects when it has counted enough new objects: at another time on each rank. A full
collection walks every object of torch, transformers and the model (370,000 for a model of 8 blocks, 0.17 to
0.31 s), and all ranks wait for the one that is in it. Of many ranks, one nearly always is. So all collect
once after the first step, exclude what is alive from later collections, and then collect only every so many
steps: 0.3 ms, as a step leaves little garbage. Garbage that holds tensors lives until the next collection;
the engine's own does not.
"""

import gc
import math
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import rich
import torch
import transformers
from rich.console import Console

from plait import __version__, checkpoint
from plait.checkpoint import Checkpoint, Saver
from plait.checkpoint.checkpoint import open_on_all_ranks
from plait.comm import World, all_reduce
from plait.data.loader import Batch
from plait.engine.engine import StepResult
from plait.errors import RunError
from plait.fileio import write_text, writing
from plait.parallel.zero.memory_stats import num_allocator_retries
from plait.tables import counted, plain
from plait.train.callbacks import CallbackRun, load_callbacks
from plait.train.checkpointing import Checkpointing
from plait.train.config import Recipe
from plait.train.export import DTYPES, export, export_adapter
from plait.train.generate import sample_text
from plait.train.heartbeat import Heartbeat
from plait.train.loss_spikes import LossSpikeGuard
from plait.train.measurements import StepRecorder, write_measured
from plait.train.metrics import Metrics, PeakFlops, StepMetrics, expert_facts, read_metrics
from plait.train.optimizer import lr_lambda
from plait.train.preferences import RunBatches
from plait.train.prepare import ResolvedRun
from plait.train.resume import load_newest
from plait.train.run_report import (
    draw_clocks,
    draw_experts,
    draw_losses,
    estimated_memory,
    largest_memory,
    memory_table,
    start_table,
)
from plait.train.servers import RESUMED, ServerMetrics, run_worker
from plait.train.stragglers import Stragglers
from plait.train.tasks import RunTasks

MAX_STEPS_BETWEEN_FLAGS = 10
_SAVE = signal.SIGUSR1
_FINISHED = "plait: finished"
_RETRIED = (
    "a GPU had no free memory: its allocator waited for all kernels and freed its cache, which takes long. "
    "Try PYTORCH_ALLOC_CONF=expandable_segments:True, more recompute, a higher zero, or more micro-batches"
)


def train(recipe: Recipe, world: World) -> signal.Signals | None:
    """Train from the run's newest checkpoint, or from the beginning, to the recipe's last step.

    `recipe`: as saved by `prepare`. Returns None, or the signal that stopped the run, whose state is then
    saved. Raises a PlaitError.
    """
    with SignalHandler() as signals:
        if world.process_rank:
            run_worker(recipe, world)
            return None
        trainer = Trainer(ResolvedRun.open(recipe, world.size), world)
        stopped_by = trainer.loop(signals)
        while trainer.spikes.rollback_to is not None:
            trainer.rollback(trainer.spikes.rollback_to)
            stopped_by = trainer.loop(signals)
        if stopped_by is None:  # signals are ignored from here on: training is complete
            trainer.finish()
        trainer.call("on_end", signals)
    return stopped_by


class SignalHandler:
    """Records signals while entered: see [Note: signals].

    stop_signal     the first SIGTERM or SIGINT, None before
    save_requested  True after a SIGUSR1, until the caller resets it
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        self.save_requested = False
        self._previous: dict[signal.Signals, Any] = {}
        self._blocked: set[signal.Signals | int] = set()

    def __enter__(self) -> "SignalHandler":
        for number in (signal.SIGTERM, signal.SIGINT, _SAVE):
            self._previous[number] = signal.signal(number, self._record)
        # ranks start with it blocked, see the note in plait/comm/launch.py
        self._blocked = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {_SAVE}))
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._previous.items():
            is_repeated = self.stop_signal is not None and number != _SAVE
            signal.signal(number, signal.SIG_IGN if is_repeated else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == _SAVE:
            self.save_requested = True
        elif self.stop_signal is None:
            self.stop_signal = signal.Signals(number)


class GarbageCollection:
    """Collects at fixed steps in its context; afterwards the collector is as before. See
    [Note: collections at fixed steps].

    every   steps between collections; 0: when Python decides
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = gc.isenabled()
        self._was_frozen = gc.get_freeze_count() > 0  # see [Note: forked ranks] in comm/launch.py
        self._is_fixed = False

    def __enter__(self) -> "GarbageCollection":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_fixed:
            return
        self._is_fixed = False
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time. `step`: number of steps done in the run, the same on all ranks."""
        if not self._every:
            return
        if not self._is_fixed:
            self._is_fixed = True
            gc.disable()
            gc.collect()
            gc.freeze()
        elif step % self._every == 0:
            gc.collect()


@dataclass(frozen=True)
class _LoopParts:
    """The parts of a loop from a start, resume or rollback to the next one."""

    metrics: Metrics
    saving: Checkpointing
    heartbeat: Heartbeat
    garbage: GarbageCollection
    stragglers: Stragglers
    batches: Iterator[Batch | list[Batch]]
    peak_flops: PeakFlops
    servers: ServerMetrics | None
    first_step: int  # steps done before


class Trainer:
    """A run on this rank, and its progress."""

    def __init__(self, run: ResolvedRun, world: World) -> None:
        """Build the engine and load the newest intact checkpoint, if there is one."""
        self._run = run
        self._world = world
        self._recipe = run.recipe
        self._config = run.recipe.run
        self._callbacks = load_callbacks(self._config.callbacks)
        # Rank 0 decides, as it also chooses the checkpoint: file systems show new files late on other hosts.
        resuming = world.any_flag(world.rank == 0 and bool(checkpoint.steps(run.dir.checkpoints)))
        self._engine = run.build_engine(world, loads=resuming)
        self._batches = RunBatches(run, self._engine, world)
        self._tasks = RunTasks(run.recipe.eval, run.store.tokenizer_dir, self._engine)
        self._base_lrs = [group["lr"] for group in self._engine.optimizer.param_groups]
        self._console = rich.get_console() if world.rank == 0 else None
        self._recorder = StepRecorder(self._engine, self._config.trace)
        self.spikes = LossSpikeGuard(self._config, run.dir.checkpoints, world)
        self._sizes = run.batch_sizes()
        self._step = 0  # steps done
        self._tokens = 0  # target tokens trained on
        self._skipped = 0  # steps skipped
        self._retries = 0  # of the allocator
        self._best_score, self._since_best = math.inf, 0  # validation loss, and evaluations after it
        self._compiles: dict[str, Any] | None = None  # facts of the choice of compile=auto
        self._bad_steps_in_a_row = 0  # see [Note: skipped steps that end a run]
        newest, self._warnings = load_newest(self._engine, run.dir.checkpoints, run.check_checkpoint)
        if newest is not None:
            self._restore_progress(newest)
            if run.plan.num_servers:
                world.store.set(RESUMED, str(newest.path))
        elif run.dir.metrics.exists():
            self._warnings.append("no checkpoint yet: the run starts from the beginning")
        if newest is None and run.store.index.skipped:
            self._warnings.append(f"left out of the data, as they are invalid: {run.store.index.skipped}")

    def _restore_progress(self, saved: Checkpoint) -> None:
        """Set the progress to that of a checkpoint which the engine has loaded."""
        self._step, self._tokens = saved.step, int(saved.facts["tokens"])
        self._skipped, self._bad_steps_in_a_row = int(saved.facts["skipped"]), 0
        best, self._since_best = saved.facts.get("best_score", (None, 0))
        self._best_score = math.inf if best is None else float(best)
        self.spikes.load(saved.facts)
        self._compiles = saved.facts.get("compile")

    @property
    def _is_stopped(self) -> bool:
        """True if the validation loss has not improved for so long that the run ends."""
        return 0 < self._config.early_stopping <= self._since_best

    def loop(self, signals: SignalHandler) -> signal.Signals | None:
        """Train to the last step, a loss spike that needs a rollback, or a stop signal, which is returned."""
        config, run, engine, first_step = self._config, self._run, self._engine, self._step
        self._world.barrier()  # ranks of a host measure at the same time: they share it in training too
        dtype = torch.float8_e4m3fn if engine.plan.is_float8 else DTYPES[engine.plan.dtype]
        peak_flops = PeakFlops.of_device(engine.device, dtype)
        offset = self.spikes.num_skipped  # see [Note: batch numbering] in loss_spikes.py
        left = range(first_step + offset, config.steps + offset)
        pin_memory = engine.device.type == "cuda"
        batches = self._batches.training_compiled(left, self._compiles, pin_memory=pin_memory)
        self._show_start(peak_flops)
        with (
            Metrics(
                run.dir, self._console, first_step, config.steps, config.log_every, config.report_to
            ) as metrics,
            Checkpointing(
                config,
                run.dir.checkpoints,
                self._world,
                metrics,
                lambda step: self.call("on_save", signals, step),
            ) as saving,
            Heartbeat(run.dir.stacks, self._world, config.hang_s) as heartbeat,
            GarbageCollection(config.collect_garbage_every) as garbage,
        ):
            every = self._at_exchanges(config.check_stragglers_every)
            stragglers = Stragglers(
                self._world,
                engine.plan,
                every,
                config.straggler_factor,
                lambda text: metrics.warn(self._step, text),
            )
            servers = ServerMetrics(engine) if engine.plan.num_servers else None
            parts = _LoopParts(
                metrics, saving, heartbeat, garbage, stragglers, batches, peak_flops, servers, first_step
            )
            self._recorder.begin(config.steps - first_step, metrics.log)
            if first_step:
                metrics.resumed(first_step)
                self._warn_of_jump(metrics)
            for text in self._warnings:
                metrics.warn(first_step, text)
            self.call("on_start", signals)
            if first_step == 0 and config.evaluate_every:
                self._score(parts, signals)
            return self._run_steps(parts, signals)

    def _warn_of_jump(self, metrics: Metrics) -> None:
        """Say what an extended run, or another schedule, does to the learning rate where the run goes on."""
        if self._console is None or self._step >= self._config.steps:
            return
        factor, base_lr = lr_lambda(self._recipe.schedule, self._config.steps), self._recipe.optimizer.lr
        records = read_metrics(self._run.dir.metrics)
        rates = [record.get("lr") for record in records if record["step"] == self._step]
        recorded = [rate for rate in rates if rate is not None]
        if recorded and not math.isclose(recorded[-1], base_lr * factor(self._step - 1), rel_tol=1e-6):
            change = f"lr {recorded[-1]:.1e} -> {base_lr * factor(self._step):.1e}"
            metrics.warn(self._step, f"the schedule now ends at step {self._config.steps}: {change}")

    def _run_steps(self, parts: _LoopParts, signals: SignalHandler) -> signal.Signals | None:
        config, engine, flags_every = self._config, self._engine, 1
        metrics, saving, heartbeat = parts.metrics, parts.saving, parts.heartbeat
        lr_factor = lr_lambda(self._recipe.schedule, config.steps)

        def wait_for_save(*, may_raise: bool = True) -> None:
            heartbeat.beat(self._step, "saving", slow=True)
            saving.wait(may_raise=may_raise)

        while self._step < config.steps and not self._is_stopped:
            before, factor = self._step, lr_factor(self._step)
            lr = self._recipe.optimizer.lr * factor
            result, step_metrics = self._run_step(parts, lr, factor)
            metrics.step(step_metrics)
            if result.exchange is not None:
                metrics.exchange(self._step, result.exchange)
            if result.expert_loads and _due(before, self._step, config.log_every, config.steps):
                metrics.experts(self._step, result.expert_loads)
            if parts.servers is not None and _due(before, self._step, config.log_every, config.steps):
                metrics.servers(self._step, parts.servers.since_last())
            if self._step == parts.first_step + 1:  # from here on the optimizer has states
                saving.reserve(engine.state_shards())
            if self._bad_steps_in_a_row >= config.max_skipped:
                wait_for_save(may_raise=False)  # the error below names the newest checkpoint
                raise self._diverged(lr) if result.num_tokens else self._without_targets()
            message = self.spikes.observe(self._step, result, wait_for_save)
            if message is not None:
                metrics.log(message)
            if self.spikes.rollback_to is not None:
                return None
            self.call("on_step", signals, step_metrics)
            score = None
            if _due(before, self._step, config.evaluate_every, config.steps):
                score = self._score(parts, signals)
            if _due(before, self._step, self._recipe.eval.every or config.steps, config.steps):
                self._tasks.record(metrics, self._step, partial(heartbeat.beat, self._step, "tasks"))
            if self._step == parts.first_step + 5:  # the first steps are slower than later ones
                flags_every = self._flags_every(step_metrics.seconds)
            stop_signal, to_save = None, False
            if self._step % flags_every == 0:
                stop_signal, to_save = self._agree_on_requests(signals, saving, metrics)
            last = stop_signal is not None or self._step == config.steps or self._is_stopped
            to_save |= last or _due(before, self._step, config.checkpoint_every, config.steps)
            check_every = self._at_exchanges(config.check_replicas_every)
            if check_every and (to_save or self._step % check_every == 0):
                engine.check_replicas()  # before a corrupt checkpoint replaces good ones
            if to_save:
                heartbeat.beat(self._step, "saving", slow=True)
                metrics.flush()
                shards, facts = engine.state_shards(), self._facts()
                saving.save(
                    self._step, shards, facts, score=score, last=last, update_after=engine.update_after
                )
                signals.save_requested = False  # on any rank: this save answers all requests
            if stop_signal is not None and self._step < config.steps:
                self._recorder.end_trace()
                folder = self._run.dir.path
                metrics.log(f"stopped after step {self._step} and saved: plait train {folder} --resume")
                return stop_signal
        return None

    def _at_exchanges(self, every: int) -> int:
        """A number of steps, rounded up: islands communicate only when they exchange weights."""
        round_steps = self._engine.plan.local_steps or 1
        return -(-every // round_steps) * round_steps

    def _run_step(self, parts: _LoopParts, lr: float, factor: float) -> tuple[StepResult, StepMetrics]:
        """Run and count a step on the next batch. `factor`: of the learning rate of every group."""
        is_slow = self._step == parts.first_step
        start_s = time.perf_counter()
        for group, base_lr in zip(self._engine.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        loss_scale = self._engine.loss_scale
        parts.stragglers.begin(self._step)
        parts.heartbeat.beat(self._step, "reading data", slow=is_slow)
        batch = next(parts.batches)
        num_before = self._engine.num_steps
        parts.heartbeat.beat(self._step, "a step", slow=is_slow)
        result = self._recorder.step(batch)
        _, batch_size = self._sizes.span(self._step + self.spikes.num_skipped)
        taken = self._engine.num_steps - num_before  # 1, unless servers went on without this worker
        self._step += taken
        for _ in range(taken - 1):
            next(parts.batches, None)
        parts.stragglers.end(self._step)
        num_tokens = (self._recorder.pairs or result).num_tokens * self._engine.plan.num_islands
        self._tokens += num_tokens
        scaling = self._recipe.loss_scale
        can_shrink = loss_scale is not None and scaling.dynamic and loss_scale > scaling.minimum
        if not result.skipped:
            self._bad_steps_in_a_row = 0
        elif not (can_shrink and math.isfinite(result.loss)):
            self._bad_steps_in_a_row += 1
        self._skipped += result.skipped
        parts.garbage.after_step(self._step)
        seconds = time.perf_counter() - start_s
        documents = round(batch_size * self._run.train_samples[0].documents_per_sample)
        num_inputs = num_tokens + documents  # the last token of a document is no input to a target
        causal_flops, full_flops = (
            self._engine.flops_per_token(num_inputs // documents, causal=causal) * num_inputs
            for causal in (True, False)
        )
        peaks = parts.peak_flops
        possible, possible_matmul = (
            self._world.size * peak * seconds for peak in (peaks.for_mfu, peaks.measured)
        )
        return result, StepMetrics(
            step=self._step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            skipped_steps=self._skipped,
            batch=batch_size,
            tokens=self._tokens,
            tokens_per_s=num_tokens / seconds,
            mfu=causal_flops / possible,
            mfu_full_attention=full_flops / possible,
            mfu_of_matmul=causal_flops / possible_matmul,
            seconds=seconds,
            loss_scale=loss_scale,
            aux_loss=result.aux_loss,
            dropped_choices=result.dropped_choices,
            router_z_loss=result.router_z_loss,
            **(expert_facts(result.expert_loads) | self._recorder.rewards),
        )

    def _agree_on_requests(
        self, signals: SignalHandler, saving: Checkpointing, metrics: Metrics
    ) -> tuple[signal.Signals | None, bool]:
        """Return the signal with which any rank has to stop, and whether any has to save. Collects a finished
        save, and warns of a GPU without free memory."""
        stop = signals.stop_signal
        retries, self._retries = self._retries, num_allocator_retries(self._engine.device)
        is_interrupted, is_terminated, to_save, has_ended, has_retried = self._world.any_flags(
            stop is signal.SIGINT,
            stop is signal.SIGTERM,
            signals.save_requested or saving.is_due,
            saving.has_ended,
            self._retries > retries,
        )
        if has_retried:
            metrics.warn(self._step, _RETRIED)
        if has_ended:
            saving.wait()
        if is_interrupted or is_terminated:
            return signal.SIGINT if is_interrupted else signal.SIGTERM, to_save
        return None, to_save

    def _flags_every(self, step_s: float) -> int:
        """Return the number of steps between flag exchanges: about one a second, equal on all ranks.

        On a GPU each exchange synchronizes the device. On the CPU its cost is negligible. Islands communicate
        only when they exchange weights.
        """
        if self._engine.plan.local_steps:
            return self._engine.plan.local_steps
        if self._engine.device.type == "cpu":
            return 1
        slowest_s = torch.tensor([step_s], device=self._engine.device)
        all_reduce(slowest_s, self._world.group, "max")
        return max(1, min(MAX_STEPS_BETWEEN_FLAGS, int(1.0 / slowest_s.item())))

    def call(self, event: str, signals: SignalHandler, *args: object) -> None:
        """Call a method of all callbacks."""
        run = CallbackRun(self._engine, self._run.dir.path, self._world.rank, self._step, signals)
        self._callbacks.call(event, run, *args)

    def _score(self, parts: _LoopParts, signals: SignalHandler) -> float:
        """Evaluate, record and return the loss, and count evaluations since the lowest one."""
        score = self._batches.evaluate(partial(parts.heartbeat.beat, self._step, "evaluation"))
        pairs = None if self._engine.pairs is None else self._engine.pairs.take()
        parts.metrics.validation(self._step, score, pairs)
        self._since_best = 0 if score < self._best_score else self._since_best + 1
        self._best_score = min(self._best_score, score) if math.isfinite(score) else self._best_score
        if self._is_stopped:
            since = counted(self._since_best, "evaluation")
            parts.metrics.log(
                f"stopped early: {since} without a validation loss below {self._best_score:.4f}"
            )
        self.call("on_evaluate", signals, score)
        return score

    def rollback(self, path: Path) -> None:
        """Load a checkpoint from before a spike; save it again with the batches that are to be skipped."""
        saved = open_on_all_ranks(path, self._world)
        with saved.reader() as reader:
            self._engine.load_from(reader, options=False)  # the recipe's
        self._restore_progress(saved)
        self._warnings = [self.spikes.skip_batches(self._step)]
        folder = self._run.dir.checkpoints
        Saver(folder, self._world).save(self._step, self._engine.state_shards(), self._facts())
        if self._console is not None:
            checkpoint.remove_after(folder, self._step)

    def _facts(self) -> dict[str, object]:
        """Return the metadata of a checkpoint."""
        generation = self._recipe.model.generation
        return {
            "tokens": self._tokens,
            "skipped": self._skipped,
            "spikes": self.spikes.facts(),
            "best_score": (self._best_score if math.isfinite(self._best_score) else None, self._since_best),
            "seed": self._config.seed,
            "plan": str(self._engine.plan),
            "loss_scale": self._engine.loss_scale,
            "compile": None if (choice := self._engine.compile_choice) is None else choice.facts(),
            **self._run.facts(),
            **({} if generation is None else {"generation": generation}),
            "versions": {"plait": __version__}
            | {module.__name__: str(module.__version__) for module in (torch, transformers)},
        }

    def _show_start(self, peak_flops: PeakFlops) -> None:
        memory = largest_memory(self._recipe, self._engine)
        if self._console is None:
            return
        facts = self._run.data_facts()
        self._console.print(start_table(self._recipe, self._engine, self._sizes, peak_flops, memory, facts))
        if self._step:
            is_complete = self._step >= self._config.steps
            done = ": training is complete (raise run.steps to go on)" if is_complete else ""
            self._console.print(f"resumed after step {self._step}{done}", highlight=False)

    def _without_targets(self) -> RunError:
        return RunError(
            f"{self._bad_steps_in_a_row} steps in a row were skipped, and the last one had no target",
            given=f"up to step {self._step}, data.sequence = {self._recipe.data.sequence}",
            expected="batches with a trained token: `plait data show` prints samples",
            hint="a longer data.sequence, or a larger run.batch",
        )

    def _diverged(self, lr: float) -> RunError:
        saved = checkpoint.steps(self._run.dir.checkpoints)
        newest = f"; the newest checkpoint is {saved[-1]}" if saved else ""
        scale = self._engine.loss_scale
        at_scale = "" if scale is None else f" and a loss scale of {scale:g}"
        is_fixed = scale is not None and not self._recipe.loss_scale.dynamic
        try_dynamic = ", a smaller loss_scale.initial or loss_scale.dynamic=true" if is_fixed else ""
        try_bf16 = "" if scale is None else f"{try_dynamic}, precision=bf16"
        return RunError(
            f"the gradient was not finite in {self._bad_steps_in_a_row} steps in a row",
            given=f"up to step {self._step}, with a learning rate of {lr:.2e}{at_scale}",
            expected="finite gradients; skipped steps do not change the weights",
            hint=f"a smaller optimizer.lr or clip_norm{try_bf16}{newest}",
        )

    def finish(self) -> None:
        """Write loss.png, the export and the measurements, and print the results. Raises a PlaitError."""
        options = self._recipe.sample
        sample = (
            sample_text(self._engine, self._run.dir, options, self._config.seed) if options.tokens else ""
        )
        if self._console is not None:
            self._write_outputs(self._console, sample)
            self._world.store.set(_FINISHED)
        self._world.store.wait_for(_FINISHED)  # a rank that exits would end rank 0's export
        write_measured(self._run.dir.measured, self._engine, self._recorder)

    def _write_outputs(self, console: Console, sample: str) -> None:
        """Write loss.png and the export; print memory, paths and a sample. On rank 0."""
        run, engine = self._run.dir, self._engine
        ranks = "per rank" if engine.plan.pp == 1 else f"of rank {engine.world.rank}"
        ranks = "of worker 0" if engine.plan.num_servers else ranks
        console.print(memory_table(estimated_memory(self._recipe, engine), engine.memory(), ranks))
        with writing("cannot write a plot", run.picture):
            draw_losses(run.metrics, run.picture)
            has_experts = draw_experts(run.metrics, run.experts)
            if engine.plan.num_servers:
                draw_clocks(run.metrics, run.clocks)
        # The export from before a resume, and partial exports of a process that was killed.
        for old in (run.export, *run.path.glob(f"{run.export.name}.tmp-*"), run.adapter):
            shutil.rmtree(old, ignore_errors=True)
        write, out = (export, run.export) if self._recipe.adapter is None else (export_adapter, run.adapter)
        write(run, out)
        outputs = {
            "checkpoint": checkpoint.steps(run.checkpoints)[-1],
            ("Hugging Face export" if self._recipe.adapter is None else "PEFT adapter"): out,
            **({"TensorBoard": run.tensorboard} if "tensorboard" in self._config.report_to else {}),
            "metrics": run.metrics,
            "loss": run.picture,
            **({"loads of experts": run.experts} if has_experts else {}),
            **({"workers' clocks": run.clocks} if engine.plan.num_servers else {}),
        }
        for name, path in outputs.items():
            console.print(plain(f"{name:<19} : {path}"), highlight=False, soft_wrap=True)
        if sample:
            console.print("sample of generated text:", style="bold")
            with writing("cannot write the sample", run.sample):
                write_text(run.sample, sample)
            console.print(plain(sample), highlight=False)


def _due(before: int, step: int, every: int, steps: int) -> bool:
    """Return whether a multiple of `every` was reached or passed after step `before`, or the last step."""
    return every > 0 and (step // every > before // every or step == steps)
