"""recipe.json of a run directory: the resolved recipe, the hashes of the tokenizer's files, a hash of both.

A resumed run continues with these values, and an export contains this tokenizer: so damage must not look like
a choice of the user. To change a value, use `--set` on resume, which writes the file again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import RunError
from plait.fileio import json_hash, read_json, write_json

RECIPE_FILE = "recipe.json"
_HASH, _RECIPE, _TOKENIZER = "sha256", "recipe", "tokenizer_files"


@dataclass(frozen=True)
class SavedRecipe:
    """Contents of recipe.json: the recipe's values, and sha256 by name of the tokenizer's files."""

    values: dict[str, Any]
    tokenizer_files: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write atomically. Raises OSError."""
        content = {_RECIPE: self.values, _TOKENIZER: dict(self.tokenizer_files)}
        write_json(path, {_HASH: json_hash(content), **content})

    @classmethod
    def read(cls, path: Path) -> "SavedRecipe":
        """Read and verify the file. Raises RunError, also for a file without a hash."""
        try:
            document = read_json(path)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        return cls.from_document(document, path)

    @classmethod
    def from_document(cls, document: Any, path: Path) -> "SavedRecipe":
        """Verify the JSON content of a file. Raises RunError if it was changed. `path`: for the error."""
        if not isinstance(document, dict) or document.keys() != {_HASH, _RECIPE, _TOKENIZER}:
            raise _damaged(path, f"its keys are not {_HASH}, {_RECIPE} and {_TOKENIZER}")
        content = {key: document[key] for key in (_RECIPE, _TOKENIZER)}
        if not all(isinstance(part, dict) for part in content.values()):
            raise _damaged(path, f"{_RECIPE} and {_TOKENIZER} are not JSON objects")
        if document[_HASH] != json_hash(content):
            raise _damaged(path, "its content does not have the hash that it records")
        return cls(document[_RECIPE], document[_TOKENIZER])

    @staticmethod
    def is_saved(document: object) -> bool:
        """Return whether a JSON value is a saved recipe, even a damaged one, rather than a user's recipe."""
        return isinstance(document, dict) and bool(document.keys() & {_HASH, _RECIPE, _TOKENIZER})


def check_is_run(path: Path) -> None:
    """Raise RunError unless this is the directory of a run."""
    if not (path / RECIPE_FILE).is_file():
        raise RunError(
            "the run does not exist" if not path.exists() else "not a run directory",
            given=path,
            expected=f"a directory with {RECIPE_FILE}",
            hint="plait train RECIPE starts a run",
        )


def check_is_folder_of_model(path: Path) -> None:
    """Raise RunError unless this is a directory, which may be that of a model."""
    if not path.is_dir():
        raise RunError(
            "the model is not a directory" if path.exists() else "the model does not exist",
            given=path,
            expected="the directory of a run, a checkpoint, or a Hugging Face folder",
            hint=f"ls {path.absolute().parent}",
        )


def _damaged(path: Path, reason: str) -> RunError:
    return RunError(
        "the run's recipe is damaged, or was edited",
        given=f"{path}: {reason}",
        expected="the file as plait wrote it",
        hint="restore it; to change a value: plait train RUN --resume --set KEY=VALUE; "
        "a new run can start from a checkpoint: plait train RECIPE --from RUN/checkpoints/STEP",
    )
