"""Values of the page of a run, from its files: a finished run, a stopped one, or one that still trains."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_low
from typing import Any

from plait.errors import PlaitError
from plait.estimate.explain import Explanation
from plait.fileio import read_text
from plait.pages.timeline import timeline_values
from plait.plan.schedule import simulate
from plait.plan.schedule.trace import durations_of, read_trace
from plait.train.measurements import Measurements
from plait.train.metrics import read_metrics
from plait.train.run_dir import RunDir

_CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "loss_scale", "tokens", "seconds")
_MOST_POINTS = 2000  # of a curve
_KEPT = ("loss", "grad_norm")  # curves whose least and largest values are kept when others are left out


def run_values(run: RunDir, explained: tuple[Explanation, Measurements] | None = None) -> dict[str, Any]:
    """Return the values of a run. `explained`: its plan, as `plait explain --run` reads it. Raises RunError,
    ConfigError for a directory that is not a run."""
    recipe = run.read_recipe()
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    steps = [record for record in records if "loss" in record]
    shown = _thinned(steps)
    curves = {name: [record.get(name) for record in shown] for name in ("step", *_CURVES)}
    return {
        "name": run.path.name,
        "plan": recipe.plan,
        "facts": _facts(recipe.run.steps, steps, records),
        "curves": {name: values for name, values in curves.items() if any(v is not None for v in values)},
        "validation": [[r["step"], r["validation_loss"]] for r in records if "validation_loss" in r],
        "saves": [[r["step"], r["save_pause_s"]] for r in records if "save_pause_s" in r],
        "events": _events(records),
        "memory": _memory(*explained) if explained else None,
        "timelines": _timelines(recipe.run.trace),
        "sample": read_text(run.sample) if run.sample.is_file() else None,
        "recipe": recipe.model_dump(mode="json"),
    }


def _facts(
    planned: int, steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of the summary; None where the run has none yet."""
    last = steps[-1] if steps else {}
    validation = [r["validation_loss"] for r in records if r.get("validation_loss") is not None]
    return {
        "steps": last.get("step", 0),
        "planned_steps": planned,
        "loss": last.get("loss"),
        "validation_loss": validation[-1] if validation else None,
        "best_validation_loss": min(validation, default=None),
        "tokens": last.get("tokens"),
        "tokens_per_s": median(r["tokens_per_s"] for r in steps) if steps else None,
        "mfu": median(r["mfu"] for r in steps) if steps else None,
        "skipped_steps": last.get("skipped_steps"),
        "resumed": sum("resumed" in r for r in records),
        "warnings": sum("warning" in r for r in records),
    }


def _events(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return warnings, starts from checkpoints and skipped steps, in order."""
    texts = {"resumed": "from a checkpoint", "skipped": "the gradient was not finite"}
    return [
        {"step": record["step"], "kind": kind, "text": texts.get(kind, record[kind])}
        for record in records
        for kind in ("warning", *texts)
        if record.get(kind)
    ]


def _thinned(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most about _MOST_POINTS steps: of each stretch the first one, and those with its extremes."""
    length = -(-len(steps) * (2 * len(_KEPT) + 1) // _MOST_POINTS)
    if length <= 2 * len(_KEPT) + 1:
        return list(steps)
    kept = {len(steps) - 1}
    for start in range(0, len(steps), length):
        kept.add(start)
        for name in _KEPT:
            known = [
                at for at in range(start, min(start + length, len(steps))) if steps[at][name] is not None
            ]
            if known:
                kept |= {of(known, key=lambda at: steps[at][name]) for of in (min, max)}
    return [steps[at] for at in sorted(kept)]


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
