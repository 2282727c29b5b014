"""The end of a run, on its first rank: picture, export, where everything is, a sample of text."""

import shutil

from rich.console import Console

from plait import checkpoint
from plait.engine import Engine
from plait.errors import RunError
from plait.train.config import Recipe
from plait.train.export import export, generate
from plait.train.report import draw_losses, memory_table, predicted_memory
from plait.train.run import RunDir


def finish(recipe: Recipe, run: RunDir, engine: Engine, console: Console) -> None:
    """Writes loss.png and the export, shows memory, paths and a sample. Raises a PlaitError."""
    of = "per rank" if engine.plan.pp == 1 else f"of rank {engine.world.rank}"
    console.print(memory_table(predicted_memory(recipe, engine), engine.memory(), of))
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
