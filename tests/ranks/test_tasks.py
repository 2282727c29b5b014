"""`plait evaluate --task` scores multiple choice and last words as a script in plain transformers does, under
any plan; and every bit is the same for any number of data ranks and any batch size."""

import copy
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoTokenizer

from plait.comm import connect
from plait.engine import scoring
from plait.engine.engine import Engine
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


def generated(folder: str, plan: str, batch: int, copies: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The scores of a task with generated answers, and the texts of this rank by prompt."""
    found: dict[str, list[str]] = {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate = Engine.generate

    def recording(self: Engine, prompts: Any, *args: Any, **options: Any) -> Any:
        rows = generate(self, prompts, *args, **options)
        for prompt, row in zip(prompts, rows, strict=True):
            found.setdefault(str(tokenizer.decode(prompt)), []).append(str(tokenizer.decode(row.ids)))
        return rows

    rows = [
        {"question": f"{row['question']} {'ship ' * number}", "answer": row["answer"]}
        for number in range(copies)
        for row in ROWS["gsm8k"]
    ]
    source = Path(folder) / f"answers-{copies}.jsonl"
    if connect().rank == 0:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    connect().barrier()
    with mock.patch.object(Engine, "generate", recording):
        values = scores(folder, plan, {"tasks": [f"gsm8k={source}"], "batch": batch})
    return values, found


def test_generated_answers_do_not_depend_on_data_ranks_or_batch_size(pool: Pool, folder: Path) -> None:
    """Also on ranks without a prompt in the last call."""
    for copies in (1, 4):
        [(expected, texts)] = pool.run(generated, 1, str(folder), "dp=1", 1, copies)
        assert len({text for of_prompt in texts.values() for text in of_prompt}) > 1
        for ranks, batch in ((1, 5), (1, 50), (2, 1), (2, 5), (3, 1), (3, 4)):
            answers = pool.run(generated, ranks, str(folder), f"dp={ranks}", batch, copies)
            assert [values for values, _ in answers] == [expected] * ranks
            together: dict[str, list[str]] = {}
            for _, of_rank in answers:
                together |= of_rank
            assert together == texts


def other_micro_batches(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.object(scoring, "TOKENS", 1):
        return scores(folder, "dp=1", options)


def test_micro_batches_of_other_rows_give_other_bits(pool: Pool, folder: Path) -> None:
    options = {"data": f"{folder}/text.jsonl"}
    [expected] = pool.run(scores, 1, str(folder), "dp=1", options)
    [found] = pool.run(other_micro_batches, 1, str(folder), options)
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
