"""Token files are as they were when they were made, and fit the model, or an error is raised."""

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from plait.data import sources
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, TokenStream, open_store
from plait.errors import DataError
from plait.fileio import json_hash

TRAINED = TokenizerConfig(vocab_size=300)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """A store of several parts."""
    monkeypatch.setattr(sources, "MIN_SHARD_BYTES", 500)
    monkeypatch.setattr(sources, "MAX_SHARD_BYTES", 500)
    rows = "".join(json.dumps({"text": f"row {n} of many rows\n"}) + "\n" for n in range(100))
    (tmp_path / "a.jsonl").write_text(rows)
    return build(recipe(tmp_path), TRAINED, progress=False)


def recipe(folder: Path, **changes: object) -> DataConfig:
    values = {
        "dir": folder / "tokens",
        "sources": [str(folder / "a.jsonl")],
        "sequence": 8,
        "validation": 0.2,
    }
    return DataConfig(**{**values, **changes})


def change_index(store: TokenStore, change: Callable[[dict], object], *, signed: bool = True) -> None:
    path = store.dir / "index.json"
    whole = json.loads(path.read_text())
    change(whole["index"])
    if signed:
        whole["sha256"] = json_hash(whole["index"])
    path.write_text(json.dumps(whole))


def message(folder: Path, tokenizer: TokenizerConfig | None = TRAINED, **changes: object) -> DataError:
    with pytest.raises(DataError) as error:
        open_store(recipe(folder, **changes), tokenizer)
    return error.value


def test_built_tokens_open_with_the_same_digest(store: TokenStore, tmp_path: Path) -> None:
    again = open_store(recipe(tmp_path), TRAINED)
    assert again.digest == store.digest
    assert again.train.num_tokens == store.train.num_tokens > 0


def test_a_token_file_cut_short_is_named(store: TokenStore, tmp_path: Path) -> None:
    path = store.dir / store.index.train[1].name
    path.write_bytes(path.read_bytes()[:-2])
    error = message(tmp_path, verify=False)
    assert error.fact == f"the token file {path} is truncated"
    assert error.expected == f"{store.index.train[1].tokens * 2} bytes"


def test_a_token_file_that_is_gone_is_named(store: TokenStore, tmp_path: Path) -> None:
    (store.dir / store.index.validation[0].name).unlink()
    assert message(tmp_path, verify=False).fact.endswith(f"{store.index.validation[0].name} is missing")


def test_a_link_in_a_token_files_place_is_refused(store: TokenStore, tmp_path: Path) -> None:
    path = store.dir / store.index.train[0].name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "is not a regular file" in message(tmp_path).fact


def test_a_flipped_byte_is_found_where_hashes_are_asked_for(store: TokenStore, tmp_path: Path) -> None:
    path = store.dir / store.index.train[-1].name
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)
    open_store(recipe(tmp_path, verify=False), TRAINED)
    open_store(recipe(tmp_path), TRAINED, verify=False)
    error = message(tmp_path)
    assert error.fact == f"the token file {path} is damaged"
    assert store.index.train[-1].sha256 in str(error.expected)


def test_a_swapped_tokenizer_is_found(store: TokenStore, tmp_path: Path) -> None:
    other = build(recipe(tmp_path, dir=tmp_path / "other"), TokenizerConfig(vocab_size=290), progress=False)
    (store.tokenizer_dir / "tokenizer.json").write_bytes(
        (other.tokenizer_dir / "tokenizer.json").read_bytes()
    )
    error = message(tmp_path, None, verify=False)
    assert "were built with another tokenizer" in error.fact
    assert "tokenizer.json differs" in str(error.given)


def test_a_lost_tokenizer_is_found(store: TokenStore, tmp_path: Path) -> None:
    for path in store.tokenizer_dir.iterdir():
        path.unlink()
    assert "missing" in str(message(tmp_path).given)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"sources": ["python-stdlib"]}, "were built with other sources"),
        ({"validation": 0.1}, "were built with other validation"),
        ({"seed": 1}, "were built with other seed"),
        ({"text_key": "body"}, "were built with other text_key"),
    ],
)
def test_tokens_of_another_recipe_are_refused(
    store: TokenStore, tmp_path: Path, changes: dict[str, object], fact: str
) -> None:
    error = message(tmp_path, **changes)
    assert fact in error.fact
    assert next(iter(changes)) in str(error.expected)


def test_tokens_of_another_tokenizer_are_refused(store: TokenStore, tmp_path: Path) -> None:
    assert "were built with another tokenizer" in message(tmp_path, TokenizerConfig(vocab_size=301)).fact
    existing = TokenizerConfig(path=store.tokenizer_dir)
    assert "were built with another tokenizer" in message(tmp_path, existing).fact


def test_sampling_options_do_not_change_the_tokens(store: TokenStore, tmp_path: Path) -> None:
    open_store(recipe(tmp_path, sequence=16, order="sequential", workers=3), TRAINED)


def test_a_directory_without_tokens_is_an_error_with_the_command_that_makes_them(tmp_path: Path) -> None:
    error = message(tmp_path)
    assert error.fact == f"{tmp_path / 'tokens'} contains no tokens"
    assert error.hint == "plait data build"


@pytest.mark.parametrize(
    ("change", "signed"),
    [
        (lambda index: index.update(max_token=1), False),
        (lambda index: index["train"][0].update(name="../../etc/passwd"), True),
        (lambda index: index["train"][0].update(name="/etc/passwd"), True),
        (lambda index: index["train"][0].update(tokens=2**62), True),
        (lambda index: index["train"][0].update(tokens=-1), True),
        (lambda index: index["train"].append(index["train"][0]), True),
        (lambda index: index.update(max_token=10**6), True),
        (lambda index: index.update(dtype="object"), True),
        (lambda index: index.update(extra=1), True),
        (lambda index: index.clear(), True),
    ],
)
def test_an_index_is_not_trusted(
    store: TokenStore, tmp_path: Path, change: Callable[[dict], object], signed: bool
) -> None:
    change_index(store, change, signed=signed)
    assert message(tmp_path).fact == f"{store.dir / 'index.json'} is damaged"


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10**5, b'{"sha256": 1}'])
def test_an_index_that_is_no_index_is_damaged(store: TokenStore, tmp_path: Path, content: bytes) -> None:
    (store.dir / "index.json").write_bytes(content)
    assert message(tmp_path).fact == f"{store.dir / 'index.json'} is damaged"


def test_tokens_that_do_not_fit_the_model_are_refused(store: TokenStore) -> None:
    store.check_model(vocab_size=store.index.max_token + 1, max_sequence=8, sequence=8)
    store.check_model(vocab_size=300, max_sequence=None, sequence=10**6)
    with pytest.raises(DataError, match="do not fit the model's vocabulary") as error:
        store.check_model(vocab_size=store.index.max_token, max_sequence=8, sequence=8)
    assert error.value.hint == f"vocab_size={store.index.vocab_size}, the tokenizer's"
    with pytest.raises(DataError, match="longer than the model allows"):
        store.check_model(vocab_size=300, max_sequence=8, sequence=9)


def test_the_largest_token_is_that_of_the_files(store: TokenStore) -> None:
    streams = (store.train, store.validation)
    assert store.index.max_token == max(stream.read(0, stream.num_tokens).max() for stream in streams)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_across_parts_are_those_of_the_whole(tmp_path: Path, dtype: str) -> None:
    whole = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, endpoint=True).astype(dtype)
    bounds = [0, 1, 2, 10, 400, 401, 1000]
    files = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        whole[start:stop].tofile(tmp_path / str(number))
        files.append((tmp_path / str(number), stop - start))
    stream = TokenStream("training", files, dtype)

    @settings(deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 1000))
        starts = data.draw(st.lists(st.integers(0, 1000 - length), max_size=6))
        expected = [whole[start : start + length] for start in starts]
        windows = stream.read_windows(np.array(starts, dtype=np.int64), length)
        assert windows.dtype == np.int64
        assert windows.shape == (len(starts), length)
        assert all(np.array_equal(*pair) for pair in zip(windows, expected, strict=True))

    check()
    copy = pickle.loads(pickle.dumps(stream))
    assert np.array_equal(copy.read(0, 1000), whole)
    with pytest.raises(AssertionError, match="beyond"):
        stream.read(999, 2)


def test_a_stream_of_nothing_is_one(tmp_path: Path) -> None:
    assert TokenStream("validation", [], "uint16").num_tokens == 0


def test_ids_beyond_two_bytes_take_four(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["</s>", *(f"w{n}" for n in range(70_000))])}
    wide = Tokenizer(WordLevel(words, unk_token="</s>"))
    wide.pre_tokenizer = WhitespaceSplit()
    wide.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w5 w65534 w65535 w69999")
    data = recipe(tmp_path, sources=[str(tmp_path / "a.txt")], validation=0)
    tokenizer = TokenizerConfig(path=tmp_path / "tokenizer.json", end_of_document="</s>")
    store = build(data, tokenizer, progress=False)
    assert store.train.read(0, 5).tolist() == [6, 65_535, 65_536, 70_000, 0]
    assert store.index.item_bytes == 4
    assert store.index.vocab_size == store.index.max_token + 1 == 70_001
