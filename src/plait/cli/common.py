"""Options, exit codes and output files that the commands share."""

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TextIO, TypeVar

import typer

from plait.cli.program import INTERRUPTED, print_interrupted
from plait.errors import ConfigError, PlaitError, printable
from plait.fileio import WRITABLE, check_output_paths, disk_hint, finite_json, write_json

if TYPE_CHECKING:
    from plait.pages import Kind

USER_ERROR = 2
LOST_RANK = 1  # another rank ended; its message is the cause

IMAGE_SUFFIXES = (".png", ".pdf", ".svg")
STDOUT = Path("-")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe, e.g. run.steps=100."),
]
PlanOverride = Annotated[
    str | None, typer.Option("--plan", help='Override the plan of the recipe, e.g. "dp=4".')
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)]
NewDirectory = Annotated[
    Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet.", show_default=False)
]
Dtype = Annotated[
    Literal["fp64", "fp32", "bf16", "fp16"] | None,
    typer.Option(help="Dtype of the weights. Default: the dtype that the run computed in."),
]
Base = Annotated[
    Path | None,
    typer.Option(help="Folder of the base model of an adapter. Default: where it was in training."),
]
ExactBase = Annotated[
    bool,
    typer.Option(
        "--exact-base",
        help="Merge an adapter into its base as the files have it. Default: as base=nf4 or int8 stored it.",
    ),
]
Weights = Annotated[
    Literal["int8", "int4", "fp8"] | None,
    typer.Option(help="Quantize the weights of the blocks' linear layers, as compressed-tensors."),
]
Sparsity = Annotated[
    str | None,
    typer.Option(
        metavar="SPARSITY", help="Set their smallest weights to 0: a fraction, or two of each four by 2:4."
    ),
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write the result as JSON to this file; - is stdout.")
]
Png = Annotated[Path | None, typer.Option("--png", help="Draw it into this file: png, pdf or svg.")]
Html = Annotated[Path | None, typer.Option("--html", help="Draw it as an interactive page.")]


P = ParamSpec("P")
R = TypeVar("R")


def print_line(text: object, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text, which may come from a file's names and keys: control characters are escaped."""
    print(printable(str(text)), file=file, end=end, flush=True)


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Print a PlaitError as its message, and Ctrl-C as one line. `debug=True` adds the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PlaitError as error:
            show_error(error, debug=bool(kwargs.get("debug")))
            raise typer.Exit(USER_ERROR) from None
        except OSError as error:  # of a path that only the file system can judge, such as a name too long
            if error.filename is None:
                raise
            problem = ConfigError(
                "a file cannot be used",
                given=f"{error.filename}: {error.strerror}",
                expected="a path that the file system accepts",
                hint="a shorter path",
            )
            show_error(problem.with_traceback(error.__traceback__), debug=bool(kwargs.get("debug")))
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            print_interrupted()
            raise typer.Exit(INTERRUPTED) from None

    return run


def show_error(error: PlaitError, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exception(error)
    print_line(error.message(), file=sys.stderr)


def check_without_adapter(options: Mapping[str, object]) -> None:
    """Raise ConfigError for options of full models, given for the files of an adapter."""
    for name in (name for name, value in options.items() if value is not None):
        raise ConfigError(
            f"{name} is of merged models",
            given=f"{name} for PEFT's files of an adapter",
            expected="the adapter as it was trained, in float32",
            hint=f"the command without {name}, or a merged model",
        )


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Check, before the work, that the file of each flag can be written. Raises ConfigError.

    `--png` also needs a suffix that matplotlib writes here; `-` is stdout.
    """
    check_output_paths({flag: path for flag, path in outputs.items() if path != STDOUT})
    png = outputs.get("--png")
    if png is not None and png.suffix not in IMAGE_SUFFIXES:
        raise ConfigError(
            "unsupported image format", given=png, expected=" ".join(IMAGE_SUFFIXES), hint="--png plot.png"
        )


def write_output(path: Path | None, write: Callable[[Path], None], *, report: TextIO | None = None) -> None:
    """Write the file a flag asked for, and report it on stdout or `report`. Raises ConfigError on failure."""
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise ConfigError(
            "the file cannot be written",
            given=f"{path}: {error.strerror}",
            expected=WRITABLE,
            hint=disk_hint(path),
        ) from error
    print_line(f"written: {path}", file=report)


def write_page_output(
    path: Path | None, kind: "Kind", title: str, values: Callable[[], Any], *, report: TextIO | None = None
) -> None:
    """Write the page of `--html`; nothing without a path. Raises ConfigError on failure."""
    if path is not None:
        from plait.pages import write_page

        write_output(path, lambda target: write_page(target, kind, title, values()), report=report)


def write_json_output(path: Path | None, values: Any) -> None:
    """Write `values` as JSON to the file of `--json`, or to stdout for `-`; nothing without a path. Raises
    ConfigError on failure."""
    values = finite_json(values)
    if path == STDOUT:
        print_line(json.dumps(values, indent=1).replace("\x7f", "\\u007f"))
    else:
        write_output(path, lambda target: write_json(target, values))
