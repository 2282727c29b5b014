"""Generate text with the files of a model: continue prompts, or chat."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from plait.comm import World, broadcast_text, gather_texts
from plait.data.conversations import read_conversation
from plait.data.readers import read_samples
from plait.data.template import ChatTemplate
from plait.data.tokenizer import read_tokenizer
from plait.engine.engine import Engine
from plait.engine.generation import Conversation
from plait.errors import ContentError, DataError, PlaitError
from plait.models import pretrained_base
from plait.plan import Plan
from plait.plan.sampling import Sampling
from plait.train.model import check_prompt, prompt_ids
from plait.train.model_files import ModelFiles
from plait.train.run_dir import RunDir
from plait.train.sections import SampleConfig

_ROWS = '{"prompt": "..."}, or {"messages": [...]} and a tokenizer with a chat template'
_INCOMPLETE = "\ufffd"  # at the end of a text: bytes of a character to which the next token adds


@dataclass(frozen=True)
class GenerationRequest:
    """Arguments of `generate` and `chat`, as JSON values.

    model      a run directory (its newest checkpoint), a checkpoint, or a Hugging Face folder
    plan       without a precision: that of the run, or fp32
    prompt     the beginning of a text; of a chat, its system message
    prompts    a file of JSON lines, each with a `prompt`, or with `messages` of a chat
    batch      prompts that a data rank continues at a time
    sampling   fields of `Sampling`
    tokenizer  None: the model's own
    """

    model: str
    plan: str
    prompt: str = ""
    prompts: str | None = None
    batch: int = 8
    sampling: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    device: str = "auto"


@dataclass(frozen=True)
class Writer:
    """A model that writes text."""

    engine: Engine
    model: Any  # that of transformers
    tokenizer: PreTrainedTokenizerFast
    sampling: Sampling

    @classmethod
    def of(cls, request: GenerationRequest, world: World) -> "Writer":
        """Every rank makes the call. Raises a PlaitError."""
        found = ModelFiles.find(request.model, request.tokenizer)
        tokenizer = read_tokenizer(found.tokenizer)
        model, arguments = found.model()
        facts = {} if found.saved is None else found.saved.facts
        plan = request.plan
        if "precision" not in plan and "plan" in facts:
            plan += f" precision={Plan.parse(str(facts['plan'])).dtype}"
        engine = found.engine(model, arguments, plan, world)
        configs = [getattr(pretrained_base(model), key, None) for key in ("generation_config", "config")]
        named = [getattr(config, "eos_token_id", None) for config in configs]
        named += [(facts.get("generation") or {}).get("eos_token_id"), tokenizer.eos_token_id]
        stops = {
            int(each)
            for ids in named
            for each in (ids if isinstance(ids, list) else [ids])
            if each is not None
        }
        sampling = Sampling(**request.sampling, stop_tokens=tuple(stops))
        return cls(engine, model, tokenizer, sampling)

    @cached_property
    def template(self) -> ChatTemplate:
        """Raises DataError if the tokenizer has none."""
        return ChatTemplate(self.tokenizer, self.tokenizer.backend_tokenizer, train_empty_thinking=False)

    def ids(self, row: Any) -> list[int]:
        """The tokens of a row with a prompt, or with messages and what else the template takes, as rows that
        are trained. Raises DataError, or ContentError, whose fact continues "a row"."""
        row = row if isinstance(row, Mapping) else {}
        if isinstance(row.get("prompt"), str):
            return prompt_ids(self.tokenizer, row["prompt"])
        if "messages" not in row:
            given = ", ".join(map(repr, row)) or "no keys"
            raise ContentError("that has no prompt", given=given, expected=_ROWS, hint=_ROWS)
        text = self.template.prompt(read_conversation(row, self.template.source))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def generate(request: GenerationRequest, world: World) -> Iterator[dict[str, Any]]:
    """Yield the rows of the prompts, each with its `text` and `finish`, on every rank. The text of a prompt
    without messages begins with it. Every rank makes the call. Raises a PlaitError."""
    writer = Writer.of(request, world)
    if request.prompts is None:
        found = [({"prompt": request.prompt}, prompt_ids(writer.tokenizer, request.prompt))]
    else:
        found = _read(request.prompts, writer)
    rows, ids = [row for row, _ in found], [ids for _, ids in found]
    engine, group = writer.engine, writer.engine.data_group
    for start in range(0, len(rows), request.batch * engine.data_ranks):
        own = range(start + engine.data_rank * request.batch, len(rows))[: request.batch]
        texts = engine.generate(
            [ids[n] for n in own], writer.sampling, tokenizer=writer.tokenizer, start=start
        )
        results = []
        for n, each in zip(own, texts, strict=True):
            text = writer.decode([*ids[n], *each.ids] if "prompt" in rows[n] else each.ids)
            results.append({"text": text, "finish": each.finish})
        shares = gather_texts(json.dumps(results), group, world.device)
        of_all = [result for share in shares for result in json.loads(share)]
        yield from (row | result for row, result in zip(rows[start:], of_all, strict=False))


def sample_text(engine: Engine, run: RunDir, options: SampleConfig, seed: int) -> str:
    """Return the sample at the end of a run; "" without one, as under parameter servers, which do not
    generate. Every rank makes the call."""
    if engine.plan.num_servers or not options.tokens:
        return ""
    tokenizer = read_tokenizer(run.checked_tokenizer())
    ids, stops = prompt_ids(tokenizer, options.prompt), (tokenizer.eos_token_id,)
    sampling = Sampling(options.tokens, options.temperature, options.top_k, seed=seed, stop_tokens=stops)
    (found,) = engine.generate([ids], sampling)
    return str(tokenizer.decode([*ids, *found.ids], skip_special_tokens=True))


def _read(source: str, writer: Writer) -> list[tuple[dict[str, Any], list[int]]]:
    """Return the rows of a file of prompts, each with its tokens. Raises DataError."""
    config = cast(Any, pretrained_base(writer.model)).config.get_text_config(decoder=True)

    def encode(row: Any) -> tuple[dict[str, Any], list[int]]:
        ids = writer.ids(row)
        try:
            check_prompt(ids, config)
        except PlaitError as error:
            parts = {"given": error.given, "expected": error.expected, "hint": error.hint}
            raise ContentError(f"that the model cannot continue: {error.fact}", **parts) from error
        return row, ids

    found = [*cast(Any, read_samples(source, cast(Any, encode), skip=False))]
    if not found:
        raise DataError("there are no prompts", given=source, expected="JSON lines", hint=_ROWS)
    return found


def chat(
    request: GenerationRequest, world: World, read: Callable[[], str | None], show: Callable[[str], None]
) -> None:
    """Answer what `read` returns on rank 0, until None; there, `show` gets the parts of each answer, and an
    empty one at its end. Every rank makes the call. Raises a PlaitError."""
    writer = Writer.of(request, world)
    messages = list[dict[str, Any]]()
    if request.prompt:
        messages.append({"role": "system", "content": request.prompt})
    writer.ids({"messages": [*messages, {"role": "user", "content": "Hello"}]})  # raises without a template
    conversation = Conversation()
    while (said := _from_first(read, world)) is not None:
        messages.append({"role": "user", "content": said})
        prompts = [writer.ids({"messages": messages})] if writer.engine.data_rank == 0 else []
        ids, shown = list[int](), ""

        def add(new: list[tuple[int, int]], ids: list[int] = ids) -> None:
            nonlocal shown
            ids += [token for _, token in new]
            text = writer.decode(ids)
            if text != shown and not text.endswith(_INCOMPLETE):
                show(text[len(shown) :])
                shown = text

        turn = len(messages)  # each has its own draws
        options: dict[str, Any] = {
            "tokenizer": writer.tokenizer,
            "on_tokens": add,
            "conversation": conversation,
        }
        found = writer.engine.generate(prompts, writer.sampling, start=turn, **options)
        answer = "".join(writer.decode(each.ids) for each in found)
        answer = gather_texts(answer, writer.engine.data_group, world.device)[0]
        messages.append({"role": "assistant", "content": answer, "weight": 0})  # which may be empty
        if world.rank == 0:
            if rest := answer[len(shown) :]:
                show(rest)
            show("")


def _from_first(read: Callable[[], str | None], world: World) -> str | None:
    """Return on every rank what rank 0 reads."""
    text = json.dumps(read()) if world.rank == 0 else ""
    said: str | None = json.loads(broadcast_text(0, text, world.group, world.device))
    return said
