"""What a run shows before it starts and after it ends: tables, and the picture of its loss."""

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
    """Bytes that this rank will hold."""
    shares = engine.data_ranks * engine.plan.micro
    return engine.estimated_memory((recipe.run.batch // shares, recipe.data.sequence))


def largest_memory(recipe: Recipe, engine: Engine) -> tuple[int, MemoryUse]:
    """The rank that will hold most, and its bytes. Every rank calls it; ranks of a pipeline differ."""
    names, predicted = [field.name for field in fields(MemoryUse)], estimated_memory(recipe, engine)
    mine = [getattr(predicted, name) for name in names]
    row = torch.tensor([-1 if n is None else n for n in mine], device=engine.device)  # -1: nobody can say
    rows = row.new_empty(engine.world.size * len(row))
    all_gather(rows, row, engine.world.group)
    found = []
    for values in rows.view(-1, len(row)).tolist():
        of_rank: dict[str, Any] = {name: None if n < 0 else n for name, n in zip(names, values, strict=True)}
        found.append(MemoryUse(**of_rank))
    rank = max(range(len(found)), key=lambda rank: found[rank].total)
    return rank, found[rank]


def start_table(recipe: Recipe, engine: Engine, peak_flops: float, memory: tuple[int, MemoryUse]) -> Table:
    """Model, plan, batch, device, and the memory that each rank will use: `largest_memory`."""
    rank, predicted = memory
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
        for names in used_categories(predicted)
    )
    words = "; ".join([", ".join(on_device), f"in all {_size(predicted.total)}", *elsewhere])
    table.add_row("memory per rank" if engine.plan.pp == 1 else f"memory, at most (rank {rank})", words)
    return table


def _ranks(engine: Engine) -> str:
    return "1 rank" if engine.world.size == 1 else f"{engine.world.size} ranks"


def memory_table(predicted: MemoryUse, measured: MemoryUse, of: str = "per rank") -> Table:
    """Bytes by category: what was predicted, what was measured. Below the sum, what is offloaded."""
    table = Table(title=f"memory {of}", title_justify="left")
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="right" if heading else "left")
    on_device, elsewhere = used_categories(predicted, measured)
    for name in on_device:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    table.add_row("in all", _size(predicted.total), _size(measured.total))
    for name in elsewhere:
        table.add_row(name, _size(getattr(predicted, name)), _size(getattr(measured, name)))
    return table


def used_categories(*uses: MemoryUse) -> tuple[list[str], list[str]]:
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
