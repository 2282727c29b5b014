"""Rows of conversations, checked: messages as a chat template takes them, and the weight of each.

[Note: keys of messages]  A template ignores a key or a role that it does not know, and so may leave out a
message, or what was meant as its weight. A key or a role is known if it is one of the common ones below or
a word of the template's source.

[Note: arguments of tool calls]  Some templates write the arguments as JSON and expect an object; others join
strings and expect JSON. Rows have either. The object is tried first, then the text, as in the row.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from plait.errors import ContentError, nearest, shown, unknown_key_hint
from plait.fileio import parse_json
from plait.tables import counted

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, as in transformers
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING)
ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
RESERVED = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
PROMPT_EXAMPLE = '{"prompt": "...", "completion": "..."}'


@dataclass(frozen=True)
class Conversation:
    """Messages and the weight of each, 0: not trained; and what else the template takes."""

    messages: list[Message]
    weights: list[float]
    tools: list[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def upto(self, number: int) -> Self:
        """The messages before this one."""
        return replace(self, messages=self.messages[:number])

    def changed(self, number: int, **values: Any) -> Self:
        """The same with other values in one message; None: without."""
        messages, changed = [*self.messages], {**self.messages[number], **values}
        messages[number] = {name: value for name, value in changed.items() if value is not None}
        return replace(self, messages=messages)

    def with_last_only(self) -> Self:
        """Train the last of the messages that are trained."""
        last = max((number for number, weight in enumerate(self.weights) if weight), default=-1)
        return replace(self, weights=[w * (number == last) for number, w in enumerate(self.weights)])

    def with_text_arguments(self) -> Self:
        """Arguments of tool calls as JSON. See [Note: arguments of tool calls]."""
        return replace(self, messages=[map_arguments(message, _json_text) for message in self.messages])

    def with_object_arguments(self) -> Self:
        return replace(self, messages=[map_arguments(message, _json_object) for message in self.messages])


def map_arguments(message: Message, change: Any) -> Message:
    """Return a message with `change(arguments)` in each of its tool calls."""

    def changed(call: Any) -> Any:
        inner = call.get("function")
        if isinstance(inner, Mapping):
            return {**call, "function": {**inner, "arguments": change(inner.get("arguments", {}))}}
        return {**call, "arguments": change(call.get("arguments", {}))}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if calls else message


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _json_object(arguments: Any) -> Any:
    return parse_json(arguments) if isinstance(arguments, str) else arguments


def read_conversation(row: Any, template: str) -> Conversation:
    """Check a row of `messages`. Raises ContentError, whose fact continues "a row"."""
    check_row(row, "messages", EXAMPLE)
    messages, weights = _messages(row["messages"], "messages", template)
    return Conversation(messages, weights, _tools(row, template), _kwargs(row, template))


def read_prompt(row: Any, template: str) -> tuple[str, str] | Conversation:
    """Check a row of `prompt` and `completion`: two texts, or two lists of messages. Only the latter's are
    trained. Raises ContentError."""
    check_row(row, "prompt", PROMPT_EXAMPLE)
    check_row(row, "completion", PROMPT_EXAMPLE)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ContentError(
                "with an empty answer",
                given="completion = ''",
                expected="text",
                hint='data.errors = "skip" leaves such rows out',
            )
        return prompt, completion
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ContentError(
            "whose prompt and completion differ in kind",
            given=f"a {type(prompt).__name__} and a {type(completion).__name__}",
            expected="two texts, or two lists of messages",
            hint=PROMPT_EXAMPLE,
        )
    first, _ = _messages(prompt, "prompt", template)
    messages, weights = _messages(completion, "completion", template)
    return Conversation(
        [*first, *messages], [0.0] * len(first) + weights, _tools(row, template), _kwargs(row, template)
    )


def check_row(row: Any, key: str, example: str) -> None:
    """Raise ContentError for a row that is no object, has no such key, or has media."""
    if not isinstance(row, Mapping):
        raise ContentError(
            "that is not an object", given=f"a {type(row).__name__}", expected="an object", hint=example
        )
    if row.get(key) is None:
        near = nearest(key, map(str, row))
        of_rows = "user, assistant and content for the names human, gpt and value, under 'messages'"
        hint = of_rows if "conversations" in row else ""
        if key == "messages" and "prompt" in row:
            hint = 'data.kind = "prompt"'
        elif key != "messages" and "messages" in row:
            hint = 'data.kind = "chat"'
        raise ContentError(
            f"without {key!r}",
            given=", ".join(map(repr, row)) or "no keys",
            expected=example,
            hint=hint or (f"{key!r} for {near!r}" if near else example),
        )
    for name in MEDIA:
        if row.get(name):
            raise _media(name)


def _media(name: str) -> ContentError:
    return ContentError(
        f"with {name}",
        given=repr(name),
        expected="text: models of images and audio are not supported",
        hint='rows of text alone; data.errors = "skip" leaves others out',
    )


def _messages(value: Any, key: str, template: str) -> tuple[list[Message], list[float]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        given = f"a {type(value).__name__}" if value else "no messages"
        raise ContentError(
            f"whose {key!r} is not a list", given=given, expected="a list of messages", hint=EXAMPLE
        )
    pairs = [_message(message, f"{key}[{number}]", template) for number, message in enumerate(value)]
    return [message for message, _ in pairs], [weight for _, weight in pairs]


def _message(message: Any, place: str, template: str) -> tuple[Message, float]:
    def bad(problem: str, given: object, expected: str, hint: str) -> ContentError:
        return ContentError(f"with {problem}", given=f"{place}: {given}", expected=expected, hint=hint)

    if not isinstance(message, Mapping):
        raise bad("a message that is not an object", f"a {type(message).__name__}", "an object", EXAMPLE)
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        given = ", ".join(map(repr, message)) if role is None else f"role = {shown(role)}"
        hint = "role and content for the names from and value" if "from" in message else EXAMPLE
        raise bad("a message without a role", given, ", ".join(ROLES), hint)
    if role not in ROLES and not _is_word(role, template):
        hint = ALIASES.get(role.lower()) or unknown_key_hint(role, ROLES)
        raise bad("an unknown role", f"role = {role!r}", ", ".join(ROLES), f'"role": "{hint}"')
    for name in message:
        if name in MEDIA:
            raise _media(name)
        if name not in KEYS and not _is_word(name, template):
            expected = ", ".join(KEYS)
            raise bad(
                "an unknown key", repr(name), expected, f"{unknown_key_hint(name, KEYS)}, or no such key"
            )
    weight = message.pop("weight", 1 if role == "assistant" else 0)
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise bad("an invalid weight", shown(weight), "a number from 0 on", '"weight": 0 for no training')
    if weight and role != "assistant":
        raise bad(
            f"a weight for a {role} message", weight, "weights of assistant messages", "no weight there"
        )
    if "content" in message:
        message["content"] = _text(message["content"], place)
    elif message.get("tool_calls"):
        message["content"] = ""  # templates read it
    else:
        near = nearest("content", [name for name in message if name != "role"])
        raise bad("a message without content", ", ".join(map(repr, message)), "content", near or EXAMPLE)
    if message.get("tool_calls"):
        _check_calls(message, place)
    elif weight and not message["content"].strip() and not any(message.get(name) for name in REASONING):
        hint = 'no such row, or "weight": 0 in the message'
        raise bad("an empty answer", "an assistant's message without text", "text or tool calls", hint)
    return message, float(weight)


def _is_word(name: str, template: str) -> bool:
    """Check that a name is in a template, also after an escaped line break, but not as a part of a word."""
    return re.search(rf"(?:(?<!\w)|(?<=\\[nrt])){re.escape(name)}(?!\w)", template, re.ASCII) is not None


def _text(content: Any, place: str) -> str:
    """Text of a content: a text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        found = part
        if isinstance(part, Mapping):
            kind = next(
                (name for name in MEDIA if part.get(name) or part.get("type") in (name, f"{name}_url")), None
            )
            if kind is not None:
                raise _media(kind)
            found = part.get("text")
        if part is content or not isinstance(found, str):
            raise ContentError(
                "whose content is not text",
                given=f"{place}: a {type(part).__name__}, {shown(part)}",
                expected="a text, or a list of parts of text",
                hint='"content": "..."',
            )
        texts.append(found)
    return "".join(texts)


def _check_calls(message: Message, place: str) -> None:
    calls = message["tool_calls"]
    try:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(f"tool_calls = {shown(calls)}")
        map_arguments(message, _json_object)
    except ValueError as error:
        raise ContentError(
            "with an invalid tool call",
            given=f"{place}: {error}",
            expected="a list of objects, whose arguments are an object, or JSON",
            hint='[{"type": "function", "function": {"name": "...", "arguments": {}}}]',
        ) from error


def _tools(row: Mapping[str, Any], template: str) -> list[Any] | None:
    """The row's tools: a list of objects, or JSON of one; its items may be JSON, too."""
    tools = _parsed(row, "tools")
    if not tools:
        return None
    tools = (
        [_parsed({"tools": tool}, "tools") for tool in tools] if isinstance(tools, list | tuple) else tools
    )
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise _invalid("tools", tools, "a list of objects")
    if not _is_word("tools", template):
        raise ContentError(
            "with tools that the chat template leaves out",
            given=f"{counted(len(tools), 'tool')}; the template does not name them",
            expected="a template that renders tools",
            hint="a row with no 'tools', or another template",
        )
    return tools


def _kwargs(row: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    kwargs = _parsed(row, "chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping) or any(name in RESERVED for name in kwargs):
        raise _invalid("chat_template_kwargs", kwargs, f"an object, without {', '.join(RESERVED)}")
    if unknown := [name for name in kwargs if not _is_word(name, template)]:
        raise ContentError(
            "with chat_template_kwargs that the template does not read",
            given=", ".join(map(repr, unknown)),
            expected="names that are in the template",
            hint="no such name",
        )
    return kwargs


def _parsed(row: Mapping[str, Any], key: str) -> Any:
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise _invalid(key, f"{shown(value)}: {error}", "JSON") from error


def _invalid(key: str, value: object, expected: str) -> ContentError:
    given = value if isinstance(value, str) else shown(value)
    return ContentError(f"with invalid {key}", given=given, expected=expected, hint=f"a row without {key!r}")
