"""Recipe sections `[data]` and `[tokenizer]`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from plait.errors import ConfigError
from plait.fileio import check_path

FilePath = Annotated[Path, AfterValidator(check_path)]
Source = Annotated[str, AfterValidator(check_path)]
MAX_COUNT = 2**53  # of anything in a recipe: numbers that JSON, floats and tensors have exactly

INDEX = "index.json"  # in a directory of tokens, once they are complete
MAX_WORKERS = 1024
END_OF_DOCUMENT = "<|end|>"
BYTES_AND_END = 257  # a byte-level vocabulary: all bytes, and the end of a document


class TokenizerConfig(BaseModel):
    """An existing tokenizer (`path`) or the size of one to train (`vocab_size`).

    `path` is a Hugging Face tokenizer's directory, or a tokenizer.json. `end_of_document` is the token that
    ends every document; default: `<|end|>` in a trained tokenizer, the eos token of an existing one.
    `chat_template`: a Jinja file, instead of the tokenizer's own template.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: FilePath | None = None
    vocab_size: int | None = Field(default=None, ge=BYTES_AND_END, le=2**31)
    end_of_document: str | None = Field(default=None, min_length=1)
    chat_template: FilePath | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.path is None) == (self.vocab_size is None):
            raise ValueError(
                "a tokenizer needs exactly one of path (an existing one) and vocab_size (to train one)"
            )
        return self


class DataConfig(BaseModel):
    """Sources of text, the directory of tokens, and the sampling of sequences.

    `kind`: the rows are `text`, `chat` (under `messages`), `prompt` (under `prompt` and `completion`) or
    `preference` (under `chosen` and `rejected`, with `prompt` or a common beginning): pairs; or `answer`
    (`prompt`, `completion` and `label`): good and bad ones.
    `train_on`: all assistant messages, or the `last` of each row. `train_empty_thinking`: train also the
    empty think blocks that templates write for messages without reasoning.

    `sources`: paths or globs of text files (one document each), of .jsonl or .jsonl.gz (one per line, under
    `text_key`), `hf:NAME_OR_DIR[?config=..&split=..]`, `python-stdlib`, or `python-docs`, its docstrings.
    `weights`: of each source, in samples; None: as many as it has. `samples`: `windows` of `sequence`
    tokens each, across documents; `packed`, the same with documents separated; `bins`, rows of `sequence`
    tokens that complete documents fill; or `documents`, padded to a multiple of `pad_to_multiple_of`;
    `group_by_length` batches are sorted by length together (0: none). `long_documents`: what bins and
    documents do with documents of more than `sequence` tokens. `tokens_per_micro_batch`: as many documents in
    a micro-batch as fit, with padding; run.batch is then the number of micro-batches.
    `errors`: `raise` at files and rows that are not text, or `skip` them.
    `validation` is a fraction of the documents. `workers` load batches; `build_workers` tokenize (0: this
    process; None: one per core if the corpus is large enough). `verify` hashes the token files at start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: FilePath
    sources: list[Source] = Field(min_length=1)
    kind: Literal["text", "chat", "prompt", "preference", "answer"] = "text"
    train_on: Literal["all", "last"] = "all"
    train_empty_thinking: bool = False
    text_key: str = "text"
    errors: Literal["raise", "skip"] = "raise"
    sequence: int = Field(ge=2, le=MAX_COUNT)
    samples: Literal["windows", "packed", "documents", "bins"] = "windows"
    weights: list[Annotated[float, Field(gt=0, le=MAX_COUNT, allow_inf_nan=False)]] | None = None
    long_documents: Literal["truncate", "split"] = "truncate"
    tokens_per_micro_batch: int | None = Field(default=None, ge=2, le=MAX_COUNT)
    pad_to_multiple_of: int = Field(default=1, ge=1, le=MAX_COUNT)
    group_by_length: int = Field(default=0, ge=0, le=MAX_COUNT)
    order: Literal["random", "sequential"] = "random"
    validation: float = Field(default=0.02, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    workers: int = Field(default=1, ge=0, le=MAX_WORKERS)
    build_workers: int | None = Field(default=None, ge=0, le=MAX_WORKERS)
    verify: bool = True


_OF_KINDS = {  # keys of [data]: the samples that use them
    "pad_to_multiple_of": ("documents",),
    "group_by_length": ("documents",),
    "tokens_per_micro_batch": ("documents",),
    "long_documents": ("documents", "bins"),
}


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for keys that contradict each other, or have no effect."""
    budget = data.tokens_per_micro_batch
    for key, kinds in _OF_KINDS.items():
        value = getattr(data, key)
        if data.samples not in kinds and value != DataConfig.model_fields[key].default:
            raise ConfigError(
                f"data.{key} has no effect on samples that all have data.sequence tokens",
                given=f"data.{key} = {value}, data.samples = {data.samples!r}",
                expected="samples of different lengths",
                hint=f"data.samples = {' or '.join(map(repr, kinds))}",
            )
    if budget is not None and budget < data.sequence:
        raise ConfigError(
            "the longest document does not fit into a micro-batch",
            given=f"data.tokens_per_micro_batch = {budget}, data.sequence = {data.sequence}",
            expected="tokens of a micro-batch for at least one document of data.sequence tokens",
            hint=f"--set data.tokens_per_micro_batch={data.sequence}",
        )
    if data.weights is not None and len(data.weights) != len(data.sources):
        raise ConfigError(
            "each source needs a weight",
            given=f"{len(data.weights)} weights for {len(data.sources)} sources",
            expected="data.weights as long as data.sources",
            hint="--set data.weights= removes them: sources then count by their size",
        )
    if data.kind != "text" and data.samples in ("windows", "packed"):
        raise ConfigError(
            "samples that begin and end anywhere would train on all tokens of chats",
            given=f"data.kind = {data.kind!r}, data.samples = {data.samples!r}",
            expected="samples of complete documents",
            hint="--set data.samples=bins, or documents",
        )
    split = data.long_documents == "split"
    if data.kind in ("preference", "answer") and (data.samples != "documents" or budget is not None or split):
        raise ConfigError(
            "pairs and answers are samples of documents, with both rows in one micro-batch",
            given=f"data.samples = {data.samples!r}"
            + (f", data.tokens_per_micro_batch = {budget}" if budget else "")
            + (", data.long_documents = 'split'" if split else ""),
            expected="padded documents, of which long ones are truncated",
            hint="--set data.samples=documents, without tokens_per_micro_batch and long_documents",
        )
    if data.kind == "text" and (data.train_on != "all" or data.train_empty_thinking):
        raise ConfigError(
            "train_on and train_empty_thinking have no effect on text",
            given="data.kind = 'text'",
            expected="rows of messages or of prompts",
            hint="--set data.kind=chat",
        )
