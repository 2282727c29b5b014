"""Samples that know their documents: boundaries, padding, packed rows, and orders that group by length."""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import plait
from plait.data import sources
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, TokenStream
from plait.data.documents import Bins, Documents, MicroBatches, PackedDocuments, check_documents
from plait.data.loader import Batches, Windows
from plait.data.packing import best_fit, within_budget
from plait.data.sampler import BatchSizes, LengthGroups, OneEpoch, SampleOrder
from plait.data.tokenizer import read_tokenizer
from plait.errors import DataError
from support.document_rows import stream_of

TEXTS = [f"document {n} has " + "many " * (n % 7) + "words" for n in range(60)]


def built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = (), **changes: Any
) -> TokenStore:
    monkeypatch.setattr(sources, "MIN_SHARD_BYTES", 500)  # several parts
    monkeypatch.setattr(sources, "MAX_SHARD_BYTES", 500)
    for name in names or ("a",):
        texts = [f"{text} of {name}" if names else text for text in TEXTS]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = [str(folder / f"{name}.jsonl") for name in names or ("a",)]
    data = DataConfig(dir=folder / "tokens", sources=files, sequence=8, validation=0.2)
    return build(data, TokenizerConfig(vocab_size=300, **changes), progress=False)


@pytest.mark.quick
def test_each_document_is_a_sample_with_its_end_truncated_to_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = built(tmp_path, monkeypatch)
    check_documents(store)
    end, tokenizer = store.index.end_of_document, read_tokenizer(store.tokenizer_dir)
    expected = sorted([*tokenizer(text)["input_ids"], end] for text in TEXTS)
    found: list[list[int]] = []
    for stream in (store.train, store.validation):
        samples = Documents(stream, end, plait.PaddingCollator(end, 1, 1000))
        for index in range(len(samples)):
            found += samples.batch(np.array([index]))["input_ids"].tolist()
    assert sorted(found) == expected
    short = pickle.loads(pickle.dumps(Documents(store.train, end, plait.PaddingCollator(end, 8, 11))))
    batch = short.batch(np.arange(len(short)))
    assert batch["input_ids"].shape[1] == 11, "a multiple of 8 would be longer than the longest"
    assert batch["attention_mask"].sum(dim=1).tolist() == short.lengths.tolist()
    assert max(short.lengths) == 11 < max(map(len, expected))


def test_an_end_token_that_is_also_in_texts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built(tmp_path, monkeypatch)
    a_word = read_tokenizer(first.tokenizer_dir).tokenize(TEXTS[0])[0]
    tokenizer = TokenizerConfig(path=first.tokenizer_dir, end_of_document=a_word)
    data = DataConfig(dir=tmp_path / "more", sources=[str(tmp_path / "a.jsonl")], sequence=8)
    store = build(data, tokenizer, progress=False)
    with pytest.raises(DataError, match="also occurs inside documents") as caught:
        check_documents(store)
    assert "in 60 documents" in str(caught.value.given)


def test_the_collator_pads_ids_masks_and_labels() -> None:
    samples = [[5, 6, 7], torch.tensor([8]), {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]
    batch = plait.PaddingCollator(pad_token=9, multiple_of=3)(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9, 9, 9], [8, 9, 9, 9, 9, 9], [1, 2, 3, 4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [
        [5, 6, 7, -100, -100, -100],
        [8, -100, -100, -100, -100, -100],
        [-100, -100, 3, 4, -100, -100],
    ]
    cut = plait.PaddingCollator(multiple_of=8, max_length=2)(samples)
    assert cut["input_ids"].tolist() == [[5, 6], [8, 0], [1, 2]]
    [batch] = DataLoader([[1], [2, 3]], batch_size=2, collate_fn=plait.PaddingCollator())
    assert batch["input_ids"].tolist() == [[1, 0], [2, 3]]


@given(num=st.integers(1, 90), batch=st.integers(1, 8), window=st.integers(1, 6), seed=st.integers(0, 99))
def test_length_groups_reorder_within_windows_only(num: int, batch: int, window: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, num)
    plain, grouped = SampleOrder(num, seed), LengthGroups(SampleOrder(num, seed), lengths, batch, window)
    size = batch * window
    ours = grouped.indices(0, 3 * size)
    for first in range(0, 3 * size, size):
        rows = ours[first : first + size].reshape(window, batch)
        assert sorted(rows.ravel()) == sorted(plain.indices(first, size))
        spans = sorted((lengths[row].min(), lengths[row].max()) for row in rows)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    fresh = LengthGroups(SampleOrder(num, seed), lengths, batch, window)
    first = size + batch // 2
    assert fresh.indices(first, size).tolist() == ours[first : first + size].tolist(), "resumed in the midst"


def test_shares_of_ranks_and_micro_batches_are_those_of_the_global_batch(tmp_path: Path) -> None:
    """Documents 10 10 0, 20 0, ...: only the micro-batch's own longest counts."""
    ids = [token for n in range(1, 30) for token in [10 * n] * (n % 5 + 1) + [0]]
    np.array(ids, dtype="<u2").tofile(tmp_path / "a")
    samples = Documents(
        TokenStream("training", [(tmp_path / "a", len(ids))], "uint16"), 0, plait.PaddingCollator(0, 1, 5)
    )
    order = LengthGroups(SampleOrder(len(samples), 3), samples.lengths, 8, 2)

    def documents(ranks: int, micro: int | None) -> list[list[int]]:
        found = []
        for number in range(5):
            for rank in range(ranks):
                shares = Batches(
                    samples, order, BatchSizes(8), data_rank=rank, data_ranks=ranks, micro=micro
                )[number]
                for batch in [shares] if isinstance(shares, dict) else shares:
                    lengths = batch["attention_mask"].sum(dim=1)
                    assert batch["input_ids"].shape[1] == lengths.max()
                    found += [row[:n].tolist() for row, n in zip(batch["input_ids"], lengths, strict=True)]
        return found

    assert documents(1, None) == documents(2, 2) == documents(4, 1) == documents(1, 4)
    assert isinstance(Batches(samples, order, BatchSizes(8), micro=1)[0], list)


def test_positions_of_packed_documents_start_again_after_each_end(tmp_path: Path) -> None:
    """Document n has n tokens and the end, 0: the second row begins within the fourth document."""
    ids = [token for n in range(1, 6) for token in [10 + n] * n + [0]]
    np.array(ids, dtype="<u2").tofile(tmp_path / "a")
    stream = TokenStream("training", [(tmp_path / "a", len(ids))], "uint16")
    samples = pickle.loads(pickle.dumps(PackedDocuments(Windows(stream, 10), 0)))
    assert len(samples) == 2
    batch = samples.batch(np.arange(2))
    assert batch["input_ids"].tolist() == [ids[:10], ids[9:19]]
    assert batch["position_ids"].tolist() == [
        [0, 1, 0, 1, 2, 0, 1, 2, 3, 0],
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4],
    ]
    assert batch["labels"].tolist() == [
        [11, 0, -100, 12, 0, -100, 13, 13, 0, -100],
        [14, 14, 14, 14, 0, -100, 15, 15, 15, 15],
    ]


def test_labels_of_another_length_than_the_tokens_are_an_error() -> None:
    with pytest.raises(DataError, match=r"do not fit its tokens\n.*3 tokens and 2 labels"):
        plait.PaddingCollator()([{"input_ids": [1, 2, 3], "labels": [1, 2]}])


def of_five_documents(folder: Path, *, table: tuple[float, ...] = (0.0, 1.0), **options: Any) -> Documents:
    """Documents of 2 to 6 tokens with the end, 0: token 10 n + m is number m of document n. Odd tokens have
    the last weight of the table, others the first."""
    ids = [[*(10 * n + m for m in range(n)), 0] for n in range(1, 6)]
    weights = [[table[-1] if token % 2 else table[0] for token in document] for document in ids]
    return Documents(stream_of(folder, ids, weights, table), 0, plait.PaddingCollator(0, 1, 4), **options)


def test_documents_that_are_split_overlap_by_one_token_and_others_lose_their_ends(tmp_path: Path) -> None:
    split, short = (of_five_documents(tmp_path, split=split) for split in (True, False))
    assert [split.read(i)["input_ids"].tolist() for i in range(len(split))] == [
        [10, 0], [20, 21, 0], [30, 31, 32, 0], [40, 41, 42, 43], [43, 0], [50, 51, 52, 53], [53, 54, 0],
    ]  # fmt: skip
    assert split.facts == "5, of which 2 split"
    assert short.lengths.tolist() == [2, 3, 4, 4, 4]
    assert short.facts == "5, of which 2 truncated by 3 of 20 tokens"


def test_a_full_row_has_complete_documents_and_padding_numbered_as_another_one(tmp_path: Path) -> None:
    documents = of_five_documents(tmp_path, table=(0.0, 0.5))
    samples = pickle.loads(pickle.dumps(Bins(documents, best_fit(documents.lengths, 7), 7, first_position=2)))
    batch = samples.batch(np.arange(len(samples) + 1))
    assert samples.documents_per_sample == pytest.approx(5 / 3), "whose attention is apart, for mfu"
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [
            [10, 0, 40, 41, 42, 43, 0],
            [20, 21, 0, 30, 31, 32, 0],
            [50, 51, 52, 53, 0, 0, 0],
            [0] * 7,
        ],
        "position_ids": [[2, 3, 2, 3, 4, 5, 2], [2, 3, 4, 2, 3, 4, 5], [2, 3, 4, 5, 2, 3, 4], [*range(2, 9)]],
        "labels": [
            [-100, -100, -100, 41, -100, 43, -100],
            [-100, 21, -100, -100, 31, -100, -100],
            [-100, 51, -100, 53, -100, -100, -100],
            [-100] * 7,
        ],
        "loss_weights": [
            [0, 0, 0, 0.5, 0, 0.5, 0],
            [0, 0.5, 0, 0, 0.5, 0, 0],
            [0, 0.5, 0, 0.5, 0, 0, 0],
            [0] * 7,
        ],
    }
    assert samples.facts.endswith("; in 3 rows, 80.95% filled")


@pytest.mark.parametrize("grouped", [False, True])
def test_padded_documents_carry_their_targets_and_weights(tmp_path: Path, grouped: bool) -> None:
    documents = of_five_documents(tmp_path, table=(0.0, 0.5) if grouped else (0.0, 1.0))
    order = LengthGroups(SampleOrder(5, 1), documents.lengths, 1, 5)
    for index in order.indices(0, 5) if grouped else range(5):
        batch = documents.batch(np.array([index, 0]))
        kept = batch["labels"] != -100
        assert torch.equal(kept, (batch["input_ids"] % 2 == 1) & (batch["attention_mask"] == 1))
        assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
        assert ("loss_weights" in batch) == grouped, "0 and 1 are labels"
        if grouped:
            assert torch.equal(batch["loss_weights"], kept * 0.5)


def test_micro_batches_are_read_once_in_an_evaluation_and_then_without_targets(tmp_path: Path) -> None:
    documents = of_five_documents(tmp_path)
    samples = MicroBatches(documents, within_budget(documents.lengths, 8))
    assert samples.facts.endswith("; in 3 micro-batches, 94.44% filled")
    order = OneEpoch(SampleOrder(len(samples), 5), len(samples))
    assert sorted(order.indices(0, 3)) == [0, 1, 2]
    assert order.indices(2, 4).tolist()[1:] == [3, 3, 3]
    assert order.epochs(9) == [1.0]
    shares = Batches(samples, order, BatchSizes(4), data_rank=1, data_ranks=2, micro=2)[0]
    assert isinstance(shares, list)
    assert shares[0]["attention_mask"].sum(dim=1).max() > 1
    assert (shares[1]["labels"] == -100).all()


def test_sources_stop_where_their_parts_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = built(tmp_path, monkeypatch, names=("a", "b"))
    tokenizer, stops = read_tokenizer(store.tokenizer_dir), store.stops_of_sources()
    assert len(store.train.files) > 2, "parts of a source"
    texts = (
        tokenizer.decode(store.train.read(0, int(stops[0]))),
        tokenizer.decode(store.train.read(int(stops[0]), store.train.num_tokens - int(stops[0]))),
    )
    assert [("of a" in text, "of b" in text) for text in texts] == [(True, False), (False, True)]
    assert stops[1] == store.train.num_tokens
