"""Tasks of published data sets: multiple choice and last words, by log-likelihood.

[Note: prompts]
Rows are those of the data sets on the Hugging Face Hub. Prompts, choices and scores are those of
lm-evaluation-harness 0.4 (tasks arc_easy, hellaswag, mmlu, piqa, winogrande, lambada_openai). Every choice
follows one space. Examples that are shown before the question, "shots", are the first rows of another file
with their answers, in MMLU of the same subject, and a blank line after each.

[Note: encoded pairs]
A context and a continuation are encoded as one text, and divided where the context's own tokens end. Spaces
at the context's end are the continuation's. An empty context is the tokenizer's bos token, or eos. The text
begins as the tokenizer begins a text. What does not fit into the model is left out at the beginning.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from plait.data.readers import read_samples
from plait.engine.scoring import Row, RowScore
from plait.errors import ConfigError, ContentError, DataError, shown, unknown_key_hint
from plait.tables import counted
from plait.train.metrics import perplexity


@dataclass(frozen=True)
class Example:
    """A question: (context, continuation) of each choice, and the index of the right one. With one choice it
    is answered if greedy decoding would write it. Shots are of the same `group`, before which is its
    `description`."""

    choices: tuple[tuple[str, str], ...]
    answer: int = 0
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


FORMATS: dict[str, tuple[Callable[[Mapping[str, Any]], Example], str]] = {
    "choice": (_generic, "context, choices, answer (its index from 0, or its text)"),
    "arc": (_arc, "question, choices: {text, label}, answerKey"),
    "hellaswag": (_hellaswag, "activity_label, ctx_a, ctx_b, endings, label"),
    "mmlu": (_mmlu, "question, choices (four), answer"),
    "piqa": (_piqa, "goal, sol1, sol2, label"),
    "winogrande": (_winogrande, "sentence (with _), option1, option2, answer"),
    "lambada": (_lambada, "text"),
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

    @property
    def name(self) -> str:
        return f"{self.form}/{Path(self.source).name.partition('.')[0]}"

    def examples(self, num_shots: int = 0) -> list[Example]:
        """The examples, after as many others as the file of shots has, or `num_shots`, the first ones. Raises
        DataError, and ConfigError without enough shots."""
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

    def _after_shots(self, example: Example, others: Sequence[Example], num_shots: int) -> Example:
        same = [other.solved + "\n\n" for other in others if other.group == example.group]
        if len(same) < num_shots:
            raise _too_few(self, num_shots, len(same))
        before = example.description + "".join(same[: num_shots or None])
        choices = tuple((before + context, continuation) for context, continuation in example.choices)
        return Example(choices, example.answer)


def _too_few(task: Task, wanted: int, there: int) -> ConfigError:
    return ConfigError(
        "the task has too few examples to show before its questions",
        given=f"--shots {wanted}, {task.shots or 'no second file'} with {there}",
        expected=f"a file with {wanted} rows, in MMLU of each subject",
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
    """A task's examples, and a row for each of their choices, in order."""

    name: str
    examples: Sequence[Example]
    encoded: Sequence[Row]

    @property
    def longest(self) -> int:
        return max(len(row.ids) for row in self.encoded)

    def rows(self, context: int) -> list[Row]:
        """Rows that fit the model: of a row's last token, it reads nothing. Raises DataError if something
        predicted would be left out, or nothing is predicted."""
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
        return rows

    def scores(self, found: Sequence[RowScore]) -> dict[str, float]:
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
        examples = task.examples(shots or 0)
        rows = [encode_pair(tokenizer, *choice) for example in examples for choice in example.choices]
        found.append(EncodedTask(task.name, examples, rows))
    return found


def task_text(scores: Mapping[str, float]) -> str:
    """Return the scores as a line."""
    normed = f", {scores['acc_norm']:.2%} by characters" if "acc_norm" in scores else ""
    of_one = f", perplexity {scores['perplexity']:,.4f}" if "perplexity" in scores else ""
    n = counted(int(scores["examples"]), "example")
    return f"{scores['acc']:.2%} (+- {scores['acc_stderr']:.2%}) of {n}{normed}{of_one}"


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
