"""Text becomes tokens once, whole, the same on any number of processes, and survives being killed."""

import gzip
import itertools
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from plait.data import sources
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, TokenStream, open_store
from plait.data.readers import find_bad
from plait.data.sources import list_source
from plait.data.tokenizer import probe_tokenizer, read_tokenizer, train_tokenizer
from plait.errors import DataError
from support import warm
from support.cli_runs import environment

TRAINED = TokenizerConfig(vocab_size=320)
NASTY = [
    "plain words\n",
    "  tabs\tand\r\nreturns \n\n\n",
    "é漢字🙂 \u200d\ufeff",
    "<|end|> is only text",
    " ",
]


def config(folder: Path, *names: str, **settings: object) -> DataConfig:
    settings = {"dir": folder / "tokens", "sequence": 8, "validation": 0.3, **settings}
    return DataConfig(sources=[str(folder / name) for name in names], **settings)


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts_of(stream: TokenStream, store: TokenStore) -> list[str]:
    tokens = stream.read(0, stream.num_tokens)
    ends = np.flatnonzero(tokens == store.index.end_of_document)
    assert ends[-1] == len(tokens) - 1, "the last document has an end"
    tokenizer = read_tokenizer(store.tokenizer_dir)
    documents = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(document[:-1], clean_up_tokenization_spaces=False) for document in documents]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts from little text."""
    monkeypatch.setattr(sources, "MIN_SHARD_BYTES", 200)
    monkeypatch.setattr(sources, "MAX_SHARD_BYTES", 200)


@pytest.mark.usefixtures("small_shards")
def test_every_document_is_decoded_once_character_by_character(tmp_path: Path) -> None:
    texts = [f"{text}{number}" for number in range(20) for text in NASTY]
    write_rows(tmp_path / "a.jsonl", texts[:60])
    for number, text in enumerate(texts[60:]):
        (tmp_path / f"b{number:02d}.txt").write_bytes(text.encode())
    store = build(config(tmp_path, "a.jsonl", "b*.txt"), TRAINED, progress=False)
    train, validation = texts_of(store.train, store), texts_of(store.validation, store)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the sources' order
    assert 0.1 < len(validation) / len(texts) < 0.5
    assert len(store.index.train) > 5


def test_the_tokenizer_is_one_that_transformers_loads(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY * 5)
    store = build(config(tmp_path, "a.jsonl"), TRAINED, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer_dir)
    assert tokenizer.eos_token == tokenizer.bos_token == "<|end|>"
    assert tokenizer.eos_token_id == store.index.end_of_document
    assert len(tokenizer) == store.index.vocab_size <= 320
    text = NASTY[2]
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert store.train.num_tokens + store.validation.num_tokens == store.index.sources[0].tokens


def test_the_standard_librarys_files_round_trip(tmp_path: Path) -> None:
    root = Path(json.__file__).parent
    store = build(config(tmp_path, f"{root}/*.py"), TokenizerConfig(vocab_size=1000), progress=False)
    found = texts_of(store.train, store) + texts_of(store.validation, store)
    assert sorted(found) == sorted(path.read_bytes().decode() for path in root.glob("*.py"))
    assert store.index.vocab_size == 1000


@pytest.mark.parametrize("validation", [0.001, 0.999])
@pytest.mark.usefixtures("small_shards")
def test_no_split_is_empty_where_there_are_two_documents(tmp_path: Path, validation: float) -> None:
    texts = [f"document {number} " * 20 for number in range(6)]
    write_rows(tmp_path / "a.jsonl", texts)
    store = build(config(tmp_path, "a.jsonl", validation=validation), TRAINED, progress=False)
    train, held_out = texts_of(store.train, store), texts_of(store.validation, store)
    assert min(len(train), len(held_out)) == 1
    assert sorted(train + held_out) == sorted(texts)


def test_without_a_validation_share_all_is_for_training(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY)
    store = build(config(tmp_path, "a.jsonl", validation=0), TRAINED, progress=False)
    assert store.validation.num_tokens == 0
    assert len(texts_of(store.train, store)) == len(NASTY)


def test_the_split_changes_with_the_seed_but_not_with_the_order_of_sources(tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(60)]
    write_rows(tmp_path / "a.jsonl", texts[:30])
    write_rows(tmp_path / "b.jsonl", texts[30:])

    def held_out(name: str, *files: str, seed: int = 0) -> set[str]:
        data = config(tmp_path, *files, dir=tmp_path / name, seed=seed)
        store = build(data, TRAINED, progress=False)
        return set(texts_of(store.validation, store))

    assert held_out("ab", "a.jsonl", "b.jsonl") == held_out("ba", "b.jsonl", "a.jsonl")
    assert held_out("ab", "a.jsonl", "b.jsonl") != held_out("seed", "a.jsonl", "b.jsonl", seed=1)


def test_code_shipped_with_a_tokenizer_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody would say yes when transformers asks."""
    folder, ran = tmp_path / "words", tmp_path / "ran"
    folder.mkdir()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own:\n    pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(DataError):
        read_tokenizer(folder)
    assert not ran.exists()


def test_an_existing_tokenizer_is_taken_over_with_its_own_end(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY)
    first = build(
        config(tmp_path, "a.jsonl"), TokenizerConfig(vocab_size=300, end_of_document="</s>"), progress=False
    )
    data = config(tmp_path, "a.jsonl", dir=tmp_path / "second")
    second = build(data, TokenizerConfig(path=first.tokenizer_dir), progress=False)
    assert read_tokenizer(second.tokenizer_dir).eos_token == "</s>"
    assert (second.train.read(0, 20) == first.train.read(0, 20)).all()
    bare = config(tmp_path, "a.jsonl", dir=tmp_path / "bare")
    file = first.tokenizer_dir / "tokenizer.json"
    with pytest.raises(DataError, match="no end-of-document token"):
        build(bare, TokenizerConfig(path=file), progress=False)
    assert not bare.dir.exists()
    third = build(bare, TokenizerConfig(path=file, end_of_document="</s>"), progress=False)
    assert (third.train.read(0, 20) == first.train.read(0, 20)).all()


def test_a_second_build_only_opens(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY)
    data = config(tmp_path, "a.jsonl")
    first = build(data, TRAINED, progress=False)
    before = {path: path.stat().st_mtime_ns for path in data.dir.rglob("*")}
    assert build(data, TRAINED, progress=False).digest == first.digest
    assert {path: path.stat().st_mtime_ns for path in data.dir.rglob("*")} == before


def test_tokens_outlive_their_sources_and_changed_sources_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY)
    data = config(tmp_path, "a.jsonl")
    first = build(data, TRAINED)
    write_rows(tmp_path / "a.jsonl", [*NASTY, "more"])
    assert build(data, TRAINED).digest == first.digest
    assert "the sources have changed" in capsys.readouterr().err.replace("\n", " ")
    assert build(data, TRAINED, progress=False, force=True).digest != first.digest
    (tmp_path / "a.jsonl").unlink()
    build(data, TRAINED, progress=False)


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", NASTY)
    data = config(tmp_path, "a.jsonl")
    data.dir.mkdir()
    (data.dir / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="contains something other than tokens"):
        build(data, TRAINED, progress=False, force=True)
    assert [path.name for path in data.dir.iterdir()] == ["thesis.tex"]


def test_bad_text_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff")
    data = config(tmp_path, "a.txt")
    with pytest.raises(DataError, match="not UTF-8"):
        build(data, TRAINED, progress=False)
    assert not data.dir.exists()


def test_a_source_with_rows_but_no_text_is_empty(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["", ""])
    write_rows(tmp_path / "b.jsonl", NASTY)
    with pytest.raises(DataError, match=r"a\.jsonl is empty"):
        build(config(tmp_path, "a.jsonl", "b.jsonl"), TRAINED, progress=False)


SHARD_BYTES = 50_000
BUILD = f"""
import sys
from pathlib import Path
from plait.data import sources
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
sources.MIN_SHARD_BYTES = sources.MAX_SHARD_BYTES = {SHARD_BYTES}
if __name__ == "__main__":
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    settings = dict(sequence=8, validation=0.1, build_workers=workers)
    data = DataConfig(dir=folder / "tokens", sources=[str(folder / "*.jsonl")], **settings)
    build(data, TokenizerConfig(vocab_size=400), progress=False)
"""


def start_build(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    script = folder / "build.py"
    script.write_text(BUILD)
    return warm.Popen([str(folder), str(workers)], script=script, env=environment())


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in children for pid in (int(child), *descendants(int(child)))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_build_goes_on_and_makes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write_rows(
            tmp_path / f"{number}.jsonl", [f"{number} {row} {row * row} words\n" * 40 for row in range(600)]
        )
    killed = start_build(tmp_path, workers=2)
    unfinished = tmp_path / "tokens" / "unfinished"
    deadline = time.monotonic() + 60
    while len(list(unfinished.glob("part-*.json"))) < 3:
        assert killed.poll() is None, "the build ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    helpers = descendants(killed.pid)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, helpers)):
        assert time.monotonic() < deadline, "its processes outlive it"
        time.sleep(0.01)
    with pytest.raises(DataError, match="contains no tokens"):
        open_store(config(tmp_path, "*.jsonl"))
    records = {path.stem: path.stat().st_mtime_ns for path in unfinished.glob("part-*.json")}
    parts = {
        path: path.stat().st_mtime_ns for stem in records for path in unfinished.parent.glob(f"{stem}.*")
    }

    monkeypatch.setattr(sources, "MIN_SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(sources, "MAX_SHARD_BYTES", SHARD_BYTES)
    data = config(tmp_path, "*.jsonl", validation=0.1)
    store = build(data, TokenizerConfig(vocab_size=400), progress=False)
    assert len(parts) >= 3
    assert {path: path.stat().st_mtime_ns for path in parts} == parts, "a finished part was made again"
    names = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert {name for name in names if not name.startswith("part-")} == {"index.json", "tokenizer", ".lock"}
    in_one_go = config(tmp_path, "*.jsonl", dir=tmp_path / "other", validation=0.1)
    assert build(in_one_go, TokenizerConfig(vocab_size=400), progress=False).digest == store.digest


@pytest.mark.usefixtures("small_shards")
def test_bad_text_in_another_process_is_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 200 + b"\xff")
    existing = config(tmp_path, "b.txt", dir=tmp_path / "existing")
    (tmp_path / "b.txt").write_text("text to train on")
    tokenizer = TokenizerConfig(path=build(existing, TRAINED, progress=False).tokenizer_dir)
    data = config(tmp_path, "a.txt", build_workers=2)
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8") as error:
        build(data, tokenizer, progress=False)
    assert str(error.value.given).startswith("byte 3000 (0xff)")
    assert not list(data.dir.glob("**/*.tmp"))
    assert not (data.dir / "index.json").exists()


def corpus_with_bad_files(folder: Path) -> None:
    for number in range(6):
        (folder / f"good-{number}.txt").write_text(f"text number {number} " * 20)
    for number in range(25):
        (folder / f"latin-{number:02}.txt").write_bytes(b"caf\xe9")
    (folder / "packed.txt").write_bytes(gzip.compress(b"text"))
    (folder / "rows.jsonl").write_text('{"text": "a row"}\n' + '{"txt": 1}\n' * 3 + "no JSON\n")


def test_all_bad_files_are_in_one_error(tmp_path: Path) -> None:
    corpus_with_bad_files(tmp_path)
    with pytest.raises(DataError, match="27 files are not text") as caught:
        build(config(tmp_path, "*.*"), TRAINED, progress=False)
    message = str(caught.value)
    assert "latin-00.txt is not UTF-8: byte 3 (0xe9)" in message
    assert "... (7 more)" in message
    assert "data.errors" in caught.value.hint
    for number in range(25):
        (tmp_path / f"latin-{number:02}.txt").unlink()
    with pytest.raises(DataError) as caught:
        build(config(tmp_path, "*.*"), TRAINED, progress=False)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert [line.rpartition("/")[2] for line in lines[1:3]] == [
        "packed.txt is compressed: gzip data",
        "rows.jsonl contains a row without 'text': line 2: 'txt' (and 3 more rows)",
    ]


def test_the_search_for_bad_files_ends_at_its_time_also_inside_a_file(tmp_path: Path) -> None:
    corpus_with_bad_files(tmp_path)
    files = [*list_source(str(tmp_path / "good-*.txt")), *list_source(str(tmp_path / "rows.jsonl"))]
    assert [rows for _, _, rows in find_bad(files, "text")] == [4]
    end_s = time.monotonic()
    assert not list(find_bad(itertools.chain(files, itertools.repeat(files[0])), "text", end_s))


@pytest.mark.parametrize("build_workers", [0, 2])
def test_bad_files_and_rows_are_left_out_and_counted(tmp_path: Path, build_workers: int) -> None:
    corpus_with_bad_files(tmp_path)
    data = config(tmp_path, "*.txt", "*.jsonl", errors="skip", build_workers=build_workers)
    store = build(data, TRAINED, progress=False)
    texts = texts_of(store.train, store) + texts_of(store.validation, store)
    assert sorted(texts) == ["a row", *(f"text number {number} " * 20 for number in range(6))]
    assert [(each.skipped_files, each.skipped_rows) for each in store.index.sources] == [(26, 0), (0, 4)]
    assert store.index.skipped == "26 files, 4 rows"
    assert build(data, TRAINED, progress=False).digest == store.digest
    with pytest.raises(DataError, match="were built with other errors"):
        build(config(tmp_path, "*.txt", "*.jsonl"), TRAINED, progress=False)
    with pytest.raises(DataError, match=r"latin-00\.txt is not UTF-8") as caught:
        build(config(tmp_path, "latin*", dir=tmp_path / "none", errors="skip"), TRAINED, progress=False)
    assert "skip" not in caught.value.hint  # what the recipe has already


def test_two_builds_at_once_make_one_set_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl", [f"{row} {row * row} words\n" * 40 for row in range(1000)])
    data = config(tmp_path, "a.jsonl")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: build(data, TRAINED), range(2))
    assert capsys.readouterr().err.count("training the tokenizer") == 1
    assert first.digest == second.digest == open_store(data, verify=True).digest


@pytest.mark.parametrize("charsmap", ["AAAA", "/////wAAAAAAAA=="], ids=["panics", "aborts"])
def test_a_tokenizer_that_ends_its_process_is_an_error_and_leaves_nothing(
    tmp_path: Path, charsmap: str
) -> None:
    trained = train_tokenizer(iter(["a b"]), 300, None).backend_tokenizer
    values = json.loads(trained.to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    probe_tokenizer(path)
    path.write_text(
        json.dumps(values | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}})
    )
    (tmp_path / "a.txt").write_text("text")
    data = DataConfig(dir=tmp_path / "data", sources=[str(tmp_path / "a.txt")], sequence=4)
    with pytest.raises(DataError, match="cannot read the tokenizer") as caught:
        build(data, TokenizerConfig(path=path, end_of_document="<|endoftext|>"), progress=False)
    assert "note:" not in caught.value.given
    assert not data.dir.exists()


def test_a_tokenizer_is_tried_with_the_packages_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('found by PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(DataError, match="cannot read the tokenizer") as caught:
        probe_tokenizer(tmp_path)
    assert caught.value.given == "found by PYTHONPATH"


def test_a_configuration_in_the_folder_of_a_tokenizer_is_bounded_too(tmp_path: Path) -> None:
    train_tokenizer(iter(["a b"]), 300, None).save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_labels": 10**8}))
    with pytest.raises(DataError, match="cannot read the tokenizer") as caught:
        read_tokenizer(tmp_path)
    assert "num_labels = 100000000" in str(caught.value.given)
