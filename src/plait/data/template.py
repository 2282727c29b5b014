"""A tokenizer's chat template: conversations -> text, and the spans of it that are trained.

A template with generation marks says itself what a model generates. Otherwise the spans are found from what
the template writes, with no knowledge of any template:

[Note: spans of turns]  Renderings of the beginnings of a conversation are in general no prefixes of its own:
templates leave out the reasoning of earlier turns, or write the end token after the last one only. So the
conversation is rendered once, and again for each trained message with its words replaced by a mark. What
follows the last mark must also end the text; it begins with what ends the turn: its common part with what
follows the mark if the message is the last one. What precedes the span must be the same in both renderings.
A row for which this does not hold is refused: the template writes something else where the message changes.

[Note: header]  A span begins where a model would: after the generation prompt of the messages before it, if
the text begins so. Otherwise (`<think>` in the prompt, but not in the turn) both are compared from the end
of the previous message on, which a mark finds. Common parts end between two tokens.

[Note: empty think block]  In place of reasoning that a message does not have, templates write an empty
block, which inference puts into the prompt. It is the text between header and message, if the rendering with
a mark as reasoning differs from the text only by the mark. A model is not trained on it by default.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from plait.data.conversations import REASONING, Conversation, map_arguments
from plait.errors import ContentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "probe"


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation, and their weight."""

    start: int
    stop: int
    weight: float


class ChatTemplate:
    """The chat template of a fast tokenizer. `bare`: its tokenizer, for the borders of tokens."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", bare: Tokenizer, train_empty_thinking: bool
    ) -> None:
        """Raises DataError: no template, or one that cannot be read."""
        self._tokenizer, self._bare = tokenizer, bare
        self._train_empty_thinking = train_empty_thinking
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template",
                given=tokenizer.name_or_path or type(tokenizer).__name__,
                expected="a tokenizer with a chat template, such as that of an instruction-tuned model",
                hint="tokenizer.chat_template = FILE.jinja",
            )
        self.source = str(tokenizer.chat_template)  # of all, if there are several by name
        self._takes_parts = False
        probe = Conversation([{"role": "user", "content": _PROBE}], [0.0])
        try:
            self._takes_parts = _PROBE not in self._text(probe)
        except ContentError as error:
            if type(error.__cause__).__name__ == "TemplateSyntaxError":
                raise DataError(
                    "the chat template is not a Jinja template",
                    given=error.given,
                    expected="a template as in transformers' documentation",
                    hint="the template of an instruction-tuned model",
                ) from error

    def render(self, chat: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and its trained spans in order. Raises ContentError."""
        shaped, text, marked = self._shaped(chat)
        _check_messages(chat, text)
        turns = {number: self._marked(shaped, number, text) for number, w in enumerate(chat.weights) if w}
        self._check_results(shaped, text)
        if marked is not None:
            digits = _mark(text)[1:]
            inside = {
                number: [at for at, span in enumerate(spans or ()) if digits in own[slice(*span)]]
                for number, (own, spans) in turns.items()
            }
            return text, _weighted(chat, marked, inside)
        return text, [self._turn(shaped, n, text, own, chat.weights[n]) for n, (own, _) in turns.items()]

    def prompt(self, chat: Conversation) -> str:
        """The text of a conversation up to where the next answer begins. Raises ContentError."""
        return self._shaped(chat, prompt=True)[1]

    def _shaped(
        self, chat: Conversation, *, prompt: bool = False
    ) -> tuple[Conversation, str, list[tuple[int, int]] | None]:
        """The conversation, with arguments of tool calls as the template takes them, and its rendering."""
        shaped = chat.with_object_arguments()
        try:
            return shaped, *self._render(shaped, prompt=prompt)
        except ContentError as error:  # see [Note: arguments of tool calls]
            if not any(message.get("tool_calls") for message in chat.messages):
                raise
            shaped = chat.with_text_arguments()
            try:
                return shaped, *self._render(shaped, prompt=prompt)
            except ContentError:
                raise error from None

    def _check_results(self, chat: Conversation, text: str) -> None:
        """Raise ContentError if the template leaves out a tool's message, which it may write as JSON."""
        mark = _mark(text)
        for number, message in enumerate(chat.messages):
            if message["role"] != "tool" or not message.get("content", "").strip():
                continue
            try:
                other = self._text(chat.changed(number, content=mark))
            except ContentError:
                continue  # it reads the content
            if other == text:
                raise _left_out(number, "tool")

    def _render(
        self, chat: Conversation, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        from transformers.utils import chat_template_utils  # noqa: PLC0415  takes a second

        render: Any = chat_template_utils.render_jinja_template  # its annotation lacks the marks
        messages = chat.messages
        if self._takes_parts:
            parts = ({**m, "content": [{"type": "text", "text": m.get("content", "")}]} for m in messages)
            messages = list(parts)
        try:
            source = self._tokenizer.get_chat_template(None, chat.tools)
            has_marks = _GENERATION.search(source) is not None
            texts, marks = render(
                conversations=[messages],
                tools=chat.tools,
                chat_template=source,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **chat.kwargs},
            )
        except Exception as error:  # of a program that may be anyone's
            raise ContentError(
                "that the chat template refuses",
                given=f"{type(error).__name__}: {error}",
                expected="messages in an order and of a kind that the template renders",
                hint='other messages; data.errors = "skip" leaves such rows out',
            ) from error
        return texts[0], marks[0] if has_marks else None

    def _text(self, chat: Conversation, *, prompt: bool = False) -> str:
        return self._render(chat, prompt=prompt)[0]

    def _marked(self, chat: Conversation, number: int, text: str) -> tuple[str, list[tuple[int, int]] | None]:
        """The rendering with marks in one message, and its generation marks. Raises ContentError
        if the template leaves the marks out."""
        mark = _mark(text)
        own, spans = self._render(_with_marks(chat, number, mark))
        calls = chat.messages[number].get("tool_calls")
        if calls and not re.search(rf"{mark}a|(?<!w){mark[1:]}", own):
            raise _unstable(number, "the template does not render its tool calls")
        if mark[1:] not in own:
            raise _unstable(number, "the template does not render it")
        return own, spans

    def _turn(self, chat: Conversation, number: int, text: str, own: str, weight: float) -> Span:
        """The trained span of one message. See [Note: spans of turns]. `own`: the rendering with marks."""
        mark = _mark(text)
        tail = _after(own, mark)
        start = self._header_end(chat, number, text)
        if not text.endswith(tail) or text[:start] != own[:start] or start > len(text) - len(tail):
            raise _unstable(number, "the rendering of other messages changes with its text")
        if number == len(chat.messages) - 1:
            end = tail
        else:
            alone = self._text(_with_marks(chat, number, mark).upto(number + 1))
            end = tail[: self._common(tail, _after(alone, mark))]
        stop = len(text) - len(tail) + len(end.rstrip() or end)
        start = self._begin(chat, number, text, start, own)
        if start >= stop:
            raise _unstable(number, "the template renders no text for it")
        return Span(start, stop, weight)

    def _header_end(self, chat: Conversation, number: int, text: str) -> int:
        """Position after the header of a message. See [Note: header]."""
        try:
            prompt = self._text(chat.upto(number), prompt=True)
        except ContentError as error:
            raise _unstable(number, f"no generation prompt precedes it: {error.given}") from error
        if text.startswith(prompt):
            return len(prompt)
        if not number:
            raise _unstable(number, "its header differs from the generation prompt, and nothing precedes it")
        mark = _mark(text)
        marked = _with_marks(chat, number - 1, mark)
        tail, expected = (
            _after(found, mark)
            for found in (self._text(marked), self._text(marked.upto(number), prompt=True))
        )
        common = self._common(tail, expected)
        if not text.endswith(tail) or (expected and not common):
            raise _unstable(number, "its header differs from the generation prompt")
        return len(text) - len(tail) + common

    def _begin(self, chat: Conversation, number: int, text: str, start: int, own: str) -> int:
        """First trained position: `start`, or after an empty block. See [Note: empty think block].

        own  the rendering with marks
        """
        mark = _mark(text)
        has_reasoning = f"{mark}r" in own
        if f"{mark}c" not in own:
            own = self._text(chat.changed(number, content=f"{mark}c"))
        first = max(start, own.find(mark))
        block = text[start:first]
        if not block.strip() or not text.startswith(own[:first]):
            return start
        if "add_generation_prompt" not in self.source:
            return first  # all of it is the header
        if self._train_empty_thinking or has_reasoning:
            return start
        unreasoned = chat.upto(number + 1).changed(number, **dict.fromkeys(REASONING))
        plain = self._text(unreasoned)
        thought = self._text(unreasoned.changed(number, reasoning_content=f"{mark}r"))
        before, found, after = thought.partition(f"{mark}r")
        is_block = (
            found and block.strip() in plain and "".join((before + after).split()) == "".join(plain.split())
        )
        return first if is_block else start

    def _common(self, text: str, other: str) -> int:
        """Length of the common beginning, up to the border of a token of `other`."""
        pairs = enumerate(zip(text, other, strict=False))
        common = next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))
        if common == len(other):
            return common
        borders = self._bare.encode(other, add_special_tokens=False).offsets
        return max((stop for _, stop in borders if stop <= common), default=0)


def _mark(text: str) -> str:
    """A word that the text does not contain, nor its digits."""
    return f"w{int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())}"


def _with_marks(chat: Conversation, number: int, mark: str) -> Conversation:
    """Replace the words of a message: its content, reasoning and arguments of tool calls."""
    message = chat.messages[number]
    names = {"content": "c", **dict.fromkeys(REASONING, "r")}
    values: dict[str, Any] = {name: mark + end for name, end in names.items() if message.get(name)}
    if calls := message.get("tool_calls"):
        values |= map_arguments({"tool_calls": calls}, lambda old: _marked_values(old, mark))
    return chat.changed(number, **values)


def _marked_values(value: Any, mark: str) -> Any:
    """Replace texts by texts and other values by numbers, so that what closes them is the same."""
    if isinstance(value, Mapping):
        marked = {name: _marked_values(item, mark) for name, item in value.items()}
        return marked or {f"{mark}a": int(mark[1:])}
    if isinstance(value, list | tuple):
        return [_marked_values(item, mark) for item in value] or [int(mark[1:])]
    return f"{mark}a" if isinstance(value, str) else int(mark[1:])


def _after(text: str, mark: str) -> str:
    """Text after the last mark."""
    found = list(re.finditer(rf"{mark}[acr]|{mark[1:]}", text))
    return text[found[-1].end() :] if found else text


def _unstable(number: int, reason: str) -> ContentError:
    return ContentError(
        "whose trained tokens cannot be determined",
        given=f"messages[{number}]: {reason}",
        expected="a chat template whose other text does not depend on the message",
        hint='a template with {% generation %} marks as tokenizer.chat_template, or data.errors = "skip"',
    )


def _check_messages(chat: Conversation, text: str) -> None:
    """Raise ContentError if the template leaves out a message of a user or system."""
    rendered = "".join(text.split())
    for number, message in enumerate(chat.messages):
        content = message.get("content", "")
        if message["role"] in ("user", "system", "developer") and "".join(content.split()) not in rendered:
            raise _left_out(number, message["role"])


def _left_out(number: int, role: str) -> ContentError:
    return ContentError(
        f"with a {role} message that the chat template leaves out",
        given=f"messages[{number}]",
        expected="messages that the template renders",
        hint=f"no {role} message, or another template",
    )


def _weighted(
    chat: Conversation, marked: list[tuple[int, int]], inside: Mapping[int, list[int]]
) -> list[Span]:
    """Spans of generation marks, with the weights of the assistant's messages.

    inside  the numbers of the spans with the text of each trained message
    """
    if inside and not any(inside.values()):
        raise ContentError(
            "without a token to train on",
            given=f"{len(marked)} marked spans, none with text of an assistant's message",
            expected="generation marks around what a model writes",
            hint="{% generation %} and {% endgeneration %} around the answers in the chat template",
        )
    answers = [number for number, m in enumerate(chat.messages) if m["role"] == "assistant"]
    weights = [chat.weights[number] for number in answers]
    aligned = all(at in inside.get(number, [at]) for at, number in enumerate(answers))
    if len(marked) != len(weights) or not aligned:
        if len(set(weights)) > 1:
            raise ContentError(
                "whose weights cannot be assigned to generation marks",
                given=f"{len(marked)} marked spans, {len(weights)} assistant messages",
                expected="a marked span for each assistant message",
                hint="equal weights, or a template without marks",
            )
        weights = weights[:1] * len(marked)
    return [Span(*span, weight) for span, weight in zip(marked, weights, strict=True) if weight]
