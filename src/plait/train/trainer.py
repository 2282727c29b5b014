"""The training loop. Every rank runs it; rank 0 also logs and writes files.

[Note: skipped steps that end a run]
A step with a non-finite loss or gradient is skipped, and run.max_skipped such steps in a row end the run. In
fp16, overflowing gradients are how the loss scale finds its level: going from 65536 down to 1 takes sixteen
steps, more with hysteresis, and none of them means that the run has diverged. In fp16 a skipped step
therefore counts only if no smaller scale could have saved it: its loss is not finite (the scale does not
affect that), or the scale is at its minimum.
"""

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rich
import torch
import transformers
from rich.console import Console
from torch import Tensor

import plait
from plait import checkpoint
from plait.api import parallelize
from plait.checkpoint import Checkpoint, Saver
from plait.checkpoint.checkpoint import open_on_all_ranks
from plait.comm import World, all_reduce
from plait.data.dataset import TokenStore, TokenStream, open_store
from plait.data.loader import loader
from plait.engine.engine import Engine, StepResult
from plait.errors import RunError
from plait.plan import Plan
from plait.train.checkpointing import Checkpointing
from plait.train.config import Recipe
from plait.train.export import DTYPES, export, generate
from plait.train.health.loss_spikes import LossSpikeGuard
from plait.train.health.monitor import HealthMonitor
from plait.train.measurements import TraceRecorder, TrafficRecorder, write_measured
from plait.train.metrics import Metrics, StepMetrics, matmul_peak
from plait.train.model import initial_model, model_on_meta
from plait.train.optimizer import lr_lambda, optimizer_class
from plait.train.prepare import check_checkpoint, run_facts
from plait.train.report import draw_losses, estimated_memory, largest_memory, memory_table, start_table
from plait.train.resume import load_newest
from plait.train.run_dir import RunDir
from plait.train.signals import SignalHandler

MAX_STEPS_BETWEEN_FLAGS = 10
_FINISHED = "plait: finished"


def finish(recipe: Recipe, run: RunDir, engine: Engine, console: Console) -> None:
    """Write loss.png and the export; print memory, paths and a sample. On rank 0. Raises a PlaitError."""
    ranks = "per rank" if engine.plan.pp == 1 else f"of rank {engine.world.rank}"
    console.print(memory_table(estimated_memory(recipe, engine), engine.memory(), ranks))
    try:
        draw_losses(run.metrics, run.picture)
    except OSError as error:
        raise RunError("cannot write the loss plot", given=f"{run.picture}: {error}") from error
    # The export from before a resume, and partial exports of a process that was killed.
    for old in (run.export, *run.path.glob(f"{run.export.name}.tmp-*")):
        shutil.rmtree(old, ignore_errors=True)
    export(run, run.export)
    outputs = {
        "checkpoint": checkpoint.steps(run.checkpoints)[-1],
        "Hugging Face export": run.export,
        "TensorBoard": run.tensorboard,
        "metrics": run.metrics,
        "loss": run.picture,
    }
    for name, path in outputs.items():
        console.print(f"{name:<19} : {path}", highlight=False, soft_wrap=True, markup=False)
    if recipe.sample.tokens:
        options = recipe.sample.model_dump()
        console.print("sample of generated text:", style="bold")
        console.print(generate(run, **options, seed=recipe.run.seed), markup=False, highlight=False)


@dataclass
class TrainState:
    """A run on this rank, and its progress."""

    recipe: Recipe
    run: RunDir
    store: TokenStore
    engine: Engine
    traffic: TrafficRecorder
    spikes: LossSpikeGuard
    console: Console | None  # on rank 0
    warnings: list[str] = field(default_factory=list)  # from startup, to be logged by rank 0
    step: int = 0  # steps done
    tokens: int = 0  # target tokens trained on
    skipped: int = 0  # steps skipped
    bad_steps_in_a_row: int = 0  # see [Note: skipped steps that end a run]

    @property
    def batches_left(self) -> range:
        """The indices of the remaining batches. See [Note: batch numbering] in health/loss_spikes.py."""
        offset = self.spikes.num_skipped
        return range(self.step + offset, self.recipe.run.steps + offset)

    def count(self, result: StepResult, loss_scale: float | None) -> None:
        """Record a finished step that ran with `loss_scale`."""
        self.step += 1
        self.tokens += result.num_tokens
        if not result.skipped:
            self.bad_steps_in_a_row = 0
            return
        self.skipped += 1
        can_shrink = loss_scale is not None and loss_scale > self.recipe.loss_scale.minimum
        if not (can_shrink and math.isfinite(result.loss)):
            self.bad_steps_in_a_row += 1


def train(recipe: Recipe, world: World) -> signal.Signals | None:
    """Train from the run's newest checkpoint, or from the beginning, to the recipe's last step.

    Returns None, or the signal that stopped the run, whose state is then saved. Raises a PlaitError.
    """
    with SignalHandler() as signals:
        state = _start(recipe, world)
        stopped_by = _loop(state, signals)
        while state.spikes.rollback_to is not None:
            _rollback(state, state.spikes.rollback_to)
            stopped_by = _loop(state, signals)
        if stopped_by is None:  # signals are ignored from here on: training is complete
            if state.console is not None:
                finish(recipe, state.run, state.engine, state.console)
                world.announce(_FINISHED)
            world.wait_for(_FINISHED)  # a rank that exits would end rank 0's export
            write_measured(state.run.measured, state.engine, state.traffic, recipe.run.trace)
    return stopped_by


def _loop(state: TrainState, signals: SignalHandler) -> signal.Signals | None:
    config, engine, first_step, flags_every = state.recipe.run, state.engine, state.step, 1
    engine.world.barrier()  # ranks of a host measure at the same time: they share it in training too
    peak_flops = matmul_peak(engine.device, DTYPES[engine.plan.precision])
    _show_start(state, peak_flops)
    lr_factor = lr_lambda(state.recipe.schedule, config.steps)
    batches = _batches(state, state.store.train, state.batches_left, state.recipe.data.workers)
    with (
        Metrics(state.run, state.console, first_step, config.steps, config.log_every) as metrics,
        Checkpointing(config, state.run.checkpoints, engine.world, metrics) as saving,
        HealthMonitor(state.run, config, engine, state.spikes, metrics.log) as monitor,
    ):
        for text in state.warnings:
            metrics.warn(first_step, text)
        if first_step == 0 and config.evaluate_every:
            metrics.validation(0, _evaluate(state, monitor))
        trace = TraceRecorder(
            engine, state.traffic.step, config.trace, range(first_step, config.steps), metrics.log
        )
        while state.step < config.steps:
            lr = state.recipe.optimizer.lr * lr_factor(state.step)
            result, step_metrics = _step(
                state, lr, lambda: monitor.step(state.step, batches, trace.step), _ideal_s(state, peak_flops)
            )
            metrics.step(step_metrics)
            if state.step == first_step + 1:  # from here on the optimizer has states
                saving.reserve(engine.state_shards())
            if state.bad_steps_in_a_row >= config.max_skipped:
                monitor.enter("saving", state.step, slow=True)
                saving.wait(may_raise=False)  # the error below names the newest checkpoint
                raise _diverged(state, lr)
            if monitor.check_spike(state.step, result, saving.wait):
                return None
            score = None
            if _due(state.step, config.evaluate_every, config.steps):
                score = _evaluate(state, monitor)
                metrics.validation(state.step, score)
            if state.step == first_step + 5:  # the first steps are slower than later ones
                flags_every = _flags_every(engine, step_metrics.seconds)
            stopping = to_save = False
            if state.step % flags_every == 0:
                stopping, to_save = _agree_on_requests(engine, signals, saving)
            last = stopping or state.step == config.steps
            to_save = last or to_save or _due(state.step, config.checkpoint_every, config.steps)
            if config.check_replicas_every and (to_save or state.step % config.check_replicas_every == 0):
                engine.check_replicas()  # before a corrupt checkpoint replaces good ones
            if to_save:
                monitor.enter("saving", state.step, slow=True)
                metrics.flush()
                saving.save(state.step, engine.state_shards(), _facts(state), score=score, last=last)
                signals.save_requested = False  # on any rank: this save answers all requests
            if stopping and state.step < config.steps:
                trace.end()
                metrics.log(
                    f"stopped after step {state.step} and saved: plait train {state.run.path} --resume"
                )
                return signals.stop_signal or signal.SIGTERM
    return None


def _ideal_s(state: TrainState, peak_flops: float) -> float:
    """Duration of a step at the peak rate of all ranks."""
    sequence, engine = state.recipe.data.sequence, state.engine
    flops = engine.flops_per_token(sequence) * state.recipe.run.batch * sequence
    return flops / (engine.world.size * peak_flops)


def _agree_on_requests(engine: Engine, signals: SignalHandler, saving: Checkpointing) -> tuple[bool, bool]:
    """Return whether any rank has to stop, and whether any has to save. Collects a finished save."""
    stopping, to_save, has_ended = engine.world.any_flags(
        signals.stop_signal is not None, signals.save_requested or saving.is_due, saving.has_ended
    )
    if has_ended:
        saving.wait()
    return stopping, to_save


def _step(
    state: TrainState, lr: float, run_step: Callable[[], StepResult], ideal_s: float
) -> tuple[StepResult, StepMetrics]:
    """Run and count one step. `ideal_s`: the time of a step of matrix products only, at peak FLOP/s."""
    start_s = time.perf_counter()
    for group in state.engine.optimizer.param_groups:
        group["lr"] = lr
    loss_scale = state.engine.loss_scale
    result = run_step()
    state.count(result, loss_scale)
    seconds = time.perf_counter() - start_s
    return result, StepMetrics(
        step=state.step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        skipped_steps=state.skipped,
        tokens=state.tokens,
        tokens_per_s=result.num_tokens / seconds,
        mfu=ideal_s / seconds,
        seconds=seconds,
        loss_scale=loss_scale,
    )


def _flags_every(engine: Engine, step_s: float) -> int:
    """Return the number of steps between flag exchanges: about one exchange per second, equal on all ranks.

    On a GPU each exchange synchronizes the device. On the CPU its cost is negligible.
    """
    if engine.device.type == "cpu":
        return 1
    slowest_s = torch.tensor([step_s], device=engine.device)
    all_reduce(slowest_s, engine.world.group, "max")
    return max(1, min(MAX_STEPS_BETWEEN_FLAGS, int(1.0 / slowest_s.item())))


def _due(step: int, every: int, steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == steps)


def _start(recipe: Recipe, world: World) -> TrainState:
    """Build the engine and load the newest intact checkpoint, if there is one."""
    store = open_store(recipe.data, recipe.tokenizer, verify=False)  # `prepare` has hashed the files
    plan = Plan.parse(recipe.plan)
    run = RunDir(recipe.run.dir)
    # Rank 0 decides, as it also chooses the checkpoint: file systems show new files late on other hosts.
    resuming = world.any_flag(world.rank == 0 and bool(checkpoint.steps(run.checkpoints)))
    model, weights = (model_on_meta(recipe.model), None) if resuming else initial_model(recipe.model)
    engine = parallelize(
        model,
        plan,
        optimizer=optimizer_class(recipe.optimizer),
        optimizer_args=recipe.optimizer.torch_args(),
        clip_norm=recipe.optimizer.clip_norm,
        clip_value=recipe.optimizer.clip_value,
        loss_scaling=recipe.loss_scale.scaling() if plan.precision == "fp16" else None,
        offload_dir=recipe.run.offload_dir if plan.offload == "disk" else None,
        tensor_plan=recipe.model.tensor_plan,
        probe=recipe.run.probe,
        seed=recipe.run.seed,
        weights=weights,
        world=world,
    )
    console = rich.get_console() if world.rank == 0 else None
    state = TrainState(
        recipe, run, store, engine, TrafficRecorder(engine), LossSpikeGuard(recipe.run), console
    )
    newest, state.warnings = load_newest(
        engine, run.checkpoints, lambda saved: check_checkpoint(saved, recipe, store)
    )
    if newest is not None:
        _restore_progress(state, newest)
    elif run.metrics.exists():
        state.warnings.append("no checkpoint yet: the run starts from the beginning")
    return state


def _restore_progress(state: TrainState, saved: Checkpoint) -> None:
    """Set the progress to that of a checkpoint which the engine has loaded."""
    state.step, state.tokens = saved.step, int(saved.facts["tokens"])
    state.skipped, state.bad_steps_in_a_row = int(saved.facts["skipped"]), 0
    state.spikes.load(saved.facts)


def _rollback(state: TrainState, path: Path) -> None:
    """Load a checkpoint from before a spike, and save it again with the batches that are to be skipped."""
    saved = open_on_all_ranks(path, state.engine.world)
    with saved.reader() as reader:
        state.engine.load_from(reader)
    _restore_progress(state, saved)
    state.warnings = [state.spikes.skip_batches(state.step)]
    Saver(state.run.checkpoints, state.engine.world).save(
        state.step, state.engine.state_shards(), _facts(state)
    )
    if state.console is not None:
        checkpoint.remove_after(state.run.checkpoints, state.step)


def _batches(
    state: TrainState, stream: TokenStream, steps: range, workers: int
) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's share of the batch of each of `steps`."""
    batches: Iterator[dict[str, Tensor]] = iter(
        loader(
            stream,
            sequence=state.recipe.data.sequence,
            global_batch=state.recipe.run.batch,
            data_rank=state.engine.data_rank,
            data_ranks=state.engine.data_ranks,
            seed=state.recipe.run.seed,
            order=state.recipe.data.order,
            first_step=steps.start,
            last_step=steps.stop,
            workers=workers,
            pin_memory=state.engine.device.type == "cuda",
        )
    )
    return batches


def _evaluate(state: TrainState, monitor: HealthMonitor) -> float:
    """Return the mean loss per target token over the validation batches, the same ones each time."""
    batches = _batches(state, state.store.validation, range(state.recipe.run.evaluate_batches), workers=0)
    results = []
    for number, batch in enumerate(batches):
        monitor.enter("evaluation", state.step, slow=number == 0)
        results.append(state.engine.evaluate(batch))
    return sum(result.loss_sum for result in results) / sum(result.num_tokens for result in results)


def _facts(state: TrainState) -> dict[str, object]:
    """Return the metadata of a checkpoint."""
    return {
        "tokens": state.tokens,
        "skipped": state.skipped,
        "spikes": state.spikes.facts(),
        "seed": state.recipe.run.seed,
        "plan": str(state.engine.plan),
        "loss_scale": state.engine.loss_scale,
        **run_facts(state.recipe, state.store),
        "versions": {module.__name__: str(module.__version__) for module in (plait, torch, transformers)},
    }


def _show_start(state: TrainState, peak_flops: float) -> None:
    memory = largest_memory(state.recipe, state.engine)
    if state.console is not None:
        state.console.print(start_table(state.recipe, state.engine, peak_flops, memory))
        if state.step:
            done = (
                ""
                if state.step < state.recipe.run.steps
                else ": training is complete (raise run.steps to go on)"
            )
            state.console.print(f"resumed after step {state.step}{done}", highlight=False)


def _diverged(state: TrainState, lr: float) -> RunError:
    saved = checkpoint.steps(state.run.checkpoints)
    newest = f"; the newest checkpoint is {saved[-1]}" if saved else ""
    scale = state.engine.loss_scale
    at_scale = "" if scale is None else f" and a loss scale of {scale:g}"
    try_bf16 = "" if scale is None else ", precision=bf16"
    return RunError(
        f"the gradient was not finite in {state.bad_steps_in_a_row} steps in a row",
        given=f"up to step {state.step}, with a learning rate of {lr:.2e}{at_scale}",
        expected="finite gradients; skipped steps do not change the weights",
        hint=f"a smaller optimizer.lr or clip_norm{try_bf16}{newest}",
    )
