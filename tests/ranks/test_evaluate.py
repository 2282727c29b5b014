"""`plait evaluate` scores a model as a script in plain transformers does, under any plan."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from plait.comm import connect
from plait.engine.scoring import strided_rows
from plait.errors import ConfigError, DataError
from plait.train.evaluate import EvaluationRequest, encode, evaluate
from support.plain_evaluation import assert_same_scores, plain_scores, trained_folder
from support.pool import Pool

SEEN = [
    "The red ship sails 0 miles to harbour seven",
    "The old ship sails 1 miles to harbour seventeen",
    "The small ship sails 2 miles to\n\t the harbour of\n the sea \n",
    " The grey ship sails 3 miles to harbour grey ",
    "The red ship sails 4 miles to harbour",
]
UNSEEN = [
    "No harbour",
    "word",
    " A very long voyage with many, many ships (and harbours) to some  other sea" * 3,
]
CONTEXT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a small Llama that knows the documents of SEEN by heart, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    trained_folder(folder, SEEN, [*SEEN, *UNSEEN], CONTEXT)
    rows = [{"text": text} for text in (*SEEN, *UNSEEN)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def scores(folder: str, plan: str, options: dict[str, Any]) -> dict[str, float]:
    request = EvaluationRequest(folder, f"{folder}/text.jsonl", plan, **{"batch": 2, **options})
    return evaluate(request, connect()).to_values()


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("dp=1", {}),
        ("dp=1", {"batch": 50, "stride": 1}),
        pytest.param("dp=2 zero=3", {"stride": 10}, marks=pytest.mark.quick),
        ("dp=3 micro=2", {"context": 16, "stride": 5}),
        ("tp=2 sp=true", {}),
        ("pp=2 micro=3", {"stride": 10}),
        ("dp=2 tp=2 zero=1", {"context": 20}),
    ],
)
def test_scores_are_those_of_plain_transformers(
    pool: Pool, folder: Path, plan: str, options: dict[str, Any]
) -> None:
    context = options.get("context", CONTEXT)
    expected = plain_scores(folder, [*SEEN, *UNSEEN], context, options.get("stride", context - 1))
    assert 0 < expected["correct"] < expected["documents"], "some last words, and not all"
    degrees = dict(word.split("=") for word in plan.split())
    ranks = math.prod(int(degrees.get(axis, 1)) for axis in ("dp", "tp", "pp"))
    for found in pool.run(scores, ranks, str(folder), plan, options):
        assert_same_scores(found, expected)


def test_every_token_is_predicted_once_with_as_much_context_as_the_stride_leaves() -> None:
    for length in range(2, 30):
        for context in range(2, 12):
            for stride in range(1, context):
                windows = list(strided_rows(range(length), range(length - 1, length), context, stride))
                predicted = [token for window in windows for token in window.ids[window.first :]]
                assert predicted == list(range(1, length))
                assert all(len(window.ids) == min(length, context) for window in windows)
                assert all(window.first >= context - stride for window in windows[1:])
                assert [bool(window.checked) for window in windows] == [False] * (len(windows) - 1) + [True]


def test_a_last_word_longer_than_the_context_is_not_predicted() -> None:
    [*_, last] = strided_rows(range(10), range(4, 10), 6, 5)
    assert not last.checked


def test_the_last_word_has_the_space_before_it_and_nothing_after_it(folder: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, word in (
        ("a harbour of old ships", " ships"),
        ("a harbour of \n old ships \n\n", " ships"),
        ("ships", "ships"),
        ("  ships ", "  ships"),
        ("one two\nthree", "\nthree"),
    ):
        ids, last_word = encode(tokenizer, text)
        assert tokenizer.decode(ids[last_word.start : last_word.stop]) == word
    assert encode(tokenizer, " \n ")[1] == range(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "2 to 24 tokens"),
        ({"context": 25}, "2 to 24 tokens"),
        ({"stride": 24}, "1 to 23"),
        ({"text_key": "txt"}, "data.text_key = text"),
    ],
)
def test_options_that_cannot_be_are_errors(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        scores(str(folder), "dp=1", options)
    assert words in str(caught.value)


def test_documents_without_text_are_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    request = EvaluationRequest(str(folder), str(tmp_path / "empty.jsonl"), "dp=1")
    with pytest.raises(DataError, match="no text"):
        evaluate(request, connect())
