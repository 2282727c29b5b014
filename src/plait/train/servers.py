"""A run with parameter servers: metrics of worker 0, which runs the trainer, and the work of the others.

[Note: worker 0]
Worker 0 logs, evaluates, saves and ends the job: when it leaves, after the last step or a signal, the others
end too. So only it handles signals, and a run that stops has the same steps as one that goes on. The job ends
with an error if it dies. Other workers may die, or be started again: see `server/clocks.py`.
"""

from pathlib import Path
from typing import Any

from plait.checkpoint import open_checkpoint, step_of
from plait.comm import World
from plait.engine.engine import Engine
from plait.server.worker import JobIsOver
from plait.train.config import Recipe
from plait.train.optimizer import lr_lambda
from plait.train.prepare import ResolvedRun

RESUMED = "plait: resumed"  # key of the job's store: the checkpoint that worker 0 has loaded


def continue_first_island(engine: Engine, world: World) -> None:
    """Under local steps, begin with the optimizer states of the first island, if this worker is one of those
    with which a run was resumed. One that joins later begins without."""
    path = world.store.get(RESUMED)
    every = engine.plan.local_steps
    if path is None or not every or engine.num_steps // every != (step_of(Path(path)) or 0) // every:
        return
    with open_checkpoint(Path(path)).reader() as reader:
        engine.load_from(reader, options=False)  # the recipe's


def run_worker(recipe: Recipe, world: World) -> None:
    """Serve, or compute a worker's share of every step until worker 0 ends the job."""
    run = ResolvedRun.open(recipe, world.size)
    try:
        engine = run.build_engine(world)
    except SystemExit:  # it was a server
        return
    factor_of, steps = lr_lambda(recipe.schedule, recipe.run.steps), recipe.run.steps
    continue_first_island(engine, world)
    base_lrs = [group["lr"] for group in engine.optimizer.param_groups]
    share = (engine.data_rank, engine.data_ranks)
    try:
        while (first := engine.num_steps) < steps:
            for number, batch in enumerate(run.train_batches(range(first, steps), *share), first):
                for group, base_lr in zip(engine.optimizer.param_groups, base_lrs, strict=True):
                    group["lr"] = base_lr * factor_of(number)
                engine.step(batch)
                if engine.num_steps != number + 1:  # its push came too late: go on at the present clock
                    break
    except JobIsOver:
        return


class ServerMetrics:
    """Turns the servers' counts so far into values of an interval of steps.

    pushes_per_s       pushes that became part of an update, of all workers
    dropped_pushes     those that came too late, under `backup`
    waited_s           worker 0's time of waiting for other workers
    moved_bytes        sent and received over connections, by rank; what is in shared memory is not sent
    staleness          updates by the number of updates between the read and the push that they are of
    worker_clocks      (time, worker, clock) of the steps that workers have ended
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.server_counts()

    def since_last(self) -> dict[str, Any]:
        """The values since the last call."""
        before, counts = self._before, self._engine.server_counts()
        self._before = counts
        seconds = counts["seconds"] - before["seconds"]
        pairs = zip(counts["moved_bytes"], before["moved_bytes"], strict=True)
        return {
            "pushes_per_s": (counts["taken"] - before["taken"]) / max(seconds, 1e-9),
            "dropped_pushes": counts["dropped"] - before["dropped"],
            "waited_s": counts["waited_s"] - before["waited_s"],
            "moved_bytes": [_difference(now, then) for now, then in pairs],
            "staleness": _difference(counts["staleness"], before["staleness"]),
            "worker_clocks": counts["ends"],
        }


def _difference(now: list[int], before: list[int]) -> list[int]:
    return [max(new - old, 0) for new, old in zip(now, before, strict=True)]  # a replica counts from zero
