"""The training loop, on one rank. Every rank runs it; the first one also speaks and writes.

[Note: when skipped steps end a run]
A step whose loss or gradient is not finite is skipped, and run.max_skipped of them in a row end the run.
In fp16 a gradient that overflows is how the loss scale finds its level: from 65536 down to 1 are sixteen
steps, more with hysteresis, and none of them says that the run has diverged. There a skipped step counts
when no smaller scale could have saved it: its loss is not finite (the scale is no part of that), or the
scale is at its minimum.

The end of a run, on its first rank: picture, export, where everything is, a sample of text.
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
from plait.checkpoint import Checkpoint, Saver, open_together
from plait.comm import World, all_reduce
from plait.data import TokenStore, TokenStream, loader, open_store
from plait.engine.engine import Engine, StepResult
from plait.errors import RunError
from plait.plan import Plan
from plait.train.checkpointing import Checkpointing
from plait.train.config import Recipe
from plait.train.export import DTYPES, export, generate
from plait.train.health.loss_spikes import LossSpikeGuard
from plait.train.health.monitor import HealthMonitor
from plait.train.measurements import TraceRecorder, TrafficRecorder, write_measured
from plait.train.metrics import Metrics, StepFacts, matmul_peak
from plait.train.model import model_on_meta, starting_model
from plait.train.report import draw_losses, estimated_memory, largest_memory, memory_table, start_table
from plait.train.resume import load_newest
from plait.train.run import RunDir, check_checkpoint, run_facts
from plait.train.signals import SignalHandler


def finish(recipe: Recipe, run: RunDir, engine: Engine, console: Console) -> None:
    """Writes loss.png and the export, shows memory, paths and a sample. Raises a PlaitError."""
    of = "per rank" if engine.plan.pp == 1 else f"of rank {engine.world.rank}"
    console.print(memory_table(estimated_memory(recipe, engine), engine.memory(), of))
    try:
        draw_losses(run.metrics, run.picture)
    except OSError as error:
        raise RunError("the picture cannot be written", given=f"{run.picture}: {error}") from error
    # The first: of this run before it was resumed. The others: of a run killed while it exported.
    for old in (run.export, *run.path.glob(f"{run.export.name}.tmp-*")):
        shutil.rmtree(old, ignore_errors=True)
    export(run, run.export)
    places = {
        "checkpoint": checkpoint.steps(run.checkpoints)[-1],
        "Hugging Face export": run.export,
        "TensorBoard": run.tensorboard,
        "metrics": run.metrics,
        "loss": run.picture,
    }
    for name, path in places.items():
        console.print(f"{name:<19} : {path}", highlight=False, soft_wrap=True, markup=False)
    if recipe.sample.tokens:
        how = recipe.sample.model_dump()
        console.print("a sample of what it writes:", style="bold")
        console.print(generate(run, **how, seed=recipe.run.seed), markup=False, highlight=False)


MOST_STEPS_UNASKED = 10


_FINISHED = "plait: finished"


@dataclass
class TrainState:
    """A run on this rank, and how far it is."""

    recipe: Recipe
    run: RunDir
    store: TokenStore
    engine: Engine
    heard: TrafficRecorder
    spikes: LossSpikeGuard
    console: Console | None  # on the first rank
    warnings: list[str] = field(default_factory=list)  # of its start, for the first rank to show
    step: int = 0  # steps done
    tokens: int = 0  # targets seen
    skipped: int = 0  # steps that were skipped
    bad_steps_in_a_row: int = 0  # of them in a row, see [Note: when skipped steps end a run]

    @property
    def batches_left(self) -> range:
        """The numbers of the batches to come; see [Note: which batch is whose] in spikes.py."""
        ahead = self.spikes.num_skipped
        return range(self.step + ahead, self.recipe.run.steps + ahead)

    def count(self, result: StepResult, loss_scale: float | None) -> None:
        """A step is done, of which `loss_scale` was the loss scale."""
        self.step += 1
        self.tokens += result.num_tokens
        if not result.skipped:
            self.bad_steps_in_a_row = 0
            return
        self.skipped += 1
        can_fall = loss_scale is not None and loss_scale > self.recipe.loss_scale.minimum
        if not (can_fall and math.isfinite(result.loss)):
            self.bad_steps_in_a_row += 1


def train(recipe: Recipe, world: World) -> signal.Signals | None:
    """Trains from the newest checkpoint of the run, or from the beginning, to the recipe's last step.

    Returns None, or the signal that it was stopped by, with the state then saved. Raises a PlaitError.
    """
    with SignalHandler() as stop:
        job = _start(recipe, world)
        stopped_by = _loop(job, stop)
        while job.spikes.back_to is not None:
            _rollback(job, job.spikes.back_to)
            stopped_by = _loop(job, stop)
        if stopped_by is None:  # a signal now comes late: all is trained
            if job.console is not None:
                finish(recipe, job.run, job.engine, job.console)
                world.announce(_FINISHED)
            world.wait_for(_FINISHED)  # a rank that left would take the first one's export down with it
            write_measured(job.run.measured, job.engine, job.heard, recipe.run.trace)
    return stopped_by


def _loop(job: TrainState, stop: SignalHandler) -> signal.Signals | None:
    how, engine, begun_at, ask_every = job.recipe.run, job.engine, job.step, 1
    engine.world.barrier()  # the ranks of a host share it while they measure, as they will in training
    peak_flops = matmul_peak(engine.device, DTYPES[engine.plan.precision])
    _show_start(job, peak_flops)
    flops = engine.flops_per_token(job.recipe.data.sequence) * how.batch * job.recipe.data.sequence
    ideal_s = flops / (engine.world.size * peak_flops)
    course = job.recipe.schedule.course(how.steps)
    batches = _batches(job, job.store.train, job.batches_left, job.recipe.data.workers)
    with (
        Metrics(job.run, job.console, begun_at, how.steps, how.log_every) as metrics,
        Checkpointing(how, job.run.checkpoints, engine.world, metrics) as saving,
        HealthMonitor(job.run, how, engine, job.spikes, metrics.note) as watch,
    ):
        for text in job.warnings:
            metrics.warn(begun_at, text)
        if begun_at == 0 and how.evaluate_every:
            metrics.validation(0, _evaluate(job, watch))
        traced = TraceRecorder(engine, job.heard.step, how.trace, range(begun_at, how.steps), metrics.note)
        while job.step < how.steps:
            lr = job.recipe.optimizer.lr * course(job.step)
            result, facts = _step(job, lr, lambda: watch.step(job.step, batches, traced.step), ideal_s)
            metrics.step(facts)
            if job.step == begun_at + 1:  # now there are optimizer states
                saving.expect(engine.state_shards())
            if job.bad_steps_in_a_row >= how.max_skipped:
                watch.begins("saving", job.step, slow=True)
                saving.settle(may_raise=False)  # its checkpoint is one that the letter may name
                raise _diverged(job, lr)
            if watch.sees_spike(job.step, result, saving.settle):
                return None
            score = None
            if _due(job.step, how.evaluate_every, how.steps):
                score = _evaluate(job, watch)
                metrics.validation(job.step, score)
            if job.step == begun_at + 5:  # the first steps are slower than those to come
                ask_every = _ask_every(engine, facts.seconds)
            stopping = to_save = False
            if job.step % ask_every == 0:
                stopping, to_save, has_ended = engine.world.any_flags(
                    stop.asked is not None, stop.save_asked or saving.is_late, saving.has_ended
                )
                if has_ended:
                    saving.settle()
            last = stopping or job.step == how.steps
            to_save = last or to_save or _due(job.step, how.checkpoint_every, how.steps)
            if how.check_replicas_every and (to_save or job.step % how.check_replicas_every == 0):
                engine.check_replicas()  # before good checkpoints make room for one that is not
            if to_save:
                watch.begins("saving", job.step, slow=True)
                metrics.flush()
                saving.save(job.step, engine.state_shards(), _facts(job), score=score, last=last)
                stop.save_asked = False  # of any rank: this answers all of them
            if stopping and job.step < how.steps:
                traced.end()
                metrics.note(f"stopped after step {job.step}, saved: plait train {job.run.path} --resume")
                return stop.asked or signal.SIGTERM
    return None


def _step(
    job: TrainState, lr: float, take: Callable[[], StepResult], ideal_s: float
) -> tuple[StepResult, StepFacts]:
    """Takes and counts one. `ideal_s`: of a step that does nothing but products."""
    began_s = time.perf_counter()
    for group in job.engine.optimizer.param_groups:
        group["lr"] = lr
    loss_scale = job.engine.loss_scale
    result = take()
    job.count(result, loss_scale)
    seconds = time.perf_counter() - began_s
    return result, StepFacts(
        step=job.step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        skipped_steps=job.skipped,
        tokens=job.tokens,
        tokens_per_s=result.num_tokens / seconds,
        mfu=ideal_s / seconds,
        seconds=seconds,
        loss_scale=loss_scale,
    )


def _ask_every(engine: Engine, step_s: float) -> int:
    """Steps from one exchange of flags to the next: about one a second, the same on all ranks.

    On a GPU each makes the device wait. On the CPU it costs nothing beside a step.
    """
    if engine.device.type == "cpu":
        return 1
    slowest_s = torch.tensor([step_s], device=engine.device)
    all_reduce(slowest_s, engine.world.group, "max")
    return max(1, min(MOST_STEPS_UNASKED, int(1.0 / slowest_s.item())))


def _due(step: int, every: int, steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == steps)


def _start(recipe: Recipe, world: World) -> TrainState:
    """The engine, and in it the newest checkpoint that is whole, if there is one."""
    store = open_store(recipe.data, recipe.tokenizer, verify=False)  # `prepare` has hashed the files
    plan = Plan.parse(recipe.plan)
    run = RunDir(recipe.run.dir)
    # As the first rank sees it, who also chooses one: file systems lag.
    goes_on = world.any_flag(world.rank == 0 and bool(checkpoint.steps(run.checkpoints)))
    model, weights = (model_on_meta(recipe.model), None) if goes_on else starting_model(recipe.model)
    engine = parallelize(
        model,
        plan,
        optimizer=recipe.optimizer.torch_class(),
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
    job = TrainState(recipe, run, store, engine, TrafficRecorder(engine), LossSpikeGuard(recipe.run), console)
    last, job.warnings = load_newest(
        engine, run.checkpoints, lambda found: check_checkpoint(found, recipe, store)
    )
    if last is not None:
        _restore_progress(job, last)
    elif run.metrics.exists():
        job.warnings.append("there is no checkpoint yet: the run begins anew")
    return job


def _restore_progress(job: TrainState, saved: Checkpoint) -> None:
    """The job is where it was when this, which the engine has loaded, was saved."""
    job.step, job.tokens = saved.step, int(saved.facts["tokens"])
    job.skipped, job.bad_steps_in_a_row = int(saved.facts["skipped"]), 0
    job.spikes.load(saved.facts)


def _rollback(job: TrainState, path: Path) -> None:
    """To a checkpoint from before a spike, which from now on knows what is skipped."""
    saved = open_together(path, job.engine.world)
    with saved.reader() as reader:
        job.engine.load_from(reader)
    _restore_progress(job, saved)
    job.warnings = [job.spikes.skip(job.step)]
    Saver(job.run.checkpoints, job.engine.world).save(job.step, job.engine.state_shards(), _facts(job))
    if job.console is not None:
        checkpoint.remove_after(job.run.checkpoints, job.step)


def _batches(job: TrainState, stream: TokenStream, steps: range, workers: int) -> Iterator[dict[str, Tensor]]:
    """This rank's share of the batch of each of `steps`."""
    batches: Iterator[dict[str, Tensor]] = iter(
        loader(
            stream,
            sequence=job.recipe.data.sequence,
            global_batch=job.recipe.run.batch,
            data_rank=job.engine.data_rank,
            data_ranks=job.engine.data_ranks,
            seed=job.recipe.run.seed,
            order=job.recipe.data.order,
            first_step=steps.start,
            last_step=steps.stop,
            workers=workers,
            pin_memory=job.engine.device.type == "cuda",
        )
    )
    return batches


def _evaluate(job: TrainState, watch: HealthMonitor) -> float:
    """Mean loss per target, over the same validation batches each time."""
    batches = _batches(job, job.store.validation, range(job.recipe.run.evaluate_batches), workers=0)
    results = []
    for number, batch in enumerate(batches):
        watch.begins("evaluation", job.step, slow=number == 0)
        results.append(job.engine.evaluate(batch))
    return sum(result.loss_sum for result in results) / sum(result.num_tokens for result in results)


def _facts(job: TrainState) -> dict[str, object]:
    """What a checkpoint says of itself."""
    return {
        "tokens": job.tokens,
        "skipped": job.skipped,
        "spikes": job.spikes.facts(),
        "seed": job.recipe.run.seed,
        "plan": str(job.engine.plan),
        "loss_scale": job.engine.loss_scale,
        **run_facts(job.recipe, job.store),
        "versions": {module.__name__: str(module.__version__) for module in (plait, torch, transformers)},
    }


def _show_start(job: TrainState, peak_flops: float) -> None:
    memory = largest_memory(job.recipe, job.engine)
    if job.console is not None:
        job.console.print(start_table(job.recipe, job.engine, peak_flops, memory))
        if job.step:
            nothing = "" if job.step < job.recipe.run.steps else ": nothing is left to do, but for run.steps"
            job.console.print(f"resumed after step {job.step}{nothing}", highlight=False)


def _diverged(job: TrainState, lr: float) -> RunError:
    saved = checkpoint.steps(job.run.checkpoints)
    go_on = f"; the last checkpoint is {saved[-1]}" if saved else ""
    scale = job.engine.loss_scale
    at_scale = "" if scale is None else f" and a loss scale of {scale:g}"
    try_too = "" if scale is None else ", precision=bf16"
    return RunError(
        f"the gradient was not finite in {job.bad_steps_in_a_row} steps in a row",
        given=f"up to step {job.step}, with a learning rate of {lr:.2e}{at_scale}",
        expected="finite gradients; a step without them changes no weight",
        hint=f"a smaller optimizer.lr or clip_norm{try_too}{go_on}",
    )
