"""Verify every causal language model of transformers that builds small, and models of other kinds, and write
docs/architectures.md.

    python tools/verify_architectures.py docs/architectures.md causal|other [kind ...]

Writes the part of the page with one of the two tables. Needs the machine for half an hour or more (`other`: a
quarter). The results are kept as JSON under build/, and a second call continues from them: kinds in that file
are not run again, unless they are named. If there is no such file and kinds are named, the results of the
others are read from the page, as far as their plans are verified, or refused for a reason in FACTS.
"""

import datetime
import json
import re
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from causal_kinds import KINDS as CAUSAL_KINDS
from other_kinds import KINDS as OTHER_KINDS
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


# What is true of the models of which plans are refused, or that are not built, instead of the error.
FACTS = {
    "hrm_text": "it calls each block several times in a forward, so its blocks have no order of stages",
    "reformer": "it is reversible: one autograd function runs all blocks, and computes their activations "
    "again from the output of the last one, so it cannot be divided into stages",
    "gemma3n": "its image encoder is built by the package timm, which is not installed; its language model, "
    "gemma3n_text, is in the table",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "transformers {transformers} builds none: an assistant computes no keys and values, but reads those "
        "of the model that it assists; its layers' configuration raises an error if none computes them",
    ),
    "albert": "its layers are one block, called several times, which cannot be divided into stages",
    **dict.fromkeys(("resnet", "plain_resnet", "unet"), "tp shards linear layers, and its blocks have none"),
    "lstm": "nn.LSTM is one module that runs all layers: it has no blocks, nor linear layers in them",
}

NOTES = {
    "git": "with an image in each sample: its own loss leaves out an image's positions",
    "mllama": "with the vision model's output: without it, cross-attention blocks are not called",
    "musicgen, musicgen_melody": "built from the configuration of their decoder, with the cross entropy of "
    "all codebooks, in `tools/causal_kinds.py`: AutoModelForCausalLM does not build them",
    "rwkv": "with `rescale_every = 0`: else it changes its weights in eval mode, an error under every plan",
}


@dataclass(frozen=True)
class Found:
    """The results of a model type in the order of PLANS and their date, or why it cannot be built small.

    cells       the largest differences, or outcomes
    errors      of plans that are not verified: the outcome's reason, by plan
    """

    date: str
    cells: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.errors

    @classmethod
    def of(cls, date: str, kind: str, verdicts: Sequence[Verdict]) -> "Found":
        pairs = zip(PLANS, verdicts, strict=True)
        errors = {plan: _reason(kind, v) for plan, v in pairs if v.outcome is not Outcome.SAME}
        return cls(date, [_cell(verdict) for verdict in verdicts], errors)


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
plans**; [another table](#refused-plans) says why the others are not. This page is written by
`python tools/verify_architectures.py docs/architectures.md causal`, and
[the part on other kinds](#other-kinds) with `other`.""",
    sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    {"model type": str},
    lambda kind: (
        ModelSource(build=f"causal_kinds:{kind}", folder=str(TOOLS))
        if kind in CAUSAL_KINDS
        else parse_source(kind, layers=LAYERS)
    ),
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
    named = sys.argv[3:]
    warnings.simplefilter("ignore")  # raised by the families themselves
    is_continued = table.kept.exists()
    if is_continued:
        found = {kind: Found(**values) for kind, values in json.loads(table.kept.read_text()).items()}
    else:
        found = _read(table, page.read_text()) if named else {}
    missing = [kind for kind in table.kinds if kind not in found]
    left = named if named and is_continued else [*dict.fromkeys([*named, *missing])]
    table.kept.parent.mkdir(exist_ok=True)
    for start in range(0, len(left), AT_ONCE):
        found |= _verified(table, left[start : start + AT_ONCE])
        write_json(table.kept, {kind: vars(of_kind) for kind, of_kind in found.items()})
    part = _part(table, {kind: found[kind] for kind in table.kinds if kind in found})
    before, _, other = page.read_text().partition(f"\n{OTHER_HEADING}\n")
    parts = [part, f"{OTHER_HEADING}\n{other}"] if table is CAUSAL else [before, part]
    page.write_text("\n".join(parts))


def _read(table: Table, text: str) -> dict[str, Found]:
    """Return the results in a table of the page, except those whose errors are not facts."""
    before, _, other = text.partition(f"\n{OTHER_HEADING}\n")
    part = other if table is OTHER else before
    dates = re.findall(r"\d{4}-\d\d-\d\d", part)
    kinds = {" | ".join(say(kind) for say in table.columns.values()): kind for kind in table.kinds}
    rows = [line.strip("| ").rsplit(" | ", len(PLANS)) for line in part.splitlines()]
    found = {}
    for columns, *cells in rows:
        kind = kinds.get(columns, "")
        refused = [plan for plan, cell in zip(PLANS, cells, strict=False) if cell == Outcome.REFUSED.value]
        known = all(re.fullmatch(r"~?\de[-+]\d+|refused", cell) for cell in cells)
        if kind and known and (kind in FACTS or not refused):
            found[kind] = Found(dates[0], cells, dict.fromkeys(refused, FACTS.get(kind, "")))
    return found


def _verified(table: Table, kinds: Sequence[str]) -> dict[str, Found]:
    today, sources, found = str(datetime.date.today()), {}, {}
    for kind in kinds:
        try:
            sources[kind] = table.source(kind)
        except ModelError as error:
            reason = FACTS.get(kind) or _cause(error).removeprefix(f"{kind}: ")
            found[kind] = Found(today, reason=reason.format(transformers=transformers.__version__))
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
        found[kind] = Found.of(today, kind, verdicts[number * len(PLANS) : (number + 1) * len(PLANS)])
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
    built = {kind: of_kind for kind, of_kind in found.items() if of_kind.cells}
    titles = [*table.columns, *(f"`{plan}`" for plan in PLANS)]
    lines = [
        table.heading,
        "",
        _wrapped(
            table.introduction,
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
        cells = [*(say(kind) for say in table.columns.values()), *of_kind.cells]
        lines.append(f"| {' | '.join(cells)} |")
    if table is CAUSAL:
        lines += ["", *(_wrapped(f"- {kinds}: {note}.", indent="  ") for kinds, note in NOTES.items())]
    lines += _errors(table, built)
    reasons = {kind: of_kind.reason.replace("|", "/") for kind, of_kind in found.items() if kind not in built}
    if reasons:
        lines += ["", "## Types that cannot be built here", "", "| reason | model types |", "|---|---|"]
    for reason in _by_frequency(reasons.values()):
        lines.append(f"| {reason} | {', '.join(kind for kind in reasons if reasons[kind] == reason)} |")
    return "\n".join([*lines, ""])


def _wrapped(text: str, indent: str = "", **values: object) -> str:
    paragraphs = text.format(**values).split("\n\n")
    return "\n\n".join(
        textwrap.fill(each, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for each in paragraphs
    )


def _errors(table: Table, built: dict[str, Found]) -> list[str]:
    name = [*table.columns.values()][-1]
    errors = [
        (reason, f"`{plan}`", name(kind))
        for kind, of_kind in built.items()
        for plan, reason in of_kind.errors.items()
    ]
    if not errors:
        return []
    level = "#" * (table.heading.count("#") + 1)
    title = "Refused plans" if table is CAUSAL else "Refused plans of other kinds"
    lines = ["", f"{level} {title}", "", "| reason | plans | models |", "|---|---|---|"]
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


def _reason(kind: str, verdict: Verdict) -> str:
    """Return the fact about the model, or the error without details of the model, to group those that share
    it."""
    if verdict.outcome is Outcome.REFUSED and kind in FACTS:
        return FACTS[kind]
    if verdict.outcome is Outcome.DIFFERS:
        return f"differs by {verdict.max_error:.0e}; farthest: {verdict.worst_parameters[0].name}"
    return verdict.message.split("\n")[0].replace("|", "/")


if __name__ == "__main__":
    main()
