"""Rows of chat and prompt data -> token ids and the weight of each as a target.

[Note: one tokenization]  A text is tokenized once, with no special tokens but those it spells, so the
template's beginning token is not doubled. A token is trained with the weight of the span that it overlaps: a
token with characters of header and answer is a target, since no other one has those of the answer.

[Note: prompts as text]  A prompt and its completion are joined before they are tokenized. They begin as the
tokenizer begins a text and end with the end-of-document token, which is trained.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from plait.data.conversations import Conversation, read_conversation, read_prompt
from plait.data.template import ChatTemplate, Span
from plait.errors import ContentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["chat", "prompt", "preference", "answer"]
TrainOn = Literal["all", "last"]
T = TypeVar("T")


class Sample(NamedTuple):
    """Token ids, and the weight of each as a target, 0: none."""

    ids: list[int]
    weights: NDArray[np.float32]

    def tensors(self) -> dict[str, list[int] | list[float]]:
        """`input_ids`, `labels`, and `loss_weights` if a weight is neither 0 nor 1."""
        pairs = zip(self.ids, self.weights.tolist(), strict=True)
        found: dict[str, Any] = {
            "input_ids": self.ids,
            "labels": [token if weight else -100 for token, weight in pairs],
        }
        if not np.isin(self.weights, (0, 1)).all():
            found["loss_weights"] = self.weights.tolist()
        return found


class Encoder:
    """Encodes rows of one kind with a tokenizer and its chat template.

    train_on              `last`: only the last of the messages that are trained
    train_empty_thinking  train the empty think block that a template writes for a message without reasoning
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        kind: Kind,
        *,
        train_on: TrainOn = "all",
        train_empty_thinking: bool = False,
    ) -> None:
        """Raises DataError: a slow tokenizer, or chat without a template."""
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                "the tokenizer has no positions of its tokens in the text",
                given=type(tokenizer).__name__,
                expected="a fast tokenizer",
                hint="AutoTokenizer.from_pretrained(FOLDER) of a folder with a tokenizer.json",
            )
        self._tokenizer, self._kind, self._train_on = tokenizer, kind, train_on
        self._empty = train_empty_thinking
        self._bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        begin = self._bare.encode("", add_special_tokens=True).ids[:1]
        self._begin = begin if begin == [tokenizer.bos_token_id] else []
        self._bare.no_truncation()
        self._bare.no_padding()
        self._bare.post_processor = None  # it would leave spaces out of the tokens' positions
        self._template: ChatTemplate | None = None
        if kind == "chat":
            self._template = ChatTemplate(tokenizer, self._bare, train_empty_thinking)

    def __call__(self, row: Any) -> Sample:
        """Encode a row. Raises ContentError, whose fact continues "a row"."""
        source = str(self._tokenizer.chat_template)
        found = (read_conversation if self._kind == "chat" else read_prompt)(row, source)
        try:
            sample = self._chat(found) if isinstance(found, Conversation) else self._prompt(*found)
        except UnicodeEncodeError as error:
            given, hint = error.reason, "leave it out"
            raise ContentError(
                "with an unpaired surrogate", given=given, expected="text in UTF-8", hint=hint
            ) from error
        if not sample.weights[1:].any():  # nothing precedes the first token
            raise ContentError(
                "without a token to train on",
                given=f"{len(sample.ids)} tokens",
                expected="at least one assistant message whose weight is not 0",
                hint="no such row, or a template whose {% generation %} marks have the answers",
            )
        return sample

    def _chat(self, chat: Conversation) -> Sample:
        if self._template is None:  # of prompts: most are text
            self._template = ChatTemplate(self._tokenizer, self._bare, self._empty)
        return self._encoded(
            *self._template.render(chat.with_last_only() if self._train_on == "last" else chat)
        )

    def _prompt(self, prompt: str, completion: str) -> Sample:
        span = Span(len(prompt), len(prompt) + len(completion), 1.0)
        ids, weights = self._encoded(prompt + completion, [span])
        if not weights.any():  # the tokenizer leaves nothing of the completion
            return Sample(ids, weights)
        begin = self._begin if ids[:1] != self._begin else []
        end = [self._tokenizer.eos_token_id] if ids[-1] != self._tokenizer.eos_token_id else []
        weights = np.concatenate([np.zeros(len(begin)), weights, np.ones(len(end))]).astype(np.float32)
        return Sample([*begin, *ids, *end], weights)

    def _encoded(self, text: str, spans: Iterable[Span]) -> Sample:
        """See [Note: one tokenization]."""
        text.encode()
        encoding = self._bare.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        weights = np.zeros(len(offsets), dtype=np.float32)
        for start, stop, weight in spans:
            weights[(offsets[:, 0] < stop) & (offsets[:, 1] > start)] = weight
        return Sample(encoding.ids, weights)


def row_key(row: Any) -> bytes:
    """Return what identifies a row, for its draw: the same in every file format."""
    return json.dumps(row, sort_keys=True, default=str).encode()


def encode_rows(rows: Iterable[Any], encode: Callable[[Any], T], *, skip: bool) -> Iterator[T]:
    """Encode rows of a script. Raises DataError for the first bad one, unless `skip`."""
    for number, row in enumerate(rows):
        try:
            yield encode(row)
        except ContentError as error:
            if not skip:
                raise located(error, "the data", f"row {number}") from error


def located(error: ContentError, name: str, place: str) -> ContentError:
    """Return a row's error with its place."""
    return ContentError(
        f"{name} contains a row {error.fact}",
        given=f"{place}: {error.given}",
        expected=error.expected,
        hint=error.hint,
    )


def without_none(value: Any) -> Any:
    """Remove the keys without a value that tables of rows with different keys have, also in lists."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_none(item) for item in value]
    return value
