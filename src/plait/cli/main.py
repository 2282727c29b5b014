"""The command `plait`.

A command module imports at its top only what declares its options: typer, errors, pure modules. The code that
runs a command is imported inside it, so that help texts and wrong options are answered without torch.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from plait import __version__
from plait.cli.bench import bench
from plait.cli.checkpoint import checkpoint
from plait.cli.common import print_line
from plait.cli.explain import explain
from plait.cli.model import chat, evaluate, export, generate, model_rank
from plait.cli.plan import find
from plait.cli.report import compare, report
from plait.cli.schedule import schedule
from plait.cli.train import data, rank, train
from plait.cli.verify import verify, verify_rank


class _Commands(TyperGroup):
    """Commands of which a misspelled one is answered with those that the help text shows."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command = self.commands.get(args[0])
        if command is None:
            self.commands = {name: each for name, each in self.commands.items() if not each.hidden}
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="plait",
    cls=_Commands,
    help="Train PyTorch models that have outgrown one device.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command(hidden=True)(rank)
app.command()(generate)
app.command()(chat)
app.command()(export)
app.command()(evaluate)
app.command(hidden=True)(model_rank)
app.command()(report)
app.command()(compare)
app.command()(schedule)
app.command()(explain)
app.command("plan")(find)
app.command()(verify)
app.command(hidden=True)(verify_rank)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print_line(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def _plait(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train PyTorch models that have outgrown one device."""


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    app()
