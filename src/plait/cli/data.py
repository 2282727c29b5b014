"""`plait data build`: text to token files, ahead of a run."""

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.common import Debug, Sets, print_line, report_errors

data = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Prepare text for training."""


@data.command()
@report_errors
def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)],
    sets: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of data.dir.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Tokenize the sources of a recipe into data.dir. `plait train` does so too where tokens are missing."""
    from plait.train.config import read_recipe

    values = read_recipe(recipe, sets or [])
    from plait.data.build import build as build_tokens

    store = build_tokens(values.data, values.tokenizer, force=force)
    print_line(f"{values.data.dir}: {store.train.num_tokens:,} training tokens,", end=" ")
    print_line(f"{store.validation.num_tokens:,} validation tokens, vocabulary {store.index.vocab_size:,}")
    if store.index.skipped:
        print_line(f"left out, as it is not text: {store.index.skipped}")
    print_line(f"content {store.digest}")
