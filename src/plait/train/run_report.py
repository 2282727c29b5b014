"""Tables printed before and after training, and plots of losses and of workers' clocks."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from plait.comm import all_gather
from plait.data.sampler import BatchSizes
from plait.engine.engine import Engine
from plait.plan import MemoryUse, used_categories
from plait.tables import counted, facts_table, table
from plait.train.config import Recipe
from plait.train.metrics import ThinnedRecords, read_metrics
from plait.train.peak_flops import PeakFlops


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


def start_table(
    recipe: Recipe,
    engine: Engine,
    sizes: BatchSizes,
    peak_flops: PeakFlops,
    memory: tuple[int, MemoryUse],
    skipped: str,
) -> Table:
    """Return a table of model, plan, batch, device and estimated memory. `memory`: from `largest_memory`;
    `skipped`: what was left out of the data."""
    rank, predicted = memory
    run, sequence, plan = recipe.run, recipe.data.sequence, engine.plan
    ramp = recipe.batch_ramp
    at_most = "at most " if recipe.data.samples == "documents" else ""
    samples = f"{'documents' if at_most else 'sequences'} of {at_most}{sequence}"
    growth = f", growing from {ramp.start} over {ramp.tokens:,} tokens" if ramp else ""
    facts = {
        "model": f"{type(engine.model).__name__}, {engine.num_parameters:,} parameters",
        "plan": f"{plan} on {counted(plan.num_ranks, 'rank')} ({engine.device.type})",
        "probe": "" if engine.probed is None else str(engine.probed),
        "step": f"{run.batch} {samples} = {run.batch * sequence:,} tokens{growth}",
        "steps": f"{run.steps:,}: {at_most}{sizes.span(run.steps)[0] * sequence:,} tokens",
        "left out of the data": skipped,
        "peak": str(peak_flops),
        "memory per rank" if engine.plan.pp == 1 else f"memory, at most (rank {rank})": str(predicted),
    }
    if plan.num_servers:
        facts["memory of worker 0"] = facts.pop("memory per rank")
    return facts_table("run", (fact for fact in facts.items() if fact[1]))


def memory_table(predicted: MemoryUse, measured: MemoryUse, ranks: str = "per rank") -> Table:
    """Return predicted and measured bytes by category. Offloaded bytes are below the total."""
    on_device, elsewhere = used_categories(predicted, measured)
    rows = (
        (name, *(use.text_of(name) for use in (predicted, measured)))
        for name in (*on_device, "total", *elsewhere)
    )
    return table(f"memory {ranks}", ("", "predicted", "measured"), rows)


def draw_losses(metrics: Path, picture: Path) -> None:
    """Plot training and validation loss over steps, from metrics.jsonl."""
    from matplotlib.figure import Figure

    curves = {key: ThinnedRecords((key,)) for key in ("loss", "validation_loss")}
    for record in read_metrics(metrics):
        for key, curve in curves.items():
            if record.get(key) is not None:
                curve.add(record)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for (key, curve), style, label in zip(
        curves.items(), ("-", "o-"), ("training", "validation"), strict=True
    ):
        if points := [(record["step"], record[key]) for record in curve]:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)


def draw_clocks(metrics: Path, picture: Path) -> None:
    """Draw every worker's clock over time, from metrics.jsonl. Workers that wait for others have the same
    clock, and one that is gone has none."""
    from matplotlib.figure import Figure

    ends = [end for record in read_metrics(metrics) for end in record.get("worker_clocks", ())]
    start = min((time for time, *_ in ends), default=0.0)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for worker in sorted({worker for _, worker, _ in ends}):
        own = [(time - start, clock) for time, other, clock in ends if other == worker]
        axes.step(*zip(*own, strict=True), where="post", label=f"worker {worker}", linewidth=1)
    axes.set_xlabel("time, s")
    axes.set_ylabel("clock: steps that the worker has ended")
    axes.grid(alpha=0.3)
    if ends:
        axes.legend()
    figure.savefig(picture, dpi=120)
