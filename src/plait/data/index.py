"""Layout of a directory of tokens, and index.json: contents, writing and reading.

tokenizer/                      for AutoTokenizer.from_pretrained
part-00000.train.bin            token ids, little-endian uint16 or uint32, documents concatenated,
part-00000.validation.bin       each with its end token; no file if a part has no such documents
index.json                      written last: without it the directory is an unfinished build
unfinished/                     records of finished parts, during a build
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait.data import tokenizer as tokenizers
from plait.data.config import INDEX, DataConfig, TokenizerConfig
from plait.errors import DataError, unreadable
from plait.fileio import json_hash, read_json
from plait.tables import counted

TOKENIZER = "tokenizer"
MAX_INDEX_BYTES = 1 << 28
MAX_UINT16_VOCAB = 1 << 16
MAX_WEIGHTS = 1 << 8  # of a part: a code is a byte
LENGTH_BYTES = 8

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WeightsFile(Strict):
    """The weights of a part's tokens, as codes: code c is `table[c]`, and 0 is weight 0, no target. Those of
    bad answers are negative."""

    table: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(max_length=MAX_WEIGHTS)
    sha256: Sha256


class LengthsFile(Strict):
    """The lengths of a part's documents."""

    documents: int = Field(ge=1, lt=2**48)
    sha256: Sha256


class CheckedFile(NamedTuple):
    """A file of a directory of tokens: its name, size and hash."""

    name: str
    num_bytes: int
    sha256: str


class PartFile(Strict):
    """One file of token ids. The name is a plain file name: an index cannot point out of its directory."""

    name: str = Field(pattern=r"^part-[0-9]{5,9}\.(train|validation)\.bin$")
    tokens: int = Field(ge=1, lt=2**48)
    sha256: Sha256
    weights: WeightsFile | None = None
    lengths: LengthsFile | None = None

    def files(self, item_bytes: int) -> list[CheckedFile]:
        """All files of the part, with `item_bytes` bytes for a token id."""
        found = [CheckedFile(self.name, self.tokens * item_bytes, self.sha256)]
        if self.weights is not None:
            found.append(CheckedFile(weights_name(self.name), self.tokens, self.weights.sha256))
        if self.lengths is not None:
            num_bytes = self.lengths.documents * LENGTH_BYTES
            found.append(CheckedFile(lengths_name(self.name), num_bytes, self.lengths.sha256))
        return found


def weights_name(part: str) -> str:
    return part.replace(".bin", ".weights.bin")


def lengths_name(part: str) -> str:
    return part.replace(".bin", ".lengths.bin")


class SourceStats(Strict):
    """Statistics of one source. `sha256` is over the hashes of its shards, in order. `skipped_files` and
    `skipped_rows` were not text."""

    name: str
    bytes: Count
    documents: Count
    tokens: Count
    sha256: Sha256
    skipped_files: Count = 0
    skipped_rows: Count = 0


class DatasetSpec(Strict):
    """The part of a recipe that determines the tokens."""

    sources: list[str]
    kind: Literal["text", "chat", "prompt", "preference", "answer"] = "text"
    train_on: Literal["all", "last"] = "all"
    train_empty_thinking: bool = False
    text_key: str
    errors: Literal["raise", "skip"] = "raise"
    validation: float
    seed: int
    tokenizer: dict[str, Any]

    @classmethod
    def from_config(cls, data: DataConfig, tokenizer: TokenizerConfig) -> Self:
        """Build the spec of a recipe. Raises DataError if its tokenizer is missing, or is to be trained on
        conversations."""
        if data.kind != "text" and tokenizer.path is None:
            raise DataError(
                f"{data.kind} data needs the tokenizer of the model that is tuned",
                given=f"tokenizer.vocab_size = {tokenizer.vocab_size}",
                expected="an existing tokenizer",
                hint="tokenizer.path = the model's directory",
            )
        return cls(
            sources=list(data.sources),
            kind=data.kind,
            train_on=data.train_on,
            train_empty_thinking=data.train_empty_thinking,
            text_key=data.text_key,
            errors=data.errors,
            validation=float(data.validation),
            seed=data.seed,
            tokenizer=tokenizers.tokenizer_spec(tokenizer, with_template=data.kind != "text"),
        )


class Index(Strict):
    """Contents of index.json."""

    format: Literal["plait tokens 1"] = "plait tokens 1"
    spec: DatasetSpec
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1, le=2**32)
    max_token: int = Field(ge=0, lt=2**32)
    end_of_document: int = Field(ge=0, lt=2**32)
    tokenizer_files: dict[str, Sha256]
    listing: Sha256
    sources: list[SourceStats]
    train: list[PartFile]
    validation: list[PartFile]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_token >= self.vocab_size:
            raise ValueError(f"max_token={self.max_token} is not below vocab_size={self.vocab_size}")
        names = [part.name for part in (*self.train, *self.validation)]
        if len(set(names)) != len(names):
            raise ValueError("a part is listed twice")
        return self

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "uint16" else 4

    @property
    def skipped(self) -> str:
        """The numbers of files and rows that were left out as they are not text; empty if there are none."""
        files = sum(source.skipped_files for source in self.sources)
        rows = sum(source.skipped_rows for source in self.sources)
        return ", ".join(counted(number, noun) for number, noun in ((files, "file"), (rows, "row")) if number)

    def digest(self) -> str:
        """Hash of the tokens, their order and their tokenizer, independent of sources and recipe."""
        keys = {"dtype", "tokenizer_files", "train", "validation"}
        return json_hash(self.model_dump(mode="json", include=keys, exclude_none=True))


def read_index(folder: Path) -> Index:
    """Read and validate the index. Raises DataError: missing, damaged, or not an index."""
    path = folder / INDEX
    if not path.is_file():
        unfinished = folder.is_dir() and any(folder.iterdir())
        raise DataError(
            f"{folder} contains no tokens",
            given="an unfinished build, or something else" if unfinished else "an empty or missing directory",
            expected=f"{INDEX} and the parts listed in it",
            hint="plait data build",
        )
    try:
        document = read_json(path, MAX_INDEX_BYTES)
        if not isinstance(document, dict) or json_hash(document.get("index")) != document.get("sha256"):
            raise ValueError("its contents do not match its hash")
        return Index.model_validate(document["index"])
    except ValueError as error:  # pydantic's and json's errors are ValueErrors
        given = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(
            f"{path} is damaged",
            given=given,
            expected="the index that plait data build wrote",
            hint=f"remove {folder} and build the tokens again",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
