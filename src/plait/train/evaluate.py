"""Evaluate a causal language model on documents: loss, perplexity, accuracy of last words.

[Note: protocol]
Every token of a document is predicted once, the first one from the tokenizer's bos token (or eos, where there
is none): no document is context of another. The loss is summed over tokens; a perplexity is its exponential
after division by the number of tokens, or of words (separated by white space, so that their number does not
depend on the tokenizer). The accuracy of last words is that of LAMBADA (Paperno et al. 2016): a document is
correct if each token of its last word, with the space before it, is the most likely one, given the true
tokens before it.

[Note: windows]
A document longer than `context` is read in windows of `context` tokens. The first predicts all of its tokens
but the first; each later one ends `stride` tokens after the one before, or where the document ends, and
predicts the tokens that are new in it, with at least `context - stride` tokens before them. The default
stride, `context - 1`, is the fastest; a shorter one gives every token more context. The last word is
predicted in the last window; one that does not fit into it is not correct.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from plait.comm import World
from plait.data.documents import PaddingCollator
from plait.data.readers import read_documents
from plait.data.tokenizer import read_tokenizer
from plait.engine.engine import Engine
from plait.errors import ConfigError, DataError
from plait.models import IGNORED_LABEL, check_attends_backwards
from plait.tables import counted, facts_table
from plait.train.metrics import perplexity
from plait.train.model_files import ModelFiles


@dataclass(frozen=True)
class EvaluationRequest:
    """Arguments of `evaluate`, as JSON values.

    model      a run directory (its newest checkpoint), a checkpoint, or a Hugging Face folder
    data       a source of documents, as in a recipe's data.sources
    batch      windows in one micro-batch
    context    tokens of a window; None: the model's positions, or the longest document
    stride     see [Note: windows]
    tokenizer  None: the model's own
    """

    model: str
    data: str
    plan: str
    batch: int = 8
    context: int | None = None
    stride: int | None = None
    text_key: str = "text"
    tokenizer: str | None = None
    device: str = "auto"


@dataclass(frozen=True)
class Scores:
    """Sums over all documents. See [Note: protocol].

    loss_sum    in nats, over tokens
    last_words  documents with a last word; `correct` of them are predicted correctly
    """

    documents: int
    tokens: int
    words: int
    num_bytes: int
    loss_sum: float
    last_words: int
    correct: int

    def to_values(self) -> dict[str, float]:
        """Return sums and means, for tables and JSON."""
        return {
            **asdict(self),
            "loss": self.loss_sum / self.tokens,
            "perplexity": perplexity(self.loss_sum / self.tokens),
            "word_perplexity": perplexity(self.loss_sum / max(1, self.words)),
            "bits_per_byte": self.loss_sum / math.log(2) / self.num_bytes,
            "last_word_accuracy": self.correct / max(1, self.last_words),
        }


@dataclass(frozen=True)
class Window:
    """Tokens of a document that are read together.

    first      index of the first token that is predicted
    last_word  indices of the document's last word; empty in other windows than the last
    """

    ids: tuple[int, ...]
    first: int
    last_word: range = range(0)


def scores_table(request: EvaluationRequest, scores: Scores) -> Table:
    """Return the scores as a table."""
    values = scores.to_values()
    facts = {
        "data": f"{request.data}: {counted(scores.documents, 'document')}, "
        f"{counted(scores.words, 'word')}, {counted(scores.tokens, 'token')}",
        "loss": f"{values['loss']:.6f} per token",
        "perplexity": f"{values['perplexity']:,.4f} per token, {values['word_perplexity']:,.4f} per word",
        "bits per byte": f"{values['bits_per_byte']:.6f}",
        "last words": f"{values['last_word_accuracy']:.2%} correct, "
        f"{scores.correct:,} of {scores.last_words:,}",
    }
    return facts_table(f"evaluation of {request.model}", facts.items())


def evaluate(request: EvaluationRequest, world: World) -> Scores:
    """Return the scores, on every rank. Every rank makes the call. Raises a PlaitError."""
    found = ModelFiles.find(request.model, request.tokenizer)
    tokenizer = read_tokenizer(found.tokenizer)
    model, arguments = found.model()
    check_attends_backwards(model)
    texts = list(read_documents(request.data, request.text_key))
    encoded = [encode(tokenizer, text) for text in texts]
    longest = max((len(ids) for ids, _ in encoded), default=1)
    if longest < 2:
        raise DataError(
            "the documents have no text",
            given=f"{request.data}: {counted(len(texts), 'document')}",
            expected="a document of at least two tokens",
            hint="other files, or --text-key KEY for the text in JSON lines",
        )
    context, stride = _spans(request, getattr(model.config, "max_position_embeddings", None), longest)
    engine = found.engine(model, arguments, request.plan, world, loss=_score)
    windows = [w for ids, last_word in encoded for w in windows_of(ids, last_word, context, stride)]
    loss_sum, correct = _run(engine, windows, request.batch)
    return Scores(
        documents=len(texts),
        tokens=sum(len(ids) - 1 for ids, _ in encoded),
        words=sum(len(text.split()) for text in texts),
        num_bytes=sum(len(text.encode()) for text in texts),
        loss_sum=loss_sum,
        last_words=sum(bool(last_word) for _, last_word in encoded),
        correct=correct,
    )


def _spans(request: EvaluationRequest, positions: int | None, longest: int) -> tuple[int, int]:
    """Return context and stride. Raises ConfigError."""
    context = (positions or max(2, longest)) if request.context is None else request.context
    if context < 2 or (positions is not None and context > positions):
        raise ConfigError(
            "the context does not fit the model",
            given=f"--context {context}",
            expected=f"2 to {positions} tokens" if positions else "2 tokens or more",
            hint=f"--context {positions or max(2, longest)}",
        )
    stride = context - 1 if request.stride is None else request.stride
    if not 1 <= stride < context:
        raise ConfigError(
            "windows must overlap by at least one token",
            given=f"--stride {stride}",
            expected=f"1 to {context - 1}",
            hint=f"--stride {context - 1}",
        )
    return context, stride


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], range]:
    """Return a document's tokens, after the token from which the first one is predicted, and the indices of
    its last word's tokens."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    plain = {"add_special_tokens": False, "split_special_tokens": True}  # as in the data for training
    found = tokenizer(text, **plain, return_offsets_mapping=True, verbose=False)
    ids, spans = [int(start), *found["input_ids"]], found["offset_mapping"]
    stop, parts = len(text.rstrip()), text.rsplit(None, 1)
    before = len(parts[0]) if len(parts) > 1 else 0  # end of the text before the last word
    inside = [index for index, (begin, end) in enumerate(spans, start=1) if end > before and begin < stop]
    return ids, range(inside[0], inside[-1] + 1) if inside else range(0)


def windows_of(ids: Sequence[int], last_word: range, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a document. See [Note: windows]."""
    first, stop = 1, min(len(ids), context)
    while first < len(ids):
        begin = max(0, stop - context)
        inside = range(last_word.start - begin, last_word.stop - begin)
        is_last = stop == len(ids) and last_word and inside.start >= 1
        yield Window(tuple(ids[begin:stop]), first - begin, inside if is_last else range(0))
        first, stop = stop, min(len(ids), stop + stride)


def _run(engine: Engine, windows: Sequence[Window], size: int) -> tuple[float, int]:
    """Return the summed loss, and the number of last words that are predicted correctly."""
    by_length = sorted(windows, key=lambda window: len(window.ids), reverse=True)  # little padding
    share = size * engine.plan.micro
    starts = range(0, len(by_length), share * engine.data_ranks)
    is_shown = engine.world.rank == 0 and Console(stderr=True).is_terminal
    loss_sum, correct = 0.0, 0
    for start in track(starts, "evaluating", console=Console(stderr=True), disable=not is_shown):
        own = by_length[start + engine.data_rank * share :][:share]
        no_targets = Window(by_length[0].ids[:2], first=2)  # for ranks without windows in the last batch
        result = engine.evaluate(_batch(own or [no_targets]))
        loss_sum, correct = loss_sum + result.loss_sum, correct + int(result.num_tokens)
    return loss_sum, correct


def _batch(windows: Sequence[Window]) -> dict[str, Tensor]:
    """Return the windows, padded. Labels (B, S, 2): for the loss, and for last words."""

    def masked(window: Window, indices: range) -> list[int]:
        return [token if index in indices else IGNORED_LABEL for index, token in enumerate(window.ids)]

    collate = PaddingCollator()
    batch = collate([{"input_ids": w.ids, "labels": masked(w, range(w.first, len(w.ids)))} for w in windows])
    of_words = collate([{"input_ids": w.ids, "labels": masked(w, w.last_word)} for w in windows])
    return batch | {"labels": torch.stack([batch["labels"], of_words["labels"]], dim=-1)}


def _score(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(summed loss, number of windows whose last word is predicted correctly), for `Engine.evaluate`."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=outputs.logits.device)
    correct = torch.zeros((), dtype=torch.long, device=outputs.logits.device)
    for logits_SV, labels_S2 in zip(outputs.logits[:, :-1], batch["labels"][:, 1:], strict=True):
        wide_SV = logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()
        losses = F.cross_entropy(wide_SV, labels_S2[:, 0], ignore_index=IGNORED_LABEL, reduction="none")
        loss_sum = loss_sum + losses.double().sum()
        is_word = labels_S2[:, 1] != IGNORED_LABEL
        is_wrong = (logits_SV.argmax(-1) != labels_S2[:, 1]) & is_word
        correct = correct + (is_word.any() & ~is_wrong.any())
    return loss_sum, correct
