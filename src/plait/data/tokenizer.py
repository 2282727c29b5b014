"""The tokenizer: trained on the corpus or imported, and saved with its tokens."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from plait.data.config import END_OF_DOCUMENT, TokenizerConfig
from plait.errors import DataError
from plait.fileio import missing_hint, open_regular, read_text, sync_folder, sync_tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_FILE_BYTES = 1 << 30
_MAX_WORD = 256  # characters
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_WORD},}}+|(?<!\s)\s{{{_MAX_WORD},}}+")

_PROBE_S = 300.0  # of a machine at work
_PROBE = """
import resource, string, sys
for limit, most in ((resource.RLIMIT_AS, 1 << 33), (resource.RLIMIT_CPU, 60), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))
from tokenizers import Tokenizer
Tokenizer.from_file(sys.argv[1]).encode(string.printable)
"""

CHAT_TEMPLATE = "chat_template.jinja"  # hashed for conversations only
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, end_of_document: str | None
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE of at most `vocab_size` tokens; decoding restores any text exactly."""
    from transformers import PreTrainedTokenizerFast

    end = end_of_document or END_OF_DOCUMENT
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((part for text in texts for part in split_long_words(text)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token=end)


def split_long_words(text: str) -> Iterator[str]:
    """Split the text inside its longest words and runs of spaces, on which training would spend quadratic
    time. Tokens of that length would be of no use."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for stop in range(run.start() + _MAX_WORD, run.end(), _MAX_WORD):
            yield text[start:stop]
            start = stop
    yield text[start:]


def read_tokenizer(
    path: Path, end_of_document: str | None = None, chat_template: Path | None = None
) -> "PreTrainedTokenizerFast":
    """Load an existing tokenizer, with the end of a document as its eos token, and perhaps with another chat
    template. Raises DataError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from plait.models import check_integers, read_config

    if not path.exists():
        raise DataError(
            f"the tokenizer {path} is missing",
            given=f"no {path.absolute()}",
            expected="its directory, or a tokenizer.json",
            hint=missing_hint(path),
        )
    try:
        if path.is_file():
            found: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            if (path / "config.json").is_file():  # which AutoTokenizer builds
                check_integers(read_config(path))
            found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Rust raises bare Exceptions
        raise DataError(
            f"cannot read the tokenizer {path}",
            given=f"{type(error).__name__}: {error}",
            expected="a tokenizer.json, alone or with the files of save_pretrained",
            hint="tokenizer.save_pretrained(FOLDER) writes them",
        ) from error
    if not isinstance(found, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer {path} has no tokenizer.json",
            given=type(found).__name__,
            expected="a fast tokenizer",
            hint="PreTrainedTokenizerFast.save_pretrained(FOLDER)",
        )
    end = end_of_document or found.eos_token
    if end is None or end not in found.get_vocab():
        raise DataError(
            f"the tokenizer {path} has no end-of-document token",
            given="no eos token" if end is None else f"end_of_document={end!r}, not in the vocabulary",
            expected="a token in its vocabulary",
            hint=f"tokenizer.end_of_document = {next(iter(found.all_special_tokens), 'TOKEN')!r}",
        )
    if end != found.eos_token:
        found.eos_token = end
    if chat_template is not None:
        found.chat_template = _read_template(chat_template)
    return found


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the chat template {path}",
            given=error,
            expected="a Jinja template in UTF-8",
            hint=missing_hint(path),
        ) from error


def probe_tokenizer(path: Path) -> None:
    """Load a tokenizer.json and tokenize a line with it in a process of its own, in bounded memory and time:
    a file may abort the process, or expand text without a bound. Raises DataError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return
    threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    command = [sys.executable, "-P", "-c", _PROBE, str(file)]
    try:
        subprocess.run(command, env=os.environ | threads, check=True, capture_output=True, timeout=_PROBE_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        text = (error.stderr or b"").decode("utf-8", "replace")
        lines = [line for line in text.strip().splitlines() if not line.startswith("note:")]
        raise DataError(
            f"cannot read the tokenizer {path}",
            given=lines[-1] if lines else str(error).rpartition("' ")[2],
            expected="a tokenizer.json that tokenizes a line within a minute and 8 GiB",
            hint="tokenizer.save_pretrained(FOLDER) writes them",
        ) from error


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write a directory for AutoTokenizer.from_pretrained, atomically."""
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        tokenizer.save_pretrained(str(fresh))
        sync_tree(fresh)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def encoder(folder: Path) -> Tokenizer:
    """Load the fast tokenizer for a corpus: text that spells a special token is encoded as text."""
    bare: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bare.encode_special_tokens = True
    bare.no_truncation()
    bare.no_padding()
    return bare


def file_hashes(path: Path) -> dict[str, str]:
    """sha256 of each file of a tokenizer, by name: of a directory, or of one tokenizer.json."""
    files = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    return {file.name: _file_hash(file) for file in files}


def _file_hash(path: Path) -> str:
    """Raises DataError for a file that is too large for a tokenizer, OSError."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _MAX_FILE_BYTES:
            raise DataError(
                f"{path} is too large for a tokenizer",
                given=f"{size:,} bytes",
                expected=f"at most {_MAX_FILE_BYTES:,} bytes",
                hint="its tokenizer.json as tokenizer.path",
            )
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_spec(config: TokenizerConfig, *, with_template: bool = False) -> dict[str, object]:
    """Index entry for the recipe's tokenizer: its contents, not its path. Raises DataError."""
    if config.path is None:
        return {"vocab_size": config.vocab_size, "end_of_document": config.end_of_document}
    files = file_hashes(config.path)
    if not files:
        raise DataError(
            f"the tokenizer {config.path} is missing",
            given=f"no {config.path.absolute()}",
            expected="its directory, or a tokenizer.json",
            hint=f"ls {config.path.absolute().parent}",
        )
    spec: dict[str, object] = {"files": files, "end_of_document": config.end_of_document}
    template = config.chat_template or config.path / CHAT_TEMPLATE
    if config.chat_template is not None or (with_template and template.is_file()):
        spec["chat_template"] = hashlib.sha256(_read_template(template).encode()).hexdigest()
    return spec
