"""`plait evaluate --task` scores multiple choice and last words as a script in plain transformers does, under
any plan; and every bit is the same for any number of data ranks and any batch size."""

import copy
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plait.comm import connect
from plait.engine import scoring
from plait.train.evaluate import EvaluationRequest, evaluate
from support.plain_evaluation import plain_task_scores, trained_folder
from support.pool import Pool
from support.task_rows import ROWS, pairs_of

SEEN = [
    "The red ship sails 4 miles to harbour",
    "Question: To sail 4 miles\nAnswer: The red ship sails",
    "Question: How many miles?\nAnswer: 1 miles",
    "The ship left the harbour because the harbour was small.",
]
CONTEXT = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    trained_folder(folder, SEEN, SEEN, CONTEXT)
    for form, rows in ROWS.items():
        (folder / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": text * count} for count, text in enumerate(SEEN * 5, 1)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def scores(folder: str, plan: str, options: dict[str, Any]) -> dict[str, Any]:
    given = {"data": None, "tasks": [f"{form}={folder}/{form}.jsonl" for form in ROWS], **options}
    return evaluate(EvaluationRequest(folder, plan=plan, **given), connect()).to_values()


def num_ranks(plan: str) -> int:
    degrees = dict(word.split("=") for word in plan.split())
    return math.prod(int(degrees.get(axis, 1)) for axis in ("dp", "tp", "pp", "cp"))


@pytest.mark.parametrize("context", [CONTEXT, 40])
@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        pytest.param("dp=2 zero=3", marks=pytest.mark.quick),
        "tp=2 sp=true",
        "pp=2 micro=3",
        "dp=2 tp=2 zero=1",
        "cp=2",
    ],
)
def test_tasks_have_the_scores_of_plain_transformers(
    pool: Pool, folder: Path, plan: str, context: int
) -> None:
    forms = [form for form in ROWS if form != "gsm8k"]  # of choices
    expected = {form: plain_task_scores(folder, pairs_of(form), context)[0] for form in forms}
    assert 0 < sum(values["acc"] for values in expected.values()) < len(expected)
    for found in pool.run(scores, num_ranks(plan), str(folder), plan, {"context": context}):
        for form, values in copy.deepcopy(expected).items():
            own = found["tasks"][f"{form}/{form}"]
            for each in (own, values):  # a difference of sums, which a perplexity has in its exponent
                each |= {"perplexity": math.log(each["perplexity"])} if "perplexity" in each else {}
            assert own == pytest.approx({**values, "acc_stderr": own["acc_stderr"]}, rel=1e-6)


@pytest.mark.parametrize("options", [{"batch": 1}, {"batch": 50}, {"windows": "rolling", "context": 30}])
def test_no_bit_depends_on_data_ranks_or_batch_size(
    pool: Pool, folder: Path, options: dict[str, Any]
) -> None:
    base = {"data": f"{folder}/text.jsonl", **{k: v for k, v in options.items() if k != "batch"}}
    [expected] = pool.run(scores, 1, str(folder), "dp=1", {**base, "batch": 8})
    for plan in ("dp=1", "dp=2 zero=3", "dp=3", "dp=2 micro=3 zero=2"):
        for found in pool.run(scores, num_ranks(plan), str(folder), plan, base | options):
            assert found == expected


def other_micro_batches(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.object(scoring, "TOKENS", 1):
        return scores(folder, "dp=1", options)


def test_micro_batches_of_other_rows_give_other_bits(pool: Pool, folder: Path) -> None:
    options = {"data": f"{folder}/text.jsonl"}
    [expected] = pool.run(scores, 1, str(folder), "dp=1", options)
    [found] = pool.run(other_micro_batches, 1, str(folder), options)
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
