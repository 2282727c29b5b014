"""`plait explain`: what a plan costs, before it runs; after a run, what it was beside what was foretold."""

from pathlib import Path
from typing import Annotated

import rich
import typer

from plait.cli.common import Debug, Sets, report_errors, write_output
from plait.errors import ConfigError
from plait.estimate.explain import Explanation
from plait.fileio import check_output_paths, write_json
from plait.train.config import read_recipe
from plait.train.explain import check_rank, cluster_of, cluster_of_run, explain_recipe, show, to_json
from plait.train.measurements import Measurements, read_measured
from plait.train.run import RunDir


@report_errors
def explain(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)] = None,
    plan: Annotated[str | None, typer.Option(help='Put a plan over the recipe\'s, e.g. "dp=4".')] = None,
    sets: Sets = None,
    run: Annotated[
        Path | None, typer.Option(help="A run's directory: beside what it measured.", show_default=False)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Show what this rank says.", show_default=False)] = None,
    host_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks per host. By default one host has them all.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all of it as JSON.", show_default=False)] = None,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Show what each rank will hold and say in a step, and how long it waits. Starts no rank."""
    check_output_paths({"--json": json})
    found, measured = (
        _of_recipe(recipe, plan, sets, host_size)
        if run is None
        else _of_run(run, {"a recipe": recipe, "--plan": plan, "--set": sets}, host_size)
    )
    check_rank(found, rank)
    show(found, measured, rich.get_console(), rank=rank)
    write_output(json, lambda path: write_json(path, to_json(found, measured)))


def _of_recipe(
    path: Path | None, plan: str | None, sets: list[str] | None, host_size: int | None
) -> tuple[Explanation, None]:
    if path is None:
        raise ConfigError("there is nothing to explain", hint="plait explain RECIPE, or --run DIR")
    if path.is_dir():
        raise ConfigError("a directory is not a recipe", given=path, hint=f"plait explain --run {path}")
    recipe = read_recipe(path, sets or (), plan)
    return explain_recipe(recipe, cluster_of(recipe, host_size)), None


def _of_run(path: Path, others: dict[str, object], host_size: int | None) -> tuple[Explanation, Measurements]:
    """A run has the plan that it had."""
    given = [name for name, value in others.items() if value]
    if given:
        raise ConfigError(
            "a run is explained as it was",
            given=f"--run {path} with {' and '.join(given)}",
            hint=f"plait explain --run {path}, or a recipe without --run",
        )
    run = RunDir(path)
    recipe = run.read_recipe()
    measured = read_measured(run.measured)
    recipe = recipe.model_copy(update={"plan": measured.plan})
    return explain_recipe(recipe, cluster_of_run(measured, host_size)), measured
