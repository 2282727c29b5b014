"""The end of a run, on its first rank: picture, export, a sample of text, and where everything is."""

import shutil

from rich.console import Console

from plait import checkpoint
from plait.engine import Engine
from plait.train.config import Recipe
from plait.train.export import export, generate
from plait.train.report import draw_losses, memory_table, predicted_memory
from plait.train.run import RunDir


def finish(recipe: Recipe, run: RunDir, engine: Engine, console: Console) -> None:
    """Writes loss.png and the export, shows memory, sample and paths. Raises a PlaitError."""
    console.print(memory_table(predicted_memory(recipe, engine), engine.memory()))
    draw_losses(run.metrics, run.picture)
    shutil.rmtree(run.export, ignore_errors=True)  # of this run before it was resumed
    export(run, run.export)
    if recipe.sample.tokens:
        how = recipe.sample.model_dump()
        console.print("a sample of what it writes:", style="bold")
        console.print(generate(run, **how, seed=recipe.run.seed), markup=False, highlight=False)
    places = {
        "checkpoint": checkpoint.steps(run.checkpoints)[-1],
        "Hugging Face export": run.export,
        "TensorBoard": run.tensorboard,
        "metrics": run.metrics,
        "loss": run.picture,
    }
    for name, path in places.items():
        console.print(f"{name:<19} : {path}", highlight=False, soft_wrap=True, markup=False)
