"""`plait export`: a run's newest checkpoint as a Hugging Face directory."""

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.common import Debug, Run, report_errors
from plait.train.export import Dtype
from plait.train.export import export as write
from plait.train.run_dir import RunDir


@report_errors
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.", show_default=False)],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights; else what the run computed in.")
    ] = None,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Write the trained model for AutoModelForCausalLM and AutoTokenizer."""
    write(RunDir(run), out, dtype)
    print(out)
