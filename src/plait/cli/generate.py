"""`plait generate` and `plait export`: text from a run's newest checkpoint, or a Hugging Face directory."""

from typing import Annotated

import typer

from plait.cli.common import Debug, Dtype, NewDirectory, Run, print_line, report_errors
from plait.train.saved_recipe import check_is_run


@report_errors
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample among this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Generate text with a trained model."""
    check_is_run(run)
    from plait.train.export import generate as write
    from plait.train.run_dir import RunDir

    print_line(write(RunDir(run), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed))


@report_errors
def export(
    run: Run,
    out: NewDirectory,
    dtype: Dtype = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Export a trained model for AutoModelForCausalLM and AutoTokenizer."""
    check_is_run(run)
    from plait.train.export import export as write
    from plait.train.run_dir import RunDir

    write(RunDir(run), out, dtype)
    print_line(out)
