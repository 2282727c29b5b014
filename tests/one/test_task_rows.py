"""Rows of tasks become the prompts and choices that lm-evaluation-harness makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from plait.data.tokenizer import train_tokenizer
from plait.engine.scoring import Row
from plait.errors import ConfigError, DataError
from plait.train.tasks import FORMATS, EncodedTask, Example, Task, encode_pair, encode_tasks, numbers_in
from support.task_rows import PAIRS, ROWS, pairs_of


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_becomes_the_pairs_that_are_written_out(form: str, tmp_path: Path) -> None:
    examples = Task(form, written(tmp_path / "rows.jsonl", ROWS[form])).examples()
    assert [([*example.choices], example.answer) for example in examples] == pairs_of(form)


def test_shots_precede_a_question_with_their_answers(tmp_path: Path) -> None:
    asked = {"question": "What sails?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}
    rows = written(tmp_path / "rows.jsonl", [asked])
    shots = written(tmp_path / "shots.jsonl", ROWS["arc"])
    first = "Question: Where does the red ship sail?\nAnswer: to harbour seven\n\n"
    second = "Question: How many miles?\nAnswer: 1 miles\n\n"
    question = "Question: What sails?\nAnswer:"
    for count, before in ((None, first + second), (0, ""), (1, first), (2, first + second)):
        [example] = Task("arc", rows, shots).examples(count)
        assert {context for context, _ in example.choices} == {before + question}


def test_a_question_is_not_shown_before_itself(tmp_path: Path) -> None:
    """As in the harness, which leaves the row out of shots of the same split."""
    rows = written(tmp_path / "rows.jsonl", ROWS["arc"])
    task = Task("arc", rows, rows)
    for count in (None, 1):
        one, other = task.examples(count)
        assert one.choices[0][0] == other.solved.rpartition("\n\n")[2] + "\n\n" + PAIRS["arc"][0][0][0]
        assert other.choices[0][0] == one.solved.rpartition("\n\n")[2] + "\n\n" + PAIRS["arc"][1][0][0]
    with pytest.raises(ConfigError, match="too few examples"):
        task.examples(2)


def test_the_prompt_of_a_generated_answer_does_not_depend_on_the_answer(tmp_path: Path) -> None:
    """A tokenizer may join the context's end and the answer's beginning."""
    tokenizer = Tokenizer(models.BPE(unk_token="?", **joining_merges()))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="?")
    rows = [{"question": "a", "answer": f"{word} #### 1"} for word in ("b", "c")]
    [task] = encode_tasks([f"gsm8k={written(tmp_path / 'rows.jsonl', rows)}"], None, fast)
    context = "Question: a\nAnswer:"
    assert len(fast.encode(context + " b")) == len(fast.encode(context)), "the colon is in ': b'"
    for row in task.encoded:
        assert list(row.ids) == fast.encode(context)
    assert task.longest >= len(task.encoded[0].ids) + 256


def joining_merges() -> dict[str, Any]:
    characters = sorted({*"Question: a\nAnswer: bc #### 1?"})
    joined = [*characters, ": ", ": b"]
    return {
        "vocab": {token: index for index, token in enumerate(joined)},
        "merges": [(":", " "), (": ", "b")],
    }


def test_shots_of_mmlu_are_of_the_same_subject_after_its_description(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", ROWS["mmlu"])
    shown = [{**row, "question": row["question"] + "now"} for row in ROWS["mmlu"]]
    shots = written(tmp_path / "shots.jsonl", shown)
    for example, (contexts, _, _) in zip(Task("mmlu", rows, shots).examples(1), PAIRS["mmlu"], strict=True):
        about, _, question = contexts[0].partition("\n\n")
        asked, _, rest = question.partition("\n")
        answer = " B" if "harbour\n" in question else " D"
        space = " " if asked.endswith("to") else ""
        assert example.choices[0][0] == f"{about}\n\n{asked}{space}now\n{rest}{answer}\n\n{question}"


def test_too_few_shots_are_an_error(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", ROWS["mmlu"])
    for task in (Task("mmlu", rows), Task("mmlu", rows, rows)):
        with pytest.raises(ConfigError, match="too few examples"):
            task.examples(2)


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        ("arc", {**ROWS["arc"][0], "answerKey": "E"}, "ValueError"),
        ("arc", {**ROWS["arc"][0], "answerKey": ""}, "'question'"),
        ("hellaswag", {**ROWS["hellaswag"][0], "label": ""}, "activity_label, ctx_a"),
        ("piqa", {**ROWS["piqa"][0], "label": -1}, "answer 0 of 2 choices"),
        ("mmlu", {**ROWS["mmlu"][0], "choices": ["one"]}, "choices (four)"),
        ("choice", {"context": "a", "choices": ["b"]}, "KeyError: 'answer'"),
        ("lambada", ["text"], "TypeError"),
    ],
)
def test_a_row_of_another_form_is_an_error_with_its_place(
    form: str, row: Any, words: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "rows.jsonl", [*ROWS[form], row])
    with pytest.raises(DataError) as caught:
        Task(form, source).examples()
    assert words in str(caught.value)
    assert f"line {len(ROWS[form]) + 1}" in str(caught.value)


@pytest.mark.parametrize("text", ["rows.jsonl", "ark=rows.jsonl", "arc=", "arc=rows.jsonl,"])
def test_a_task_without_format_or_file_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="a task is a format and a file"):
        Task.parse(text)


def test_two_tasks_of_one_name_are_an_error(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["ships"]), 300, None)
    with pytest.raises(ConfigError, match="two tasks have one name"):
        encode_tasks([f"arc={tmp_path}/rows.jsonl", f"arc={tmp_path}/other/rows.jsonl"], None, tokenizer)


def test_a_pair_is_encoded_as_one_text_and_cut_where_the_context_ends() -> None:
    tokenizer = train_tokenizer(iter(["The red ship sails to the harbour", "ships and ships"] * 9), 400, None)
    for context, continuation in (
        ("The red ship", " sails"),
        ("The red ship  ", "sails"),
        ("The red sh", "ip sails"),
        ("", " The red ship"),
        ("  ", "ship"),
    ):
        row = encode_pair(tokenizer, context, continuation)
        before = context.rstrip()
        start = [] if before else [tokenizer.eos_token_id]
        known = tokenizer.encode(before) if before else start
        assert list(row.ids) == start + tokenizer.encode(context + continuation)
        assert row.first == len(known)


def test_a_choice_that_does_not_fit_the_model_is_an_error_and_a_context_is_cut() -> None:
    tokenizer = train_tokenizer(iter(["ships"]), 300, None)
    row = encode_pair(tokenizer, "many and many", " ships")
    task = EncodedTask("choice/rows", [Example((("many and many", " ships"),))], [row])

    def rows(context: int) -> list[Row]:
        return [*task.fitting(context).encoded]

    num_predicted = len(row.ids) - row.first
    [cut] = rows(num_predicted + 2)
    assert cut.ids == row.ids[-num_predicted - 3 :]
    assert cut.ids[cut.first :] == row.ids[row.first :]
    assert rows(num_predicted)[0].first == 1
    with pytest.raises(DataError, match=f"1 to {num_predicted - 1} tokens"):
        rows(num_predicted - 1)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (" 2 and 3 are 5.\n#### 5", ("5", "5")),
        (" #### 1,217.", ("1217", "1217")),
        (" It costs $18. Question: 7", (None, "18")),
        (" #### -3 or 4", ("-3", "4")),
        (" none", (None, None)),
    ],
)
def test_numbers_of_a_generated_answer(text: str, numbers: tuple[str | None, str | None]) -> None:
    assert numbers_in(text) == numbers
