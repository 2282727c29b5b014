"""`plait explain`: what a plan costs before it runs, and the estimate next to the measurements of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli.common import (
    Debug,
    Html,
    Json,
    PlanOverride,
    Sets,
    check_outputs,
    report_errors,
    write_json_output,
    write_output,
)
from plait.errors import ConfigError
from plait.plan import Plan

if TYPE_CHECKING:
    from plait.estimate.explain import Explanation
    from plait.train.measurements import Measurements

MODEL_HELP = "A model_type of transformers, a config.json, a folder with one, or module:function."


@report_errors
def explain(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Instead of a recipe, with --plan. {MODEL_HELP}", show_default=False)
    ] = None,
    plan: PlanOverride = None,
    sets: Sets = None,
    run: Annotated[
        Path | None,
        typer.Option(help="The directory of a run: compare with its measurements.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="With --model: sequences per step. Default: one per micro-batch and rank."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="With --model: tokens per sequence. Default: 2048.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Show the collectives of this rank.", show_default=False)
    ] = None,
    host_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks per host. Default: all ranks on one host.")
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Show memory, communication and pipeline bubble of a plan on every rank, without starting a rank."""
    check_outputs({"--json": json, "--html": html})
    _check_source({"a recipe": recipe, "--model": model, "--run": run}, {"--plan": plan, "--set": sets})
    if model is None and (batch, sequence) != (None, None):
        raise ConfigError(
            "--batch and --sequence are for --model",
            given="a recipe or a run, which has its own",
            expected="the batch and the sequence of the recipe",
            hint="--set run.batch=8 --set data.sequence=128",
        )
    measured = None
    if run is not None:
        explanation, measured = explain_run(run, host_size)
    elif model is not None:
        explanation = _explain_model(model, plan, sets, batch, sequence or 2048, host_size)
    else:
        assert recipe is not None, "one of the three sources is given"
        explanation = _explain_recipe(recipe, plan, sets, host_size)

    import rich

    from plait.train.explain import check_rank, print_explanation, to_json

    check_rank(explanation, rank)
    print_explanation(explanation, measured, rich.get_console(), rank=rank)
    write_json_output(json, to_json(explanation, measured))
    write_output(html, lambda path: _write_page(path, explanation, measured))


def _write_page(path: Path, explanation: "Explanation", measured: "Measurements | None") -> None:
    from plait.pages import write_page
    from plait.train.explain_page import page_values

    title = f"{explanation.model} under {explanation.plan}"
    write_page(path, "explain", title, page_values(explanation, measured))


def _check_source(sources: dict[str, object], overrides: dict[str, object]) -> None:
    """Raise ConfigError unless there is one source, which may be changed by what is to change it."""
    names = [name for name, value in sources.items() if value is not None]
    if len(names) != 1:
        raise ConfigError(
            "explain needs one recipe, one model or one run",
            given=" and ".join(names) or "none",
            expected="exactly one of them",
            hint='plait explain RECIPE, or --model config.json --plan "dp=8 zero=3", or --run DIR',
        )
    given = [name for name, value in overrides.items() if value]
    if names == ["--run"] and given:
        run = sources["--run"]
        raise ConfigError(
            "a run is explained as it was",
            given=f"--run {run} with {' and '.join(given)}",
            expected="--run alone, whose plan and recipe are those of the run",
            hint=f"plait explain --run {run}, or a recipe without --run",
        )


def _explain_recipe(
    path: Path, plan: str | None, sets: list[str] | None, host_size: int | None
) -> "Explanation":
    if path.is_dir():
        raise ConfigError(
            "a directory is not a recipe",
            given=path,
            expected="a TOML file",
            hint=f"plait explain --run {path}",
        )
    from plait.train.config import read_recipe

    recipe = read_recipe(path, sets or (), plan)
    Plan.parse(recipe.plan)

    from plait.train.explain import cluster_from_recipe, explain_recipe

    return explain_recipe(recipe, cluster_from_recipe(recipe, host_size))


def _explain_model(
    model: str,
    plan: str | None,
    sets: list[str] | None,
    batch: int | None,
    sequence: int,
    host_size: int | None,
) -> "Explanation":
    if plan is None or sets:
        raise ConfigError(
            "--model is explained under a plan, without a recipe's values",
            given=f"--model {model}" + (" --set" if sets else ""),
            expected="--plan, and no --set",
            hint=f'plait explain --model {model} --plan "dp=8 zero=3"',
        )
    parsed = Plan.parse(plan)
    import torch

    from plait.estimate.dry_run import Cluster
    from plait.estimate.explain import explain as explain_model
    from plait.verify.model_spec import parse_source

    micro = parsed.check_batch(batch or parsed.data_ranks * parsed.micro)
    spec = parse_source(model, layers=0, full=True).spec()
    if spec.batch is not None:
        inputs = spec.batch(0, micro)
    else:
        ids = torch.zeros(micro, sequence, dtype=torch.long, device="meta")
        inputs = {"input_ids": ids, "labels": ids}
    has_gpu = torch.cuda.is_available()
    cluster = Cluster("nccl" if has_gpu else "host", host_size, torch.device("cuda" if has_gpu else "cpu"))
    return explain_model(
        spec.model(),
        parsed,
        inputs,
        cluster=cluster,
        loss=spec.loss,
        blocks=spec.blocks,
        tensor_plan=spec.tensor_plan,
    )


def explain_run(path: Path, host_size: int | None) -> "tuple[Explanation, Measurements]":
    """Explain the plan that the run used, next to its measurements. Raises RunError."""
    from plait.train.explain import cluster_from_run, explain_recipe
    from plait.train.measurements import read_measured
    from plait.train.run_dir import RunDir

    directory = RunDir(path)
    recipe = directory.read_recipe()
    measured = read_measured(directory.measured)
    recipe = recipe.model_copy(update={"plan": measured.plan})
    return explain_recipe(recipe, cluster_from_run(measured, host_size), is_saved=True), measured
