"""Sources become documents: whole, in order, with errors that name the place of damage."""

import gzip
import itertools
import json
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import readers, sources
from plait.data.encoder import Sample
from plait.data.python_docs import conversations
from plait.data.readers import ReadOptions, read_chunks
from plait.data.sources import FileSlice, Shard, list_shards, list_source
from plait.data.tokenizer import file_hashes, split_long_words, train_tokenizer
from plait.errors import DataError

TEXT = st.text(st.sampled_from("ab \n\r\té漢🙂"), max_size=200)


def documents(shards: list[Shard], text_key: str = "text") -> list[str]:
    """Read all shards and join the pieces into documents; asserts that the last one has ended."""
    found, open_piece = [], ""
    for shard in shards:
        for piece in read_chunks(shard, ReadOptions(text_key, 0, lambda _: None)):
            open_piece += piece.text
            if piece.last:
                found.append(open_piece)
                open_piece = ""
    assert open_piece == ""
    return found


def cut(path: Path, kind: sources.Kind, bounds: list[int]) -> list[Shard]:
    size = path.stat().st_size
    bounds = sorted({0, size, *(bound % (size + 1) for bound in bounds)})
    pairs = itertools.pairwise(bounds)
    return [Shard(0, (FileSlice(kind, str(path), start, stop, size),), 0) for start, stop in pairs]


@settings(deadline=None, max_examples=150)
@given(text=TEXT.filter(bool), bounds=st.lists(st.integers(0, 1000), max_size=5), piece=st.integers(1, 40))
def test_a_text_file_cut_anywhere_is_read_once_and_ends_once(
    text: str, bounds: list[int], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", piece)
        assert documents(cut(path, "text", bounds)) == [text]


@settings(deadline=None, max_examples=100)
@given(
    texts=st.lists(TEXT, max_size=8),
    bounds=st.lists(st.integers(0, 5000), max_size=5),
    piece=st.integers(1, 40),
    final_newline=st.booleans(),
)
def test_rows_cut_anywhere_are_read_once_each_and_empty_ones_left_out(
    texts: list[str],
    bounds: list[int],
    piece: int,
    final_newline: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    lines = "\n".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts)
    path.write_bytes((lines + "\n" * final_newline).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", piece)
        assert documents(cut(path, "jsonl", bounds)) == [text for text in texts if text]


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12), limit=st.integers(100, 3000))
def test_shards_cover_every_byte_in_order_and_stay_small(
    sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("many")
    for number, size in enumerate(sizes):
        (folder / f"{number:02d}.txt").write_bytes(b"x" * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MIN_SHARD_BYTES", limit)
        patch.setattr(sources, "MAX_SHARD_BYTES", limit)
        shards = list_shards([str(folder / "*.txt")])
    slices = [item for shard in shards for item in shard.slices]
    covered = [(Path(item.name).stem, place) for item in slices for place in range(item.start, item.stop)]
    assert covered == [(f"{n:02d}", place) for n, size in enumerate(sizes) for place in range(size)]
    assert max(shard.num_bytes for shard in shards) <= limit


def test_a_packed_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"body": f"row {number}\n"}) + "\n\n" for number in range(100))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    shards = list_shards([str(tmp_path / "rows.jsonl.gz")])
    assert documents(shards, "body") == [f"row {number}\n" for number in range(100)]


def test_a_draw_depends_on_seed_and_text_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the same")
    (tmp_path / "b.jsonl").write_text('{"text": "the same"}\n{"text": "another"}')
    shards = list_shards([str(tmp_path / "*")])
    draws = [piece.draw for shard in shards for piece in read_chunks(shard, ReadOptions("text", 3, len))]
    others = [piece.draw for shard in shards for piece in read_chunks(shard, ReadOptions("text", 4, len))]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws).isdisjoint(others)


def test_globs_are_sorted_and_recursive(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("z.txt", "a.txt", "deep/er/m.txt"):
        (tmp_path / name).write_text(name)
    names = [Path(item.name).relative_to(tmp_path).as_posix() for item in list_source(f"{tmp_path}/**/*.txt")]
    assert names == ["a.txt", "deep/er/m.txt", "z.txt"]


def test_a_file_that_links_to_folders_reach_again_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "z.md").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = list_source(f"{tmp_path}/**/*.md")
    assert [item.name for item in found] == [str(tmp_path / "z.md")]


def test_the_standard_library_comes_without_its_tests() -> None:
    names = [item.name for item in list_source("python-stdlib")]
    assert len(names) > 300
    assert names == sorted(names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "/tests/" in name or "/site-packages/" in name for name in names)


DOCUMENTED = """
def f(a, *, b=1):
    '''Add.

    And more.'''
def _hidden(): "Private."
def silent(): pass
class C:
    "A thing."
    def g(self): "Go."
"""


def test_python_docs_are_conversations_about_public_names_with_docstrings() -> None:
    file = Path(sysconfig.get_path("stdlib"), "made", "up.py")
    turns = [
        [message["content"] for message in row["messages"]]
        for row in conversations(file, DOCUMENTED.encode())
    ]
    assert turns == [
        ["What does made.up.f(a, *, b=1) do?", "Add."],
        ["What is the class made.up.C?", "A thing.", "What does made.up.C.g(self) do?", "Go."],
    ]
    assert list(conversations(file, b"not Python")) == []


def test_python_docs_are_read_as_rows_and_are_no_text() -> None:
    found = list_source("python-docs")
    assert [item.name for item in found] == [item.name for item in list_source("python-stdlib")]
    (item,) = (item for item in found if item.name.endswith("/shutil.py"))
    shard = Shard(0, (item,), item.num_bytes)
    rows: list[Any] = []
    empty = Sample([], np.zeros(0, np.float32))
    assert (
        len(list(read_chunks(shard, ReadOptions("", encode=lambda row: (rows.append(row), empty)[1])))) > 20
    )
    assert any("shutil.copy(src, dst, " in row["messages"][0]["content"] for row in rows)
    with pytest.raises(DataError, match="that is a conversation"):
        list(read_chunks(shard, ReadOptions("text")))


def test_a_missing_source_is_an_error() -> None:
    with pytest.raises(DataError, match=r"the source nowhere/\*\.txt is missing"):
        list_shards(["nowhere/*.txt"])
    with pytest.raises(DataError, match="an unknown user"):
        list_shards(["~unknown-user/a.txt"])


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.jsonl.gz", "zero.txt"])
def test_a_source_that_is_not_a_regular_file_is_an_error(tmp_path: Path, name: str) -> None:
    if name == "zero.txt":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}"):
        documents(list_shards([str(tmp_path / name)]))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_too_long_for_memory_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    rows = (f'{{"text": "{"x" * size}"}}\n'.encode() for size in (900, 1000))
    (tmp_path / name).write_bytes(b"".join(map(gzip.compress if name.endswith("gz") else bytes, rows)))
    with pytest.raises(DataError, match=rf"{name} contains a line that is too long"):
        documents(list_shards([str(tmp_path / name)]))


@given(st.text("ab \n", max_size=2000))
def test_text_is_split_for_training_inside_long_words_only(text: str) -> None:
    pieces = list(split_long_words(text * 20))
    assert "".join(pieces) == text * 20
    longest = max((len(run) for run in re.findall(r"\S+|\s+", text * 20)), default=0)
    assert (len(pieces) == 1) == (longest <= 256)


def test_a_tokenizer_is_trained_on_a_run_of_one_character_in_linear_time() -> None:
    trained = train_tokenizer(iter(["x" * 300_000]), 300, None)
    assert max(map(len, trained.get_vocab())) == 256


def test_a_directory_as_a_source_is_an_error_with_the_glob_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory") as error:
        list_shards([str(tmp_path)])
    assert error.value.hint == f"{tmp_path}/**/*.txt"


def test_an_empty_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="is empty"):
        list_shards([str(tmp_path / "*.txt")])


def test_bytes_that_are_not_utf8_are_named_by_file_and_place(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("fine")
    bad = tmp_path / "latin.txt"
    bad.write_bytes((b"x" * 99 + b"\n") * 15_000 + b"caf" + b"\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8") as error:
        documents(list_shards([str(tmp_path / "*.txt")]))
    assert str(error.value.given).startswith("byte 1500003 (0xe9)")


def test_a_character_cut_off_at_the_end_of_a_file_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes("naïve é".encode()[:-1])
    with pytest.raises(DataError, match="not UTF-8") as error:
        documents(list_shards([str(tmp_path / "cut.txt")]))
    assert str(error.value.given).startswith("byte 7 ")


@pytest.mark.parametrize(
    ("line", "fact", "given"),
    [
        (b'{"text": "a"', "contains a line that is not JSON", "line 2"),
        (b"[" * 100_000, "contains a line that is not JSON", "line 2"),
        (b'["a"]', "contains a row that is not an object", "line 2: a list"),
        (b'{"txet": "a"}', "contains a row without 'text'", "line 2: 'txet'"),
        (b'{"messages": []}', "contains a row that is a conversation", "line 2: 'messages'"),
        (b'{"text": null}', "contains a row whose 'text' is not text", "line 2: a NoneType"),
        (b'{"text": "\\ud800"}', "contains a row with an unpaired surrogate", "line 2"),
        (b'{"text": "\xff"}', "is not UTF-8", "byte 25 (0xff)"),
    ],
)
def test_a_bad_row_is_named_by_its_place(tmp_path: Path, line: bytes, fact: str, given: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "ab"}\n' + line + b"\n")
    for shards in (
        list_shards([str(tmp_path / "rows.jsonl")]),
        cut(tmp_path / "rows.jsonl", "jsonl", [5]),  # of which the second slice has the line
    ):
        with pytest.raises(DataError, match=r"rows\.jsonl") as error:
            documents(shards)
        assert fact in error.value.fact
        assert str(error.value.given).startswith(given)


def test_a_misspelt_text_key_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"content": "a"}')
    with pytest.raises(DataError) as error:
        documents(list_shards([str(tmp_path / "rows.jsonl")]), "contents")
    assert error.value.hint == "data.text_key = content"


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda raw: b"plain" + raw, lambda raw: raw[:40] + raw[48:]]
)
def test_a_damaged_packed_file_is_an_error(tmp_path: Path, damage: object) -> None:
    raw = gzip.compress("".join(json.dumps({"text": str(n * n)}) + "\n" for n in range(1000)).encode())
    assert callable(damage)
    (tmp_path / "rows.jsonl.gz").write_bytes(damage(raw))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        documents(list_shards([str(tmp_path / "rows.jsonl.gz")]))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long enough")
    shards = list_shards([str(tmp_path / "a.txt")])
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="changed while being read"):
        documents(shards)


def test_hf_without_datasets_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed, where it is
    with pytest.raises(DataError, match="needs the package `datasets`") as error:
        list_shards(["hf:wikitext"])
    assert error.value.hint == "pip install 'plait[datasets]'"


def test_a_tokenizer_file_too_large_to_be_one_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**40)
    with pytest.raises(DataError, match="too large for a tokenizer"):
        file_hashes(tmp_path)
