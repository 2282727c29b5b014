"""Hugging Face datasets as sources, with the real library; skipped where the optional extra is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

import plait.data
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore
from plait.errors import DataError
from support.chats import answer, chats, tokenizer, user

datasets = pytest.importorskip("datasets")
ROWS = [f"row {number} has text\n" for number in range(200)]


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    cache = str(tmp_path / "cache")
    return datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=cache
    )


def tokens_of(folder: Path, source: str, **changes: object) -> TokenStore:
    data = DataConfig(dir=folder / "tokens", sources=[source], sequence=8, **changes)
    return build(data, TokenizerConfig(vocab_size=300), progress=False)


def test_a_saved_dataset_gives_the_tokens_of_the_same_rows(tmp_path: Path, rows: Any) -> None:
    rows.save_to_disk(str(tmp_path / "saved"))
    store = tokens_of(tmp_path, f"hf:{tmp_path / 'saved'}")
    plain = build(
        DataConfig(dir=tmp_path / "plain", sources=[str(tmp_path / "rows.jsonl")], sequence=8),
        TokenizerConfig(vocab_size=300),
        progress=False,
    )
    assert store.digest == plain.digest


def test_a_split_is_chosen_by_name(tmp_path: Path, rows: Any) -> None:
    splits = datasets.DatasetDict({"train": rows, "test": rows.select(range(10))})
    splits.save_to_disk(str(tmp_path / "saved"))
    store = tokens_of(tmp_path, f"hf:{tmp_path / 'saved'}?split=test")
    assert store.index.sources[0].documents == 10
    assert store.index.sources[0].bytes == sum(len(text) + 1 for text in ROWS[:10])


@pytest.mark.parametrize(
    ("query", "changes", "fact"),
    [
        ("?split=dev", {}, "has no split dev"),
        ("?spilt=test", {}, "has an unknown option"),
        ("", {"text_key": "body"}, "contains a row without 'body'"),
        ("", {"text_key": "id"}, "contains a row whose 'id' is not text"),
    ],
)
def test_invalid_sources_are_errors(
    tmp_path: Path, rows: Any, query: str, changes: dict[str, object], fact: str
) -> None:
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=fact):
        tokens_of(tmp_path, f"hf:{tmp_path / 'saved'}{query}", **changes)


def test_conversations_in_parquet_and_in_a_dataset_are_those_of_json_lines(tmp_path: Path) -> None:
    """Tables give every row the keys of all, so those without a value are left out."""
    from pyarrow import Table, parquet  # noqa: PLC0415  needed by datasets

    found = [{"messages": [user("a"), answer("b")]}, chats()["multi"], chats()["system"]] * 30
    parquet.write_table(Table.from_pylist(found), tmp_path / "rows.parquet", row_group_size=7)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    files = {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}
    datasets.load_dataset("json", split="train", **files).save_to_disk(str(tmp_path / "saved"))
    made = tokenizer()
    samples = [plait.data.chat(str(tmp_path / name), made) for name in ("rows.jsonl", "rows.parquet")]
    assert samples[0] == samples[1] == plait.data.chat(f"hf:{tmp_path / 'saved'}", made)
    assert len(samples[0]) == 90
