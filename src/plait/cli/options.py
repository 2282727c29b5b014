"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Put a value over the recipe's, e.g. run.steps=100."),
]
Run = Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)]
