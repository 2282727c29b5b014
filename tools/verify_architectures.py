"""Verify every causal language model of transformers that builds small, and models of other kinds, and write
docs/architectures.md.

    python tools/verify_architectures.py docs/architectures.md causal|mixtures|other [--again] [kind ...]

Fills the empty cells of one of the three tables; with kinds, only theirs. `--again` verifies cells that are
filled, too. All cells need the machine for an hour or more (`other`: a quarter of one). The page is written
after every few kinds, so that a second call continues from it; their dates are kept under build/.
"""

import argparse
import datetime
import json
import re
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
CONTEXT_PLANS = ("cp=2", "cp=2 tp=2 pp=2 zero=1")
EXPERT_PLANS = ("dp=4 ep=4", "dp=2 ep=2 tp=2 pp=2 zero=1")
TOOLS = Path(__file__).parent
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
    "longcat_flash": "a tensor of its experts has rows for experts that compute nothing, too",
    "albert": "its layers are one block, called several times, which cannot be divided into stages",
    **dict.fromkeys(("resnet", "plain_resnet", "unet"), "tp shards linear layers, and its blocks have none"),
    "lstm": "nn.LSTM is one module that runs all layers: it has no blocks, nor linear layers in them",
}

# Cells of plans that are refused for a reason that many kinds share, by a part of its text.
SHORT = {
    "the model does not leave attention to transformers' AttentionInterface": "own attention",
    "the model mixes the tokens of a sequence outside of attention": "mixes tokens",
    "a layer's attention is not one that cp divides": "special attention",
    "the model has an attention mask that follows from more than positions": "special mask",
    "cp computes softmax attention": "no softmax",
    "an encoder-decoder has two sequences": "encoder-decoder",
    "the model's output has no row for each token": "no row per token",
    "the model numbers tokens in a way of its own": "own positions",
    "the model does not run": "does not run on meta",
    "the loss of this model's task is no sum over tokens": "loss",
    "the loss is no sum over the tokens of a row": "loss",
    "an entry of the batch has no tokens that cp could divide": "loss",
    "the model leaves attention neither to": "own attention",
    "the heads do not divide over the ranks of cp": "heads",
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
    """The results of a model type by plan and their date, or why it cannot be built small.

    cells       the largest differences, or outcomes
    errors      of plans that are not verified: the outcome's reason
    """

    date: str
    cells: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    def is_verified(self, plans: Iterable[str]) -> bool:
        return all(self.cells.get(plan) for plan in plans) and not self.errors.keys() & {*plans}

    def updated(self, date: str, kind: str, verdicts: Mapping[str, Verdict]) -> "Found":
        """These results, with those of some plans replaced."""
        errors = {plan: reason for plan, reason in self.errors.items() if plan not in verdicts}
        errors |= {plan: _reason(kind, v) for plan, v in verdicts.items() if v.outcome is not Outcome.SAME}
        return Found(date, self.cells | {plan: _cell(v) for plan, v in verdicts.items()}, errors)


@dataclass(frozen=True)
class Table:
    """A part of the page.

    columns     titles of the first columns, and what they say about a kind
    source      the model of a kind, or ModelError
    options     what plans of a kind need
    plans       in the order of their columns
    """

    name: str
    heading: str
    introduction: str
    kinds: Sequence[str]
    columns: Mapping[str, Callable[[str], str]]
    source: Callable[[str], ModelSource]
    options: Callable[[str], str]
    plans: Sequence[str] = (*PLANS, *CONTEXT_PLANS)

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
plans without `cp`**, {{context}}; [another table](#refused-plans) says why the others are
not. An empty cell: not run. This page is written by
`python tools/verify_architectures.py docs/architectures.md causal`, and
the parts on [mixtures](#mixtures-of-experts) and [other kinds](#other-kinds) with `mixtures` and
`other`.""",
    sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    {"model type": str},
    lambda kind: (
        ModelSource(build=f"causal_kinds:{kind}", folder=str(TOOLS))
        if kind in CAUSAL_KINDS
        else parse_source(kind, layers=LAYERS)
    ),
    lambda _: "",
)
_MIXTURES = """
    afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe
    glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text jamba jetmoe kimi_linear kolibri1 laguna
    lfm2_moe llama4 llama4_text longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
    mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next
    qwen4_exp qwen4_exp_text solar_open zaya
"""
MIXTURES = Table(
    "mixtures",
    "## Mixtures of experts",
    f"""\
Results on {{date}} for the types above that have experts, of which ep gives each rank some
(transformers {{transformers}}, torch {{torch}}, {{cpu}}). Each has {LAYERS} layers, and is
{_MADE_SMALL}

**{{whole}} of {{built}} are verified under both plans.**""",
    _MIXTURES.split(),
    CAUSAL.columns,
    CAUSAL.source,
    CAUSAL.options,
    EXPERT_PLANS,
)
OTHER = Table(
    "other",
    "## Other kinds",
    f"""\
Results on {{date}} for models other than causal language models (transformers {{transformers}}, torch
{{torch}}, {{cpu}}), built as a script would build them, in `tools/other_kinds.py`. Each
has two layers (in each half, tower or stage), and is
{_MADE_SMALL}
The loss is the model's own where it has one. Plans of models with BatchNorm have `sync_batchnorm=true`.

**{{whole}} of {{built}} are verified under all {len(PLANS)} plans without `cp`**, {{context}}.""",
    list(OTHER_KINDS),
    {"kind": lambda kind: OTHER_KINDS[kind].group, "model": lambda kind: OTHER_KINDS[kind].label},
    lambda kind: ModelSource(build=f"other_kinds:{kind}", folder=str(TOOLS)),
    lambda kind: OTHER_KINDS[kind].options,
)
TABLES = {table.name: table for table in (CAUSAL, MIXTURES, OTHER)}  # in the order of the page


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("page", type=Path)
    parser.add_argument("table", choices=[*TABLES])
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    page, table = arguments.page, TABLES[arguments.table]
    warnings.simplefilter("ignore")  # raised by the families themselves
    found = _read(table, page.read_text())
    if table.kept.exists():
        dates = json.loads(table.kept.read_text())
        found = {
            kind: replace(of_kind, date=dates.get(kind, of_kind.date)) for kind, of_kind in found.items()
        }
    empty = Found(str(datetime.date.today()))
    todo = {}
    for kind in arguments.kinds or table.kinds:
        cells = {} if arguments.again else found.get(kind, empty).cells
        if left := [plan for plan in table.plans if not cells.get(plan)]:
            todo[kind] = left
    table.kept.parent.mkdir(exist_ok=True)
    for start in range(0, max(len(todo), 1), AT_ONCE):
        some = {kind: todo[kind] for kind in [*todo][start : start + AT_ONCE]}
        found |= _verified(table, some, {kind: found.get(kind, empty) for kind in some})
        write_json(table.kept, {kind: of_kind.date for kind, of_kind in found.items()})
        _write(page, table, {kind: found[kind] for kind in table.kinds if kind in found})


def _write(page: Path, table: Table, found: dict[str, Found]) -> None:
    parts = _parts(page.read_text()) | {table.name: _part(table, found)}
    page.write_text("\n".join(parts[name] for name in TABLES if parts[name]))


def _parts(page: str) -> dict[str, str]:
    """Return the text about each table, empty for one that is not on the page."""
    parts, rest = {}, page
    for table in reversed(TABLES.values()):
        before, heading, part = f"\n{rest}".partition(f"\n{table.heading}\n")
        parts[table.name], rest = heading[1:] + part, before[1:]
    return parts


def _read(table: Table, text: str) -> dict[str, Found]:
    """Return the results in a table of the page, by the titles of its columns."""
    part = _parts(text)[table.name]
    dates = re.findall(r"\d{4}-\d\d-\d\d", part)
    rows = [
        [cell.strip() for cell in line[1:-1].split(" | ")] for line in part.splitlines() if line[:1] == "|"
    ]
    num_columns = len(table.columns)
    kinds = {tuple(say(kind) for say in table.columns.values()): kind for kind in table.kinds}
    names = {[*key][-1]: kind for key, kind in kinds.items()}
    plans: list[str] = []
    found: dict[str, Found] = {}
    for row in rows:
        if row[:num_columns] == [*table.columns]:
            plans = [title.strip("`") for title in row[num_columns:]]
        elif kind := kinds.get(tuple(row[:num_columns])):
            cells = zip(plans, row[num_columns:], strict=True)
            found[kind] = Found(
                dates[0], {plan: cell for plan, cell in cells if plan in table.plans and cell}
            )
        elif len(row) == 3 and row[1].startswith("`"):  # of the refused plans
            reason, of_plans, models = row
            for kind in [kind for name, kind in names.items() if f", {name}, " in f", {models}, "]:
                found[kind].errors.update({plan.strip("`"): reason for plan in of_plans.split(", ")})
        elif len(row) == 2 and row[0] != "reason" and found:  # of types that cannot be built
            found |= {kind: Found(dates[0], reason=row[0]) for kind in row[1].split(", ") if kind in names}
    return found


def _verified(
    table: Table, todo: Mapping[str, Sequence[str]], before: Mapping[str, Found]
) -> dict[str, Found]:
    """The results of kinds, with those of the given plans."""
    today, found = str(datetime.date.today()), {}
    sources: dict[str, ModelSource] = {}
    for kind in todo:
        try:
            sources[kind] = table.source(kind)
        except ModelError as error:
            reason = FACTS.get(kind) or _cause(error).removeprefix(f"{kind}: ")
            found[kind] = Found(today, reason=reason.format(transformers=transformers.__version__))
    asked = [(kind, plan) for kind in sources for plan in todo[kind]]
    jobs = [_job(sources[kind], f"{plan} {table.options(kind)}", None) for kind, plan in asked]
    verdicts = _run(jobs)
    again = [n for n, verdict in enumerate(verdicts) if verdict.outcome is Outcome.DIFFERS]
    for number, verdict in zip(again, _run([_rough(jobs[n]) for n in again]), strict=True):
        if verdict.outcome is Outcome.SAME:
            verdicts[number] = verdict
    for kind in sources:
        of_kind = {plan: v for (other, plan), v in zip(asked, verdicts, strict=True) if other == kind}
        found[kind] = before[kind].updated(today, kind, of_kind)
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
    titles = [*table.columns, *(f"`{plan}`" for plan in table.plans)]
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
            whole=sum(of_kind.is_verified({*table.plans} - {*CONTEXT_PLANS}) for of_kind in built.values()),
            context=" and ".join(
                f"{sum(of_kind.is_verified([plan]) for of_kind in built.values())} under `{plan}`"
                for plan in CONTEXT_PLANS
            ),
        ),
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
    ]
    for kind, of_kind in built.items():
        cells = [
            *(say(kind) for say in table.columns.values()),
            *(of_kind.cells.get(plan, "") for plan in table.plans),
        ]
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
    errors: dict[tuple[str, str], list[str]] = {}  # models, by reason and plans
    for kind, of_kind in built.items():
        for reason in dict.fromkeys(of_kind.errors.values()):
            plans = ", ".join(f"`{plan}`" for plan in table.plans if of_kind.errors.get(plan) == reason)
            errors.setdefault((reason, plans), []).append(name(kind))
    if not errors:
        return []
    level = "#" * (table.heading.count("#") + 1)
    title = "Refused plans" if table is CAUSAL else f"Refused plans of {table.heading[3:].lower()}"
    lines = ["", f"{level} {title}", "", "| reason | plans | models |", "|---|---|---|"]
    for (reason, plans), models in sorted(errors.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {reason} | {plans} | {', '.join(models)} |")
    return lines


def _by_frequency(values: Iterable[str]) -> list[str]:
    return [value for value, _ in Counter(values).most_common()]


def _cell(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.SAME:
        return f"{'~' if verdict.tolerance > 1e-9 else ''}{verdict.max_error:.0e}"
    short = _short(verdict)
    return f"{verdict.outcome.value}: {short}" if short else verdict.outcome.value


def _short(verdict: Verdict) -> str:
    if verdict.outcome is not Outcome.REFUSED:
        return ""
    return next((short for text, short in SHORT.items() if text in verdict.message), "")


def _reason(kind: str, verdict: Verdict) -> str:
    """Return the fact about the model, or the error without details of the model, to group those that share
    it."""
    if verdict.outcome is Outcome.REFUSED and kind in FACTS and not _short(verdict):
        return FACTS[kind]
    if verdict.outcome is Outcome.DIFFERS:
        return f"differs by {verdict.max_error:.0e}; farthest: {verdict.worst_parameters[0].name}"
    return verdict.message.split("\n")[0].replace("|", "/")


if __name__ == "__main__":
    main()
