"""What a run shows before it starts and after it ends: tables, and the picture of its loss."""

from dataclasses import fields
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from plait.engine import Engine
from plait.plan import MemoryUse
from plait.train.config import Recipe
from plait.train.metrics import read_metrics


def predicted_memory(recipe: Recipe, engine: Engine) -> MemoryUse:
    """Bytes that this rank will hold."""
    shares = engine.data_ranks * engine.plan.micro
    return engine.predicted_memory((recipe.run.batch // shares, recipe.data.sequence))


def start_table(recipe: Recipe, engine: Engine, peak_flops: float) -> Table:
    """Model, plan, batch, device, and the memory that each rank will use."""
    predicted = predicted_memory(recipe, engine)
    table = Table(title="this run", show_header=False, title_justify="left")
    table.add_column()
    table.add_column()
    run, sequence = recipe.run, recipe.data.sequence
    table.add_row("model", f"{type(engine.model).__name__}, {engine.num_parameters:,} parameters")
    table.add_row("plan", f"{engine.plan} on {_ranks(engine)} ({engine.device.type})")
    if engine.probed is not None:
        table.add_row("probe", str(engine.probed))
    table.add_row("step", f"{run.batch} sequences of {sequence} = {run.batch * sequence:,} tokens")
    table.add_row("steps", f"{run.steps:,}: {run.steps * run.batch * sequence:,} tokens")
    table.add_row("peak", f"{peak_flops / 1e9:,.1f} GFLOP/s per rank, a matrix product measured now")
    on_device, elsewhere = (
        [f"{name} {_size(getattr(predicted, name))}" for name in names]
        for names in _used_categories(predicted)
    )
    memory = "; ".join([", ".join(on_device), f"in all {_size(predicted.total)}", *elsewhere])
    table.add_row("memory per rank", memory)
    return table


def _ranks(engine: Engine) -> str:
    return "1 rank" if engine.world.size == 1 else f"{engine.world.size} ranks"


def memory_table(predicted: MemoryUse, measured: MemoryUse) -> Table:
    """Bytes per rank by category: what was predicted, what was measured. Below the sum, what is offloaded."""
    table = Table(title="memory per rank", title_justify="left")
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="right" if heading else "left")
    on_device, elsewhere = _used_categories(predicted, measured)
    for name in on_device:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    table.add_row("in all", _size(predicted.total), _size(measured.total))
    for name in elsewhere:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    return table


def _used_categories(*uses: MemoryUse) -> tuple[list[str], list[str]]:
    """Those in which any of `uses` has bytes or cannot say: of the device, and of what is offloaded."""
    used = [field.name for field in fields(MemoryUse) if any(getattr(use, field.name) != 0 for use in uses)]
    offloaded = ("host", "disk")
    return [name for name in used if name not in offloaded], [name for name in used if name in offloaded]


def draw_losses(metrics: Path, picture: Path) -> None:
    """Training and validation loss over steps, from metrics.jsonl."""
    records = read_metrics(metrics)
    train = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    validation = [
        (record["step"], record["validation_loss"])
        for record in records
        if record.get("validation_loss") is not None
    ]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for points, style, label in ((train, "-", "training"), (validation, "o-", "validation")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if train or validation:
        axes.legend()
    figure.savefig(picture, dpi=120)


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"
