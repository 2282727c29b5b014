"""`plait data build`: text to token files, ahead of a run."""

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.common import Debug, Sets, report_errors
from plait.data import build as build_tokens
from plait.train.config import read_recipe

data = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Prepare text for training."""


@data.command()
@report_errors
def build(
    recipe: Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)],
    sets: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what data.dir holds.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Tokenize the recipe's sources into data.dir. `plait train` does it too where it is missing."""
    values = read_recipe(recipe, sets or [])
    store = build_tokens(values.data, values.tokenizer, force=force)
    print(f"{values.data.dir}: {store.train.num_tokens:,} tokens to train on,", end=" ")
    print(f"{store.validation.num_tokens:,} to validate, vocabulary {store.vocab_size:,}")
    print(f"content {store.digest}")
