"""Verify every causal language model of transformers that builds small, and models of other kinds, and write
docs/architectures.md.

    python tools/verify_architectures.py docs/architectures.md causal|other [kind ...]

Writes the part of the page with one of the two tables. Needs the machine for half an hour or more (`other`: a
quarter). The results are kept as JSON under build/, and a second call continues from them: kinds in that file
are not run again.
"""

import datetime
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from other_kinds import KINDS as OTHER_KINDS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.bench.report import machine
from plait.errors import ModelError
from plait.fileio import write_json
from plait.plan import Plan
from plait.verify import Case, ModelSource, Outcome, Verdict, WorkerOptions, parse_source, verify

PLANS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2", "pp=2 dp=2 tp=2 zero=1")
TOOLS = Path(__file__).parent
OTHER_HEADING = "## Other kinds"
AT_ONCE = 8  # model types per start of the ranks
LAYERS, SAMPLES, STEPS, LENGTH = 4, 8, 3, 16
ROUGH = 1e-6  # for families whose own kernels compute in float32


@dataclass(frozen=True)
class Found:
    """The verdicts of a model type in the order of PLANS and their date, or why it cannot be built small."""

    date: str
    verdicts: list[Verdict] = field(default_factory=list)
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        return all(verdict.outcome is Outcome.SAME for verdict in self.verdicts)

    def to_values(self) -> dict[str, Any]:
        return {**vars(self), "verdicts": [verdict.to_values() for verdict in self.verdicts]}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Found":
        return cls(**{**values, "verdicts": [Verdict.from_values(v) for v in values["verdicts"]]})


@dataclass(frozen=True)
class Table:
    """A part of the page.

    columns     titles of the first columns, and what they say about a kind
    source      the model of a kind, or ModelError
    options     what plans of a kind need
    """

    name: str
    heading: str
    introduction: str
    kinds: Sequence[str]
    columns: Mapping[str, Callable[[str], str]]
    source: Callable[[str], ModelSource]
    options: Callable[[str], str]

    @property
    def kept(self) -> Path:
        return Path(f"build/architectures-{self.name}.json")


_MADE_SMALL = f"""\
trained for {STEPS} steps in float64 under each plan and in one process. A cell is the largest relative
difference of any loss, norm, gradient or weight. The tolerance is 1e-9, or {ROUGH:.0e} (marked with ~)
for families whose own kernels compute in float32."""

CAUSAL = Table(
    "causal",
    "# Architectures",
    f"""\
Results of `plait verify` on {{date}} for the causal language models of transformers {{transformers}}
(torch {{torch}}, {{cpu}}). Each model is made small ({LAYERS} layers) and
{_MADE_SMALL}

{{built}} of {{asked}} model types build small and run. **{{whole}} are verified under all {len(PLANS)}
plans**; another table has the errors of the others. This page is written by
`python tools/verify_architectures.py docs/architectures.md causal`, and
[the part on other kinds](#other-kinds) with `other`.""",
    sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    {"model type": str},
    lambda kind: parse_source(kind, layers=LAYERS),
    lambda _: "",
)
OTHER = Table(
    "other",
    OTHER_HEADING,
    f"""\
Results on {{date}} for models other than causal language models (transformers {{transformers}}, torch
{{torch}}, {{cpu}}), built as a script would build them, in `tools/other_kinds.py`. Each
has two layers (in each half, tower or stage), and is
{_MADE_SMALL}
The loss is the model's own where it has one. Plans of models with BatchNorm have `sync_batchnorm=true`.

**{{whole}} of {{built}} are verified under all {len(PLANS)} plans.**""",
    list(OTHER_KINDS),
    {"kind": lambda kind: OTHER_KINDS[kind].group, "model": lambda kind: OTHER_KINDS[kind].label},
    lambda kind: ModelSource(build=f"other_kinds:{kind}", folder=str(TOOLS)),
    lambda kind: OTHER_KINDS[kind].options,
)


def main() -> None:
    page, table = Path(sys.argv[1]), {"causal": CAUSAL, "other": OTHER}[sys.argv[2]]
    kinds = sys.argv[3:] or table.kinds
    warnings.simplefilter("ignore")  # raised by the families themselves
    kept = json.loads(table.kept.read_text()) if table.kept.exists() else {}
    found = {kind: Found.from_values(values) for kind, values in kept.items()}
    left = [kind for kind in kinds if kind not in found]
    table.kept.parent.mkdir(exist_ok=True)
    for start in range(0, len(left), AT_ONCE):
        found |= _verified(table, left[start : start + AT_ONCE])
        write_json(table.kept, {kind: of_kind.to_values() for kind, of_kind in found.items()})
    part = _part(table, {kind: found[kind] for kind in table.kinds if kind in found})
    before, _, other = page.read_text().partition(f"\n{OTHER_HEADING}\n")
    parts = [part, f"{OTHER_HEADING}\n{other}"] if table is CAUSAL else [before, part]
    page.write_text("\n".join(parts))


def _verified(table: Table, kinds: Sequence[str]) -> dict[str, Found]:
    today, sources, found = str(datetime.date.today()), {}, {}
    for kind in kinds:
        try:
            sources[kind] = table.source(kind)
        except ModelError as error:
            found[kind] = Found(today, reason=_cause(error).removeprefix(f"{kind}: "))
    jobs = [
        _job(source, f"{plan} {table.options(kind)}", None)
        for kind, source in sources.items()
        for plan in PLANS
    ]
    verdicts = _run(jobs)
    again = [n for n, verdict in enumerate(verdicts) if verdict.outcome is Outcome.DIFFERS]
    for number, verdict in zip(again, _run([_rough(jobs[n]) for n in again]), strict=True):
        if verdict.outcome is Outcome.SAME:
            verdicts[number] = verdict
    for number, kind in enumerate(sources):
        found[kind] = Found(today, verdicts[number * len(PLANS) : (number + 1) * len(PLANS)])
    return found


def _cause(error: ModelError) -> str:
    """The first sentence of what transformers said, if it raised an error."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(error.given if cause is error else cause).split())
    return text.partition(". ")[0]


def _job(source: ModelSource, plan: str, tolerance: float | None) -> Case:
    words = str(Plan.parse(f"{plan} precision=fp64"))
    return Case(source, words, "float64", STEPS, SAMPLES, LENGTH, 0, tolerance)


def _rough(job: Case) -> Case:
    return _job(job.source, job.plan.replace("precision=fp64", ""), ROUGH)


def _run(jobs: list[Case]) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return verify(jobs, Path(folder), WorkerOptions(find_suspects=False, timeout_s=600.0))


def _part(table: Table, found: dict[str, Found]) -> str:
    built = {kind: of_kind for kind, of_kind in found.items() if of_kind.verdicts}
    titles = [*table.columns, *(f"`{plan}`" for plan in PLANS)]
    lines = [
        table.heading,
        "",
        table.introduction.format(
            date=" to ".join(sorted({found.date for found in built.values()})),
            transformers=transformers.__version__,
            torch=torch.__version__,
            cpu=machine()["cpu"],
            built=len(built),
            asked=len(found),
            whole=sum(of_kind.is_whole for of_kind in built.values()),
        ),
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
    ]
    for kind, of_kind in built.items():
        cells = [*(say(kind) for say in table.columns.values()), *map(_cell, of_kind.verdicts)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += _errors(table, built)
    reasons = {kind: of_kind.reason.replace("|", "/") for kind, of_kind in found.items() if kind not in built}
    if reasons:
        lines += ["", "## Not built small", "", "| reason | model types |", "|---|---|"]
    for reason in _by_frequency(reasons.values()):
        lines.append(f"| {reason} | {', '.join(kind for kind in reasons if reasons[kind] == reason)} |")
    return "\n".join([*lines, ""])


def _errors(table: Table, built: dict[str, Found]) -> list[str]:
    name = [*table.columns.values()][-1]
    errors = [
        (_reason(verdict), f"`{plan}`", name(kind))
        for kind, of_kind in built.items()
        for plan, verdict in zip(PLANS, of_kind.verdicts, strict=False)
        if verdict.outcome is not Outcome.SAME
    ]
    if not errors:
        return []
    level = "#" * (table.heading.count("#") + 1)
    title = "Errors" if table is CAUSAL else "Errors of other kinds"
    lines = ["", f"{level} {title}", "", "| error | plans | models |", "|---|---|---|"]
    for reason in _by_frequency(reason for reason, _, _ in errors):
        plans = sorted({plan for other, plan, _ in errors if other == reason})
        kinds = sorted({kind for other, _, kind in errors if other == reason})
        lines.append(f"| {reason} | {', '.join(plans)} | {', '.join(kinds)} |")
    return lines


def _by_frequency(values: Iterable[str]) -> list[str]:
    return [value for value, _ in Counter(values).most_common()]


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
