"""`plait generate`: text from a run's newest checkpoint."""

from typing import Annotated

import typer

from plait.cli.common import Debug, Run, report_errors
from plait.train.export import generate as write
from plait.train.run_dir import RunDir


@report_errors
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many more.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among so many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Write text with a trained model."""
    print(write(RunDir(run), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed))
