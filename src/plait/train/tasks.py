"""Tasks of published data sets: multiple choice and last words by log-likelihood, and generated answers.

[Note: prompts]
Rows are those of the data sets on the Hugging Face Hub. Prompts, choices and scores are those of
lm-evaluation-harness 0.4 (tasks arc_easy, hellaswag, mmlu, piqa, winogrande, lambada_openai, gsm8k). Every
choice follows one space. Examples that are shown before the question, "shots", are the first rows of another
file with their answers, in MMLU of the same subject, and a blank line after each. The question itself is not
among them, also if it is in both files.

[Note: encoded pairs]
A context and a continuation are encoded as one text, and divided where the context's own tokens end. Spaces
at the context's end are the continuation's. An empty context is the tokenizer's bos token, or eos. The text
begins as the tokenizer begins a text. What does not fit into the model is left out at the beginning.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from plait.comm import all_reduce
from plait.data.readers import read_samples
from plait.data.sources import absolute_source
from plait.data.tokenizer import read_tokenizer
from plait.engine.engine import Engine
from plait.engine.scoring import Row, RowScore, score_rows
from plait.errors import ConfigError, ContentError, DataError, shown, unknown_key_hint
from plait.plan.sampling import Sampling
from plait.tables import counted
from plait.train.metrics import Metrics, perplexity
from plait.train.sections import EvalConfig

Shown = Callable[[Sequence[Any]], Iterable[Any]]
_NEW_TOKENS, _NEXT = 256, "Question:"  # of an answer, and what ends it
_BATCH = 8


@dataclass(frozen=True)
class Example:
    """A question: (context, continuation) of each choice, and the index of the right one. With one choice it
    is answered if greedy decoding would write it; with a `number`, if the text that greedy decoding writes
    has this number. Shots are of the same `group`, before which is its `description`."""

    choices: tuple[tuple[str, str], ...]
    answer: int = 0
    number: str | None = None
    group: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer {self.answer + 1} of {len(self.choices)} choices")

    @property
    def solved(self) -> str:
        return "".join(self.choices[self.answer])


def _choice(context: str, choices: Sequence[str], answer: int, **of_group: str) -> Example:
    return Example(tuple((context, f" {choice}") for choice in choices), answer, **of_group)


def _generic(row: Mapping[str, Any]) -> Example:
    answer, choices = row["answer"], [str(choice) for choice in row["choices"]]
    return _choice(row["context"], choices, answer if isinstance(answer, int) else choices.index(answer))


def _arc(row: Mapping[str, Any]) -> Example:
    choices = row["choices"]
    answer = choices["label"].index(row["answerKey"])
    return _choice(f"Question: {row['question']}\nAnswer:", choices["text"], answer)


def _hellaswag(row: Mapping[str, Any]) -> Example:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _choice(_cleaned(context), [_cleaned(ending) for ending in row["endings"]], int(row["label"]))


def _cleaned(text: str) -> str:
    """Without the marks of WikiHow's pages."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _mmlu(row: Mapping[str, Any]) -> Example:
    marks, subject = "ABCD", row.get("subject", "").replace("_", " ")
    choices = "".join(f"{mark}. {text}\n" for mark, text in zip(marks, row["choices"], strict=True))
    about = f" about {subject}" if subject else ""
    answer = row["answer"] if isinstance(row["answer"], int) else marks.index(row["answer"])
    return _choice(
        f"{row['question'].strip()}\n{choices}Answer:",
        marks,
        answer,
        group=subject,
        description=f"The following are multiple choice questions (with answers){about}.\n\n",
    )


def _piqa(row: Mapping[str, Any]) -> Example:
    return _choice(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _winogrande(row: Mapping[str, Any]) -> Example:
    before, _, after = row["sentence"].partition("_")
    options = [row["option1"], row["option2"]]
    return Example(
        tuple((before + option, f" {after.strip()}") for option in options), int(row["answer"]) - 1
    )


def _lambada(row: Mapping[str, Any]) -> Example:
    before, _, word = row["text"].rpartition(" ")
    return Example(((before, f" {word}"),))


def _gsm8k(row: Mapping[str, Any]) -> Example:
    answer = row["answer"]
    pair = f"Question: {row['question']}\nAnswer:", f" {answer}"
    return Example((pair,), number=_plain_number(answer.rpartition("#### ")[2]))


def _plain_number(text: str) -> str:
    return re.sub(r"[,$]", "", text).removesuffix(".").strip()


FORMATS: dict[str, tuple[Callable[[Mapping[str, Any]], Example], str]] = {
    "choice": (_generic, "context, choices, answer (its index from 0, or its text)"),
    "arc": (_arc, "question, choices: {text, label}, answerKey"),
    "hellaswag": (_hellaswag, "activity_label, ctx_a, ctx_b, endings, label"),
    "mmlu": (_mmlu, "question, choices (four), answer"),
    "piqa": (_piqa, "goal, sol1, sol2, label"),
    "winogrande": (_winogrande, "sentence (with _), option1, option2, answer"),
    "lambada": (_lambada, "text"),
    "gsm8k": (_gsm8k, "question, answer (which ends in #### and a number)"),
}


@dataclass(frozen=True)
class Task:
    """Rows of a data set. `shots`: where examples to show are from."""

    form: str
    source: str
    shots: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Parse FORMAT=FILE or FORMAT=FILE,SHOTS_FILE. Raises ConfigError."""
        form, _, files = text.partition("=")
        source, comma, shots = files.partition(",")
        if form in FORMATS and source and bool(comma) == bool(shots):
            return cls(form, source, shots or None)
        raise ConfigError(
            "a task is a format and a file",
            given=text,
            expected="FORMAT=FILE.jsonl, or FORMAT=FILE.jsonl,SHOTS.jsonl, FORMAT " + ", ".join(FORMATS),
            hint=f"choice={text}" if not files else f"{unknown_key_hint(form, FORMATS)}={files}",
        )

    def __str__(self) -> str:
        return f"{self.form}={self.source}" + (f",{self.shots}" if self.shots else "")

    def absolute(self) -> "Task":
        """The task with absolute paths of its files."""
        shots = None if self.shots is None else absolute_source(self.shots)
        return replace(self, source=absolute_source(self.source), shots=shots)

    @property
    def name(self) -> str:
        return f"{self.form}/{Path(self.source).name.partition('.')[0]}"

    def examples(self, num_shots: int | None = None) -> list[Example]:
        """The examples, each after all others that the file of shots has, or after the first `num_shots`; an
        example is no shot of its own. Raises DataError, and ConfigError without enough shots."""
        found = self._read(self.source)
        if num_shots and self.shots is None:
            raise _too_few(self, num_shots, 0)
        others = self._read(self.shots) if self.shots is not None else []
        return [self._after_shots(example, others, num_shots) for example in found]

    def _read(self, source: str) -> list[Example]:
        make, keys = FORMATS[self.form]

        def encode(row: Any) -> Example:
            try:
                return make(row)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                raise ContentError(
                    f"that is none of the task {self.form!r}",
                    given=f"{type(error).__name__}: {error}; {shown(row)}",
                    expected=f"an object with {keys}",
                    hint="another format, or choice: " + FORMATS["choice"][1],
                ) from error

        found = [*cast(Any, read_samples(source, cast(Any, encode), skip=False))]
        if not found:
            raise DataError("the task has no rows", given=source, expected=f"rows with {keys}", hint="--task")
        return found

    def _after_shots(self, example: Example, others: Sequence[Example], num_shots: int | None) -> Example:
        same = [
            other.solved + "\n\n" for other in others if other.group == example.group and other != example
        ]
        if num_shots is not None and len(same) < num_shots:
            raise _too_few(self, num_shots, len(same))
        before = example.description + "".join(same[:num_shots])
        choices = tuple((before + context, continuation) for context, continuation in example.choices)
        return Example(choices, example.answer, example.number)


def _too_few(task: Task, wanted: int, there: int) -> ConfigError:
    return ConfigError(
        "the task has too few examples to show before its questions",
        given=f"--shots {wanted}, {task.shots or 'no second file'} with {there}",
        expected=f"a file with {wanted} rows besides each question, in MMLU of its subject",
        hint=f"--task {task.form}={task.source},SHOTS.jsonl",
    )


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> Row:
    """Return the tokens of both. See [Note: encoded pairs]."""
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    before = context.rstrip()
    text = context[len(before) :] + continuation
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not before:
        return Row((int(start), *tokenizer(text, **plain)["input_ids"]), first=1)
    begin = [start] if tokenizer("", verbose=False)["input_ids"][:1] == [start] else []
    first = len(begin) + len(tokenizer(before, **plain)["input_ids"])
    return Row((*begin, *tokenizer(before + text, **plain)["input_ids"]), first)


@dataclass(frozen=True)
class EncodedTask:
    """A task's examples, and a row for each of their choices, in order; of generated answers, of contexts."""

    name: str
    examples: Sequence[Example]
    encoded: Sequence[Row]
    context: int = 0  # set by `fitting`

    @property
    def longest(self) -> int:
        """Tokens of the longest row; of generated answers, of a prompt and its answer."""
        longest = max(len(row.ids) for row in self.encoded)
        return longest if self.examples[0].number is None else max(longest, _NEW_TOKENS) + _NEW_TOKENS

    def fitting(self, context: int) -> "EncodedTask":
        """The task with rows that fit the model: of a row's last token, it reads nothing. Raises DataError if
        something predicted would be left out, or nothing is predicted."""
        if self.examples[0].number is not None:
            return replace(self, context=context)
        rows = []
        for row in self.encoded:
            surplus = max(0, row.width - context)
            if surplus >= row.first or row.first >= len(row.ids):
                raise DataError(
                    f"a choice in {self.name} cannot be predicted",
                    given=f"{counted(len(row.ids) - row.first, 'token')}",
                    expected=f"1 to {context} tokens",
                    hint="--context, a model with more positions, or a file without this row",
                )
            rows.append(Row(row.ids[surplus:], row.first - surplus))
        return replace(self, encoded=rows)

    def scores(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, batch: int, shown: Shown = iter
    ) -> dict[str, float]:
        """The scores of the task, on every rank. Every rank makes the call. See `score_rows`."""
        if self.examples[0].number is None:
            return self.of_choices(score_rows(engine, self.encoded, batch=batch, shown=shown))
        ranks, right = engine.data_ranks, torch.zeros(2, dtype=torch.float64, device=engine.device)
        sampling = Sampling(min(_NEW_TOKENS, self.context // 2), stop_strings=(_NEXT,))
        longest = self.context - sampling.max_new_tokens
        for start in shown(range(0, len(self.examples), batch * ranks)):
            call = range(start, min(len(self.examples), start + batch * ranks))
            own = call[engine.data_rank :: ranks]
            prompts = [self.encoded[index].ids[-longest:] for index in own]
            for index, found in zip(
                own, engine.generate(prompts, sampling, tokenizer=tokenizer), strict=True
            ):
                text = str(tokenizer.decode(found.ids, skip_special_tokens=True))
                right += right.new_tensor([n == self.examples[index].number for n in numbers_in(text)])
        all_reduce(right, engine.data_group)
        exact, flexible = (right / len(self.examples)).tolist()
        return {"examples": len(self.examples), "exact_match": exact, "flexible_match": flexible}

    def of_choices(self, found: Sequence[RowScore]) -> dict[str, float]:
        """Return `examples`, `acc` and its standard error `acc_stderr`; of several choices `acc_norm`, where
        sums are divided by the number of characters of the choice; of one the `perplexity`."""
        rows, right, normed, n = iter(found), 0, 0, len(self.examples)
        for example in self.examples:
            of_choices = [next(rows) for _ in example.choices]
            log_probs = [score.log_prob for score in of_choices]
            lengths = [max(1, len(continuation) - 1) for _, continuation in example.choices]
            is_one = len(of_choices) == 1
            right += of_choices[0].is_greedy if is_one else _best(log_probs) == example.answer
            normed += (
                _best([x / length for x, length in zip(log_probs, lengths, strict=True)]) == example.answer
            )
        acc = right / n
        values = {"examples": n, "acc": acc, "acc_stderr": math.sqrt(acc * (1 - acc) / max(1, n - 1))}
        if len(found) == n:
            return {**values, "perplexity": perplexity(-math.fsum(score.log_prob for score in found) / n)}
        return {**values, "acc_norm": normed / n}


def numbers_in(text: str) -> tuple[str | None, str | None]:
    """Return the number after #### and the last one, of a generated text up to the next question."""
    text = text.partition(_NEXT)[0]
    marked = re.findall(r"#### (-?[0-9.,]+)", text)
    last = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return (_plain_number(marked[0]) if marked else None, _plain_number(last[-1]) if last else None)


def encode_tasks(
    texts: Sequence[str], shots: int | None, tokenizer: PreTrainedTokenizerBase
) -> list[EncodedTask]:
    """Read and encode tasks: see `Task`. Raises ConfigError, DataError."""
    tasks = [Task.parse(text) for text in texts]
    for name, times in Counter(task.name for task in tasks).items():
        if times > 1:
            raise ConfigError(
                "two tasks have one name",
                given=name,
                expected="another file name for each task of one format",
                hint="one of them, or a copy of a file",
            )
    found = []
    for task in tasks:
        examples = task.examples(shots)
        rows = [
            encode_pair(tokenizer, context, continuation if example.number is None else "")
            for example in examples
            for context, continuation in example.choices
        ]
        found.append(EncodedTask(task.name, examples, rows))
    return found


def tasks_of_run(config: EvalConfig, tokenizer: PreTrainedTokenizerBase, model: Any) -> list[EncodedTask]:
    """Read and encode the tasks of a recipe. Raises ConfigError, DataError."""
    tasks = encode_tasks(config.tasks, config.shots, tokenizer)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return [task.fitting(positions or task.longest) for task in tasks]


class RunTasks:
    """The tasks of a run's recipe, which its engine is scored on."""

    def __init__(self, config: EvalConfig, tokenizer: Path, engine: Engine) -> None:
        self._engine, self._tokenizer = engine, read_tokenizer(tokenizer)
        self._tasks = tasks_of_run(config, self._tokenizer, engine.model)

    def record(self, metrics: Metrics, step: int, beat: Callable[..., None]) -> None:
        """Score the tasks and write the scores, after `step` steps. Every rank makes the call. `beat`: called
        before each call of the engine, `slow=True` before a task's first."""

        def beating(calls: Sequence[Any]) -> Iterator[Any]:
            for number, call in enumerate(calls):
                beat(slow=number == 0)
                yield call

        given = self._engine, self._tokenizer, _BATCH, beating
        found = {task.name: task.scores(*given) for task in self._tasks}
        if found:
            metrics.tasks(step, found, {name: task_text(scores) for name, scores in found.items()})


def task_text(scores: Mapping[str, float]) -> str:
    """Return the scores as a line."""
    n = counted(int(scores["examples"]), "example")
    if "exact_match" in scores:
        return (
            f"{scores['exact_match']:.2%} of {n} with ####, {scores['flexible_match']:.2%} by the last number"
        )
    normed = f", {scores['acc_norm']:.2%} by characters" if "acc_norm" in scores else ""
    of_one = f", perplexity {scores['perplexity']:,.4f}" if "perplexity" in scores else ""
    return f"{scores['acc']:.2%} (+- {scores['acc_stderr']:.2%}) of {n}{normed}{of_one}"


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
