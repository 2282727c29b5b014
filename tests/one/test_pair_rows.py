"""Rows of pairs become two rows of tokens after one prompt; mistakes in rows are answered by name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch.utils.data import DataLoader

import plait
import plait.data
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig, check_data
from plait.data.dataset import TokenStore
from plait.data.documents import Answers, Documents, PaddingCollator, Pairs
from plait.data.encoder import Encoder
from plait.data.pairs import AnswerEncoder, PairEncoder
from plait.data.show import show_documents
from plait.errors import ConfigError, ContentError, DataError
from support.chats import answer, tokenizer, trained, user

MADE = tokenizer()
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [user("two?")], "chosen": [answer("four")], "rejected": [answer("five")]},
    "texts": {"prompt": "two? ", "chosen": "four", "rejected": "five"},
    "messages without a prompt": {
        "chosen": [user("two?"), answer("four")],
        "rejected": [user("two?"), answer("five")],
    },
    "texts without a prompt": {"chosen": "two? four", "rejected": "two? five"},
}
TURNS = {
    "prompt": [user("a"), answer("b"), user("c")],
    "chosen": [answer("d")],
    "rejected": [answer("e"), user("f"), answer("g")],
}


def encoded(row: Any) -> tuple[list[str], list[str]]:
    pair = PairEncoder(Encoder(MADE, "prompt"))(row)
    return trained(pair.chosen.tensors(), MADE), trained(pair.rejected.tensors(), MADE)


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_trained_and_their_prompt_is_not(form: str) -> None:
    end = "<|im_end|>" if "messages" in form else "</s>"
    space = " " if form == "texts without a prompt" else ""
    assert encoded(FORMS[form]) == ([f"{space}four{end}"], [f"{space}five{end}"])


def test_answers_of_several_turns_are_those_after_the_prompt() -> None:
    assert encoded(TURNS) == (["d<|im_end|>"], ["e<|im_end|>", "g<|im_end|>"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "that is not an object"),
        ({"prompt": "a", "chosen": "b"}, "without 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "whose answers are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected = ''"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [answer("c")]},
            "whose prompt and rejected differ in kind",
        ),
        ({"chosen": "b", "rejected": "c"}, "without a prompt"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a")]}, "whose 'rejected' has no answer"),
        ({**FORMS["messages"], "chosen": [answer("b", weight=0.5)]}, "with weights of messages"),
        ({**FORMS["messages"], "chosen": [user("b")]}, "without a token to train on"),
        ({**FORMS["messages"], "images": ["a.png"]}, "with images"),
    ],
)
def test_a_mistake_in_a_row_is_named(row: Any, words: str) -> None:
    with pytest.raises(ContentError) as caught:
        encoded(row)
    assert words in str(caught.value)


def test_pairs_of_a_script_are_two_rows_each_in_a_batch(tmp_path: Path) -> None:
    rows = [FORMS["texts"], FORMS["messages"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = plait.data.preferences(rows, MADE)
    assert pairs == plait.data.preferences(str(tmp_path / "rows.jsonl"), MADE)
    (batch,) = DataLoader(pairs, batch_size=2, collate_fn=plait.PaddingCollator())  # type: ignore[arg-type]
    texts = [
        MADE.decode(ids[labels != -100])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert texts == ["four</s>", "five</s>", "four<|im_end|>", "five<|im_end|>"]


def config(folder: Path, **changes: Any) -> DataConfig:
    options = {"kind": "preference", "samples": "documents", "sequence": 64, "build_workers": 0, **changes}
    return DataConfig(dir=folder / "data", sources=[str(folder / "rows.jsonl")], **options)


def built(folder: Path, rows: list[Any], **changes: Any) -> TokenStore:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    MADE.save_pretrained(folder / "model")
    return build(config(folder, **changes), TokenizerConfig(path=folder / "model"), progress=False)


def rows_of(number: int) -> list[Any]:
    return [
        {"prompt": f"{n}?", "chosen": "b" * (n + 1), "rejected": "c" * (number - n)} for n in range(number)
    ]


def test_both_answers_of_a_pair_are_in_one_split_and_in_one_sample(tmp_path: Path) -> None:
    store = built(tmp_path, rows_of(40), validation=0.3)
    found = set()
    for stream in (store.train, store.validation):
        pairs = Pairs(Documents(stream, 0, PaddingCollator(0, max_length=64)))
        assert len(pairs) > 1
        batch = pairs.batch(np.arange(len(pairs)))
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        texts = [MADE.decode(ids[mask]) for ids, mask in rows]
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            assert chosen.partition("?")[0] == rejected.partition("?")[0]
            assert "b" in chosen
            assert "c" in rejected
            found.add(chosen.partition("?")[0])
        padding = pairs.batch(np.array([len(pairs)]))
        assert padding["labels"].shape[0] == 2
        assert (padding["labels"] == -100).all()
    assert len(found) == 40


def test_pairs_are_shown_with_their_trained_text_and_bad_rows_are_counted(tmp_path: Path) -> None:
    rows = [rows_of(3)[0], {"prompt": "a", "chosen": "b"}, rows_of(3)[2]]
    with pytest.raises(ContentError, match="contains a row without 'rejected'"):
        built(tmp_path, rows)
    store = built(tmp_path, rows, errors="skip", validation=0)
    assert store.index.sources[0].skipped_rows == 1
    file = io.StringIO()
    show_documents(store, Console(file=file), first=1)
    assert "row 1, chosen: " in file.getvalue()
    assert "2?«bbb</s>»" in file.getvalue()
    assert "row 1, rejected: " in file.getvalue()
    assert "2?«c</s>»" in file.getvalue()
    with pytest.raises(ConfigError, match="no such row"):
        show_documents(store, Console(), first=2)


@pytest.mark.parametrize(
    "change",
    [{"samples": "bins"}, {"tokens_per_micro_batch": 64}, {"long_documents": "split"}],
)
def test_pairs_in_samples_that_would_part_them_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="both rows in one micro-batch"):
        check_data(config(tmp_path, **change))


def test_docstrings_make_pairs_whose_rejected_answer_has_its_words_backwards(tmp_path: Path) -> None:
    MADE.save_pretrained(tmp_path / "model")
    data = config(tmp_path, sequence=256).model_copy(update={"sources": ["python-docs"]})
    store = build(data, TokenizerConfig(path=tmp_path / "model"), progress=False)
    pairs = Pairs(Documents(store.train, 0, PaddingCollator(0, max_length=256)))
    assert len(pairs) > 1000
    batch = pairs.batch(np.flatnonzero(pairs.lengths < 256)[:1])  # which is not truncated
    chosen, rejected = (MADE.decode(ids) for ids in batch["input_ids"])
    assert chosen[:20] == rejected[:20]
    words = [
        MADE.decode(ids[labels != -100]).removesuffix("<|im_end|>").split()
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert words[0] == words[1][::-1]


@pytest.mark.parametrize("form", ["messages", "texts"])
def test_the_label_of_a_single_answer_is_the_sign_of_its_weights(form: str) -> None:
    row = FORMS[form]
    for label in (True, False):
        given = {"prompt": row["prompt"], "completion": row["chosen"], "label": label}
        sample = AnswerEncoder(Encoder(MADE, "prompt"))(given)
        assert trained(sample.tensors(), MADE) == encoded(row)[0]
        assert set(sample.weights.tolist()) == {0.0, 1.0 if label else -1.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "without 'label'"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "whose label is neither true nor false"),
        ({"prompt": "a", "label": True}, "without 'completion'"),
        ({"prompt": [user("a")], "completion": [answer("b", weight=0.5)], "label": True}, "with weights"),
    ],
)
def test_a_mistake_in_a_row_of_a_single_answer_is_named(row: Any, words: str) -> None:
    with pytest.raises(ContentError) as caught:
        AnswerEncoder(Encoder(MADE, "prompt"))(row)
    assert words in str(caught.value)


def test_a_sample_of_an_answer_has_a_second_row_with_the_answer_of_the_next_document(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "b" * (n + 1), "label": n % 2 == 0} for n in range(9)]
    store = built(tmp_path, rows, kind="answer", validation=0)
    answers = Answers(Documents(store.train, 0, PaddingCollator(0, max_length=64)))
    assert len(answers) == 9
    batch = answers.batch(np.arange(10))
    found = [
        (MADE.decode(ids[mask][1:]), MADE.decode(ids[labels != -100]), set(weights[labels != -100].tolist()))
        for ids, mask, labels, weights in zip(
            batch["input_ids"],
            batch["attention_mask"].bool(),
            batch["labels"],
            batch["loss_weights"],
            strict=True,
        )
    ]
    own, other = found[:18:2], found[1:18:2]
    texts = {f"{n}?{'b' * (n + 1)}</s>": 1.0 if n % 2 == 0 else -1.0 for n in range(9)}
    assert {text: sign for text, _, (sign,) in own} == texts
    for (text, _, _), (_, answered, _), (both, only, _) in zip(own, [*own[1:], own[0]], other, strict=True):
        assert (both, only) == (text.partition("?")[0] + "?" + answered, answered)
    assert [answered for _, answered, _ in found[18:]] == ["", ""]


def test_the_other_answer_is_that_of_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n // 3}?", "completion": f"{n}", "label": n % 2 == 0} for n in range(9)]
    found = plait.data.answers(rows, MADE)
    others = [MADE.decode(other["input_ids"][other["labels"] != -100]) for _, other in found]
    assert others == [f"{n // 3 * 3 + 3 if n < 6 else 0}</s>" for n in range(9)]
    for of_one_prompt in (rows[:1], rows[:3]):
        with pytest.raises(DataError, match="those of other prompts"):
            plait.data.answers(of_one_prompt, MADE)


def test_answers_of_a_script_are_those_of_a_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "b" * (n + 1), "label": n % 2 == 0} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for given in (rows, str(tmp_path / "rows.jsonl")):
        answers = plait.data.answers(given, MADE)
        batch = plait.PaddingCollator()(answers)
        texts = [
            MADE.decode(ids[labels != -100])
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        assert texts == [f"{'b' * n}</s>" for n in (1, 2, 2, 3, 3, 4, 4, 1)]
        assert batch["loss_weights"].amin(1)[::2].tolist() == [0.0, -1.0, 0.0, -1.0]
