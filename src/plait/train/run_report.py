"""Reports of a run: tables before and after training, pictures of its curves, and the values of its page."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from operator import itemgetter
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from plait.comm import all_gather
from plait.data.sampler import BatchSizes
from plait.engine.engine import Engine
from plait.errors import PlaitError
from plait.fileio import read_regular
from plait.pages.figures import Axis, Curve, Figure, Point, draw_figures
from plait.pages.timeline import timeline_values
from plait.plan import MemoryUse, used_categories
from plait.plan.schedule import simulate
from plait.plan.schedule.trace import durations_of, read_trace
from plait.tables import counted, facts_table, table
from plait.train.config import Recipe, micro_batch_shape
from plait.train.measurements import Measurements
from plait.train.metrics import PeakFlops, ThinnedRecords, read_metrics
from plait.train.run_dir import RunDir

if TYPE_CHECKING:
    from plait.estimate.explain import Explanation

_CURVES = (
    "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "loss_scale", "aux_loss", "router_z_loss",
    "expert_imbalance", "dropped_choices", "tokens", "seconds",
)  # fmt: skip
_MOST_EVENTS = 1000  # the last ones
_MOST_LAYERS, _MOST_EXPERTS = 8, 16  # in a picture


def estimated_memory(recipe: Recipe, engine: Engine) -> MemoryUse:
    """Return the estimated memory of this rank."""
    return engine.estimated_memory(micro_batch_shape(recipe, engine.plan))


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
    data_facts: Mapping[str, str],
) -> Table:
    """Return a table of model, plan, batch, device and estimated memory. `memory`: from `largest_memory`."""
    rank, predicted = memory
    run, plan, budget = recipe.run, engine.plan, recipe.data.tokens_per_micro_batch
    sequence, ramp = budget or recipe.data.sequence, recipe.batch_ramp
    at_most = "at most " if recipe.data.samples == "documents" else ""
    samples = "documents" if at_most else "sequences"
    if recipe.preference is not None:
        rows = recipe.preference.options().trained_rows
        samples, sequence = ("pairs", "answers")[rows == 1], rows * sequence
    samples = f"{'micro-batches' if budget else samples} of {at_most}{sequence}"
    growth = f", growing from {ramp.start} over {ramp.tokens:,} tokens" if ramp else ""
    facts = {
        "model": f"{type(engine.model).__name__}, {engine.num_parameters:,} trainable parameters",
        "plan": f"{plan} on {counted(plan.num_ranks, 'rank')} ({engine.device.type})",
        "compile": str(engine.compile_choice or ""),
        "probe": "" if engine.probed is None else str(engine.probed),
        "step": f"{run.batch} {samples} = {run.batch * sequence:,} tokens{growth}",
        "steps": f"{run.steps:,}: {at_most}{sizes.span(run.steps)[0] * sequence:,} tokens",
        **data_facts,
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
    """Draw training and validation loss over steps, from metrics.jsonl."""
    records = _Records(metrics)
    losses = Axis("step"), Axis("loss, nats per token")
    curves = (
        Curve("training", _points(records.steps, "loss")),
        Curve("validation", _points(records.validation, "validation_loss"), "dashed"),
    )
    drawn = tuple(curve for curve in curves if curve.points)
    draw_figures([Figure("training", *losses, drawn)], "", picture)


def draw_experts(metrics: Path, picture: Path) -> bool:
    """Draw the loads of experts over steps, from metrics.jsonl, for at most `_MOST_LAYERS` layers: of each
    expert; of many ones the least, median and largest. Return False, and draw nothing, without experts."""
    records = ThinnedRecords(())
    for record in read_metrics(metrics):
        if record.get("expert_loads"):
            records.add(record)
    layers = records.last.get("expert_loads", {})
    figures = []
    for layer in [*layers][:: -(-len(layers) // _MOST_LAYERS) or 1]:
        loads = [(record["step"], record["expert_loads"].get(layer, ())) for record in records]
        names = [f"expert {number}" for number in range(len(layers[layer]))]
        shares = [
            (at, [n * len(of) / sum(of) for n in of]) for at, of in loads if len(of) == len(names) and any(of)
        ]
        if len(names) > _MOST_EXPERTS:
            names = ["least", "median", "largest"]
            shares = [(at, [min(of), median(of), max(of)]) for at, of in shares]
        curves = (Curve(name, tuple((at, of[n]) for at, of in shares)) for n, name in enumerate(names))
        axes = Axis("step"), Axis("load, of the mean")
        figures.append(Figure(layer, *axes, tuple(curve for curve in curves if curve.points)))
    if figures:
        draw_figures(figures, "", picture)
    return bool(figures)


def draw_clocks(metrics: Path, picture: Path) -> None:
    """Draw every worker's clock over time, from metrics.jsonl. Workers that wait for others have the same
    clock, and one that is gone has none."""
    ends = [end for record in read_metrics(metrics) for end in record.get("worker_clocks", ())]
    start = min((time for time, *_ in ends), default=0.0)
    clocks: dict[int, list[tuple[float, float]]] = {}
    for time, worker, clock in sorted(ends, key=itemgetter(1)):
        clocks.setdefault(worker, []).append((time - start, clock))
    curves = tuple(Curve(f"worker {worker}", tuple(own), "steps") for worker, own in clocks.items())
    axes = Axis("time, s"), Axis("clock: steps that the worker has ended")
    draw_figures([Figure("workers", *axes, curves)], "", picture)


def _points(records: Iterable[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    return tuple((record["step"], record[name]) for record in records if record.get(name) is not None)


class _Records:
    """The shown part of the records of a metrics.jsonl, in bounded memory."""

    def __init__(self, metrics: Path) -> None:
        self.steps = ThinnedRecords(("loss", "grad_norm"))
        self.validation = ThinnedRecords(("validation_loss",))
        self.saves = ThinnedRecords(("save_pause_s",))
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.counts = Counter[str]()
        self.best_validation_loss: float | None = None
        for record in read_metrics(metrics) if metrics.exists() else ():
            self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        for name, kept in (
            ("loss", self.steps),
            ("validation_loss", self.validation),
            ("save_pause_s", self.saves),
        ):
            if name in record:
                kept.add(record)
        losses = [self.best_validation_loss, record.get("validation_loss")]
        self.best_validation_loss = min((loss for loss in losses if loss is not None), default=None)
        texts = {"resumed": "from a checkpoint", "skipped": "the gradient was not finite"}
        for kind in ("warning", *texts):
            if record.get(kind):
                self.counts[kind] += 1
                text = texts.get(kind, record[kind])
                self.events.append({"step": record["step"], "kind": kind, "text": text})


def run_values(run: RunDir, explained: "tuple[Explanation, Measurements] | None" = None) -> dict[str, Any]:
    """Return the values of a run. `explained`: its plan, as `plait explain --run` reads it. Raises RunError,
    ConfigError for a directory that is not a run, OSError for files that cannot be read."""
    recipe = run.read_recipe()
    records = _Records(run.metrics)
    curves = {name: [record.get(name) for record in records.steps] for name in ("step", *_CURVES)}
    return {
        "name": run.path.name,
        "plan": recipe.plan,
        "facts": _facts(recipe.run.steps, records),
        "curves": {name: values for name, values in curves.items() if any(v is not None for v in values)},
        "validation": [[r["step"], r["validation_loss"]] for r in records.validation],
        "saves": [[r["step"], r["save_pause_s"]] for r in records.saves],
        "events": list(records.events),
        "memory": _memory(*explained) if explained else None,
        "timelines": _timelines(recipe.run.trace),
        "sample": read_regular(run.sample).decode("utf-8", "replace") if run.sample.exists() else None,
        "recipe": recipe.model_dump(mode="json"),
    }


def _facts(planned: int, records: _Records) -> dict[str, Any]:
    """Return the figures of the summary; None where the run has none yet. Medians: of the curves' points."""
    last = records.steps.last

    def middle(name: str) -> float | None:
        known = [step[name] for step in records.steps if step.get(name) is not None]
        return median(known) if known else None

    return {
        "steps": last.get("step", 0),
        "planned_steps": planned,
        "loss": last.get("loss"),
        "validation_loss": records.validation.last.get("validation_loss"),
        "best_validation_loss": records.best_validation_loss,
        "tokens": last.get("tokens"),
        "tokens_per_s": middle("tokens_per_s"),
        "mfu": middle("mfu"),
        "skipped_steps": last.get("skipped_steps"),
        "resumed": records.counts["resumed"],
        "warnings": records.counts["warning"],
    }


def _memory(explanation: "Explanation", measured: Measurements) -> list[dict[str, Any]]:
    """Return estimated and measured bytes by category, of each class of ranks."""
    return [
        {
            "ranks": list(group.ranks),
            "estimated": asdict(explanation.of_rank(group.ranks[0]).memory),
            "measured": asdict(group.memory),
        }
        for group in measured.rank_classes
    ]


def _timelines(trace: Path | None) -> list[dict[str, Any]]:
    """Return the simulated and the measured timeline of a step; nothing without a complete trace."""
    try:
        steps = read_trace(trace) if trace is not None else {}
    except PlaitError:  # the run may still be writing it, or it is gone
        steps = {}
    if not steps:
        return []
    middle = median_low((timeline.total, step) for step, timeline in steps.items())[1]
    predicted = simulate(steps[middle].schedule, durations_of(steps.values()))
    shown = {"predicted from the actions' durations": predicted, f"measured, step {middle}": steps[middle]}
    return [timeline_values(timeline, title, "s") for title, timeline in shown.items()]
