"""Recipe sections `[data]` and `[tokenizer]`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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

    `kind`: the rows are `text`, `chat` (under `messages`) or `prompt` (under `prompt` and `completion`).
    `train_on`: all assistant messages, or the `last` of each row. `train_empty_thinking`: train also the
    empty think blocks that templates write for messages without reasoning.

    `sources`: paths or globs of text files (one document each), of .jsonl or .jsonl.gz (one per line, under
    `text_key`), `hf:NAME_OR_DIR[?config=..&split=..]`, or `python-stdlib`. `samples`: `windows` of `sequence`
    tokens each, across documents; `packed`, the same with documents separated; or `documents`, each truncated
    to `sequence` tokens and padded to a multiple of `pad_to_multiple_of`; `group_by_length` batches are
    sorted by length together (0: none).
    `errors`: `raise` at files and rows that are not text, or `skip` them.
    `validation` is a fraction of the documents. `workers` load batches; `build_workers` tokenize (0: this
    process; None: one per core if the corpus is large enough). `verify` hashes the token files at start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: FilePath
    sources: list[Source] = Field(min_length=1)
    kind: Literal["text", "chat", "prompt"] = "text"
    train_on: Literal["all", "last"] = "all"
    train_empty_thinking: bool = False
    text_key: str = "text"
    errors: Literal["raise", "skip"] = "raise"
    sequence: int = Field(ge=2, le=MAX_COUNT)
    samples: Literal["windows", "packed", "documents"] = "windows"
    pad_to_multiple_of: int = Field(default=1, ge=1, le=MAX_COUNT)
    group_by_length: int = Field(default=0, ge=0, le=MAX_COUNT)
    order: Literal["random", "sequential"] = "random"
    validation: float = Field(default=0.02, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    workers: int = Field(default=1, ge=0, le=MAX_WORKERS)
    build_workers: int | None = Field(default=None, ge=0, le=MAX_WORKERS)
    verify: bool = True

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        if self.kind != "text" and self.samples in ("windows", "packed"):
            raise ValueError(
                f"samples = {self.samples!r} cuts the stream of tokens anywhere, and would train on all of it: "
                f"kind = {self.kind!r} needs samples that are complete documents"
            )
        if self.kind == "text" and (self.train_on != "all" or self.train_empty_thinking):
            raise ValueError("train_on and train_empty_thinking have no effect on kind = 'text'")
        return self
