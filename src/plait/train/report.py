"""Tables printed before and after training, and the loss plot."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from plait.comm import all_gather
from plait.engine.engine import Engine
from plait.plan import MemoryUse
from plait.train.config import Recipe
from plait.train.metrics import read_metrics


def estimated_memory(recipe: Recipe, engine: Engine) -> MemoryUse:
    """Return the estimated memory of this rank."""
    num_microbatches = engine.data_ranks * engine.plan.micro
    return engine.estimated_memory((recipe.run.batch // num_microbatches, recipe.data.sequence))


def largest_memory(recipe: Recipe, engine: Engine) -> tuple[int, MemoryUse]:
    """Return the rank with the largest estimate, and that estimate. Collective; pipeline stages differ."""
    names, predicted = [field.name for field in fields(MemoryUse)], estimated_memory(recipe, engine)
    own = [getattr(predicted, name) for name in names]
    row = torch.tensor([-1 if n is None else n for n in own], device=engine.device)  # -1: unknown
    rows = row.new_empty(engine.world.size * len(row))
    all_gather(rows, row, engine.world.group)
    by_rank = []
    for values in rows.view(-1, len(row)).tolist():
        of_rank: dict[str, Any] = {name: None if n < 0 else n for name, n in zip(names, values, strict=True)}
        by_rank.append(MemoryUse(**of_rank))
    rank = max(range(len(by_rank)), key=lambda rank: by_rank[rank].total)
    return rank, by_rank[rank]


def start_table(recipe: Recipe, engine: Engine, peak_flops: float, memory: tuple[int, MemoryUse]) -> Table:
    """Return a table of model, plan, batch, device and estimated memory. `memory`: from `largest_memory`."""
    rank, predicted = memory
    table = Table(title="run", show_header=False, title_justify="left")
    table.add_column()
    table.add_column()
    run, sequence = recipe.run, recipe.data.sequence
    table.add_row("model", f"{type(engine.model).__name__}, {engine.num_parameters:,} parameters")
    table.add_row("plan", f"{engine.plan} on {_ranks(engine)} ({engine.device.type})")
    if engine.probed is not None:
        table.add_row("probe", str(engine.probed))
    table.add_row("step", f"{run.batch} sequences of {sequence} = {run.batch * sequence:,} tokens")
    table.add_row("steps", f"{run.steps:,}: {run.steps * run.batch * sequence:,} tokens")
    table.add_row("peak", f"{peak_flops / 1e9:,.1f} GFLOP/s per rank (measured matrix product)")
    on_device, elsewhere = (
        [f"{name} {_size(getattr(predicted, name))}" for name in names]
        for names in used_categories(predicted)
    )
    text = "; ".join([", ".join(on_device), f"total {_size(predicted.total)}", *elsewhere])
    table.add_row("memory per rank" if engine.plan.pp == 1 else f"memory, at most (rank {rank})", text)
    return table


def _ranks(engine: Engine) -> str:
    return "1 rank" if engine.world.size == 1 else f"{engine.world.size} ranks"


def memory_table(predicted: MemoryUse, measured: MemoryUse, ranks: str = "per rank") -> Table:
    """Return predicted and measured bytes by category. Offloaded bytes are below the total."""
    table = Table(title=f"memory {ranks}", title_justify="left")
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="right" if heading else "left")
    on_device, elsewhere = used_categories(predicted, measured)
    for name in on_device:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    table.add_row("total", _size(predicted.total), _size(measured.total))
    for name in elsewhere:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    return table


def used_categories(*uses: MemoryUse) -> tuple[list[str], list[str]]:
    """Return the categories with bytes, or unknown ones, in any of `uses`: on the device, and offloaded."""
    used = [field.name for field in fields(MemoryUse) if any(getattr(use, field.name) != 0 for use in uses)]
    offloaded = ("host", "disk")
    return [name for name in used if name not in offloaded], [name for name in used if name in offloaded]


def draw_losses(metrics: Path, picture: Path) -> None:
    """Plot training and validation loss over steps, from metrics.jsonl."""
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
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"
