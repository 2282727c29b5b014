"""Evaluate a causal language model: loss, perplexity and last words of documents, and tasks.

[Note: protocol]
Every token of a document is predicted once, the first one from the tokenizer's bos token (or eos, where there
is none): no document is context of another. The loss is summed over tokens; a perplexity is its exponential
after division by the number of tokens, of bytes, or of words (separated by white space, so that their number
does not depend on the tokenizer; a text that was changed before has another number than its original, by
which papers divide). The accuracy of last words is that of LAMBADA (Paperno et al. 2016): a document is
correct if no token is likelier than each one of its last word, with the space before it, given the true
tokens before it. For windows of long documents see engine/scoring.py, for tasks train/tasks.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from plait.comm import World
from plait.data.readers import read_documents
from plait.data.tokenizer import read_tokenizer
from plait.engine.engine import Engine
from plait.engine.scoring import Row, RowScore, rolling_rows, score_rows, strided_rows
from plait.errors import ConfigError, DataError
from plait.models import check_attends_backwards
from plait.tables import counted, facts_table
from plait.train.metrics import perplexity
from plait.train.model_files import ModelFiles
from plait.train.tasks import encode_tasks, task_text


@dataclass(frozen=True)
class EvaluationRequest:
    """Arguments of `evaluate`, as JSON values.

    model      a run directory (its newest checkpoint), a checkpoint, or a Hugging Face folder
    data       a source of documents, as in a recipe's data.sources
    batch      windows, or choices, that a rank reads in one call of the engine: see `score_rows`
    context    tokens of a window; None: the model's positions, or the longest document
    stride     of strided windows; None: context - 1
    windows    strided or rolling: see [Note: windows] in engine/scoring.py
    words      of the original text; None: those of the data
    tasks      see `Task.parse`; `shots`: None: all that its file has
    tokenizer  None: the model's own
    """

    model: str
    data: str | None
    plan: str
    batch: int = 8
    context: int | None = None
    stride: int | None = None
    windows: str = "strided"
    words: int | None = None
    tasks: Sequence[str] = ()
    shots: int | None = None
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
            "byte_perplexity": perplexity(self.loss_sum / self.num_bytes),
            "bits_per_byte": self.loss_sum / math.log(2) / self.num_bytes,
            "last_word_accuracy": self.correct / max(1, self.last_words),
        }


@dataclass(frozen=True)
class Evaluation:
    """Scores of documents, if there are any, and of tasks by their names."""

    documents: Scores | None
    tasks: Mapping[str, Mapping[str, float]]

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        documents = {} if self.documents is None else self.documents.to_values()
        return documents | ({"tasks": dict(self.tasks)} if self.tasks else {})

    def table(self, request: EvaluationRequest) -> Table:
        facts = {} if self.documents is None else _document_facts(request, self.documents)
        facts |= {name: task_text(scores) for name, scores in self.tasks.items()}
        return facts_table(f"evaluation of {request.model}", facts.items())


def _document_facts(request: EvaluationRequest, scores: Scores) -> dict[str, str]:
    values = scores.to_values()
    return {
        "data": f"{request.data}: {counted(scores.documents, 'document')}, "
        f"{counted(scores.words, 'word')}, {counted(scores.tokens, 'token')}",
        "loss": f"{values['loss']:.6f} per token",
        "perplexity": f"{values['perplexity']:,.4f} per token, {values['word_perplexity']:,.4f} per word",
        "bits per byte": f"{values['bits_per_byte']:.6f}",
        "last words": f"{values['last_word_accuracy']:.2%} correct, "
        f"{scores.correct:,} of {scores.last_words:,}",
    }


@dataclass(frozen=True)
class Documents:
    """Texts, and the tokens of each with the indices of its last word's."""

    texts: Sequence[str]
    encoded: Sequence[tuple[list[int], range]]

    @classmethod
    def read(cls, source: str, text_key: str, tokenizer: PreTrainedTokenizerBase) -> "Documents":
        """Raises DataError, also for documents without text."""
        texts = [*read_documents(source, text_key)]
        found = cls(texts, [encode(tokenizer, text) for text in texts])
        if found.longest < 2:
            raise DataError(
                "the documents have no text",
                given=f"{source}: {counted(len(texts), 'document')}",
                expected="a document of at least two tokens",
                hint="other files, or --text-key KEY for the text in JSON lines",
            )
        return found

    @property
    def longest(self) -> int:
        return max((len(ids) for ids, _ in self.encoded), default=1)

    def rows(self, windows: str, context: int, stride: int) -> list[Row]:
        if windows == "rolling":
            return [row for document in self.encoded for row in rolling_rows(*document, context)]
        return [row for document in self.encoded for row in strided_rows(*document, context, stride)]

    def scores(self, found: Sequence[RowScore], words: int | None) -> Scores:
        """`found`: of all rows. `words`: of the original text."""
        return Scores(
            documents=len(self.texts),
            tokens=sum(len(ids) - 1 for ids, _ in self.encoded),
            words=sum(len(text.split()) for text in self.texts) if words is None else words,
            num_bytes=sum(len(text.encode()) for text in self.texts),
            loss_sum=-math.fsum(score.log_prob for score in found),
            last_words=sum(bool(last_word) for _, last_word in self.encoded),
            correct=sum(score.is_greedy for score in found),
        )


def evaluate(request: EvaluationRequest, world: World) -> Evaluation:
    """Return the scores, on every rank. Every rank makes the call. Raises a PlaitError."""
    found = ModelFiles.find(request.model, request.tokenizer)
    tokenizer = read_tokenizer(found.tokenizer)
    model, arguments = found.model()
    check_attends_backwards(model)
    documents = None if request.data is None else Documents.read(request.data, request.text_key, tokenizer)
    tasks = encode_tasks(request.tasks, request.shots, tokenizer)
    longest = max([task.longest for task in tasks] + ([documents.longest] if documents else []))
    context, stride = _spans(request, getattr(model.config, "max_position_embeddings", None), longest)
    rows = [] if documents is None else documents.rows(request.windows, context, stride)
    tasks = [task.fitting(context) for task in tasks]
    engine = found.engine(model, arguments, request.plan, world)
    shown, of_documents = _shown(engine), None
    if documents is not None:
        scores = score_rows(engine, rows, batch=request.batch, shown=shown)
        of_documents = documents.scores(scores, request.words)
    return Evaluation(
        of_documents, {task.name: task.scores(engine, tokenizer, request.batch, shown) for task in tasks}
    )


def _shown(engine: Engine) -> Callable[[Sequence[Any]], Iterable[Any]]:
    console = Console(stderr=True)
    is_shown = engine.world.rank == 0 and console.is_terminal
    return lambda calls: track(calls, "evaluating", console=console, disable=not is_shown)


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
    if request.windows == "rolling" and request.stride is not None:
        raise ConfigError(
            "rolling windows have no stride",
            given=f"--windows rolling --stride {request.stride}",
            expected="windows that follow one another",
            hint="--windows strided",
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
