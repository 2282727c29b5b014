"""Values of the page of a run, from its files: a finished run, a stopped one, or one that still trains."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_low
from typing import Any

from plait.errors import PlaitError
from plait.estimate.explain import Explanation
from plait.fileio import read_regular
from plait.pages.timeline import timeline_values
from plait.plan.schedule import simulate
from plait.plan.schedule.trace import durations_of, read_trace
from plait.train.measurements import Measurements
from plait.train.metrics import ThinnedRecords, read_metrics
from plait.train.run_dir import RunDir

_CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "loss_scale", "tokens", "seconds")
_MOST_EVENTS = 1000  # the last ones


class _Records:
    """The shown part of the records of a metrics.jsonl, in bounded memory."""

    def __init__(self, run: RunDir) -> None:
        self.steps = ThinnedRecords(("loss", "grad_norm"))
        self.validation = ThinnedRecords(("validation_loss",))
        self.saves = ThinnedRecords(("save_pause_s",))
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.counts = Counter[str]()
        self.best_validation_loss: float | None = None
        for record in read_metrics(run.metrics) if run.metrics.exists() else ():
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


def run_values(run: RunDir, explained: tuple[Explanation, Measurements] | None = None) -> dict[str, Any]:
    """Return the values of a run. `explained`: its plan, as `plait explain --run` reads it. Raises RunError,
    ConfigError for a directory that is not a run, OSError for files that cannot be read."""
    recipe = run.read_recipe()
    records = _Records(run)
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


def _memory(explanation: Explanation, measured: Measurements) -> list[dict[str, Any]]:
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
