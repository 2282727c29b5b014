"""Verify every causal language model of transformers that builds small, and write docs/architectures.md.

    python tools/verify_architectures.py docs/architectures.md [kind ...]

Needs the machine for half an hour or more. The results are kept as JSON under build/, and a second call
continues from them: model types in that file are not run again.
"""

import datetime
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.bench.report import machine
from plait.errors import ModelError
from plait.fileio import write_json
from plait.plan import Plan
from plait.verify import Case, ModelSource, Outcome, Verdict, WorkerOptions, parse_source, verify

PLANS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2", "pp=2 dp=2 tp=2 zero=1")
KEPT = Path("build/architectures.json")
AT_ONCE = 20  # model types per start of the ranks
LAYERS, SAMPLES, STEPS, LENGTH = 4, 8, 3, 16
ROUGH = 1e-6  # for families whose own kernels compute in float32
# Verdicts by model type, in the order of PLANS; empty for one that cannot be built.
Found = dict[str, list[dict[str, object]]]


_INTRODUCTION = f"""\
Results of `plait verify` on {{date}} for the causal language models of transformers {{transformers}}
(torch {{torch}}, {{cpu}}). Each model is made small ({LAYERS} layers) and trained for {STEPS} steps
in float64 under each plan and in one process. A cell is the largest relative difference of any
loss, norm, gradient or weight. The tolerance is 1e-9, or {ROUGH:.0e} (marked with ~) for families
whose own kernels compute in float32.

{{built}} of {{asked}} model types build small and run. **{{whole}} are verified under all {len(PLANS)}
plans**; the second table has the errors of the others. This page is written by
`python tools/verify_architectures.py docs/architectures.md`."""


def main() -> None:
    page, kinds = Path(sys.argv[1]), sys.argv[2:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    warnings.simplefilter("ignore")  # raised by the families themselves
    found: Found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    left = [kind for kind in kinds if kind not in found]
    KEPT.parent.mkdir(exist_ok=True)
    for start in range(0, len(left), AT_ONCE):
        found |= _verified(left[start : start + AT_ONCE])
        write_json(KEPT, found)
    page.write_text(_page({kind: [Verdict.from_values(v) for v in found[kind]] for kind in sorted(found)}))


def _verified(kinds: list[str]) -> Found:
    sources: dict[str, ModelSource] = {}
    for kind in kinds:
        try:
            sources[kind] = parse_source(kind, layers=LAYERS)
        except ModelError as error:
            print(error, flush=True)
    jobs = [_job(source, plan, None) for source in sources.values() for plan in PLANS]
    verdicts = _run(jobs)
    again = [n for n, verdict in enumerate(verdicts) if verdict.outcome is Outcome.DIFFERS]
    for number, verdict in zip(again, _run([_rough(jobs[n]) for n in again]), strict=True):
        if verdict.outcome is Outcome.SAME:
            verdicts[number] = verdict
    found: Found = {kind: [] for kind in kinds}
    for number, kind in enumerate(sources):
        mine = verdicts[number * len(PLANS) : (number + 1) * len(PLANS)]
        found[kind] = [verdict.to_values() for verdict in mine]
    return found


def _job(source: ModelSource, plan: str, tolerance: float | None) -> Case:
    words = str(Plan.parse(f"{plan} precision=fp64"))
    return Case(source, words, "float64", STEPS, SAMPLES, LENGTH, 0, tolerance)


def _rough(job: Case) -> Case:
    return _job(job.source, job.plan.replace("precision=fp64", ""), ROUGH)


def _run(jobs: list[Case]) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return verify(jobs, Path(folder), WorkerOptions(find_suspects=False, timeout_s=120.0))


def _page(found: dict[str, list[Verdict]]) -> str:
    built = {kind: verdicts for kind, verdicts in found.items() if verdicts}
    whole = [kind for kind, v in built.items() if all(one.outcome is Outcome.SAME for one in v)]
    lines = [
        "# Architectures",
        "",
        _INTRODUCTION.format(
            date=datetime.date.today(),
            transformers=transformers.__version__,
            torch=torch.__version__,
            cpu=machine()["cpu"],
            built=len(built),
            asked=len(found),
            whole=len(whole),
        ),
        "",
        f"| model type | {' | '.join(f'`{plan}`' for plan in PLANS)} |",
        f"|---|{'---|' * len(PLANS)}",
        *(f"| {kind} | {' | '.join(map(_cell, verdicts))} |" for kind, verdicts in built.items()),
        "",
        "## Errors",
        "",
        "| error | plans | model types |",
        "|---|---|---|",
    ]
    reasons: dict[str, tuple[set[str], set[str]]] = {}
    for kind, verdicts in built.items():
        for plan, verdict in zip(PLANS, verdicts, strict=True):
            if verdict.outcome is not Outcome.SAME:
                plans, kinds = reasons.setdefault(_reason(verdict), (set(), set()))
                plans.add(f"`{plan}`")
                kinds.add(kind)
    for reason, (plans, kinds) in sorted(reasons.items(), key=lambda found: -len(found[1][1])):
        lines.append(f"| {reason} | {', '.join(sorted(plans))} | {', '.join(sorted(kinds))} |")
    lines += ["", f"Not built small: {', '.join(kind for kind in found if kind not in built)}.", ""]
    return "\n".join(lines)


def _cell(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.SAME:
        return f"{'~' if verdict.tolerance > 1e-9 else ''}{verdict.max_error:.0e}"
    return verdict.outcome.value


def _reason(verdict: Verdict) -> str:
    """Return the reason without model-specific details, to group models that share it."""
    if verdict.outcome is Outcome.DIFFERS:
        return f"differs by {verdict.max_error:.0e}; farthest: {verdict.worst_parameters[0].name}"
    return verdict.message.split("\n")[0].replace("|", "/")


if __name__ == "__main__":
    main()
