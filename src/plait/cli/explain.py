"""`plait explain`: what a plan costs before it runs, and the estimate next to the measurements of a run."""

from dataclasses import replace
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
    write_page_output,
)
from plait.errors import ConfigError
from plait.plan import Plan
from plait.plan.devices import Device
from plait.plan.devices import device as find_device
from plait.train.saved_recipe import check_is_run

if TYPE_CHECKING:
    from plait.estimate.explain import Explanation
    from plait.train.measurements import Measurements

LAYOUT_HELP = 'Layout rules of tensor parallelism, e.g. "heads:col ffn:col".'
DEVICE_HELP = (
    "Explain ranks on such devices, e.g. h100-sxm-80gb, and say whether the plan fits their memory. This "
    "machine need not have one. Default: this machine's kind of device."
)
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
    layout: Annotated[str | None, typer.Option(help=f"With --model. {LAYOUT_HELP}")] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="With --model: sequences per step. Default: one per micro-batch and rank."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="With --model: tokens per sequence. Default: 2048.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help=DEVICE_HELP, show_default=False)] = None,
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
    sources: dict[str, object] = {"a recipe": recipe, "--model": model, "--run": run}
    overrides: dict[str, object] = {"--plan": plan, "--set": sets, "--device": device}
    _check_source(sources, overrides, (batch, sequence, layout))
    hardware = None if device is None else find_device(device)
    measured = None
    if run is not None:
        explanation, measured = explain_run(run, host_size)
    elif model is not None:
        parsed = _model_plan(model, plan, sets)
        explanation = _explain_model(model, parsed, batch, sequence or 2048, layout, host_size, hardware)
    else:
        assert recipe is not None, "one of the three sources is given"
        explanation = _explain_recipe(recipe, plan, sets, host_size, hardware)

    import rich

    from plait.train.explain_recipe import check_rank, page_values, print_explanation, to_json

    check_rank(explanation, rank)
    print_explanation(explanation, measured, rich.get_console(), rank=rank)
    write_json_output(json, to_json(explanation, measured))
    title = f"{explanation.model} under {explanation.plan}"
    write_page_output(html, "explain", title, lambda: page_values(explanation, measured))


def _check_source(
    sources: dict[str, object], overrides: dict[str, object], of_model: tuple[object, ...]
) -> None:
    """Raise ConfigError unless there is one source, which may be changed by what is to change it. `of_model`:
    values of options that are for `--model`."""
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
    if names != ["--model"] and any(value is not None for value in of_model):
        raise ConfigError(
            "--batch, --sequence and --layout are for --model",
            given="a recipe or a run, which has its own",
            expected="the batch, the sequence and the layout of the recipe",
            hint="--set run.batch=8 --set data.sequence=128 --set model.tensor_plan.layout=heads:col",
        )


def _explain_recipe(
    path: Path,
    plan: str | None,
    sets: list[str] | None,
    host_size: int | None,
    hardware: Device | None,
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

    from plait.train.explain_recipe import cluster_from_recipe, explain_recipe

    return explain_recipe(recipe, cluster_from_recipe(recipe, host_size, hardware))


def _model_plan(model: str, plan: str | None, sets: list[str] | None) -> Plan:
    """Return the plan for `--model`. Raises ConfigError for options that a recipe has."""
    if model.endswith(".toml"):
        raise ConfigError(
            "a recipe is given without --model",
            given=f"--model {model}",
            expected=MODEL_HELP,
            hint=f"plait explain {model}" + (f' --plan "{plan}"' if plan else ""),
        )
    if plan is None or sets:
        raise ConfigError(
            "--model is explained under a plan, without a recipe's values",
            given=f"--model {model}" + (" --set" if sets else ""),
            expected="--plan, and no --set",
            hint=f'plait explain --model {model} --plan "dp=8 zero=3"',
        )
    return Plan.parse(plan)


def _explain_model(
    model: str,
    plan: Plan,
    batch: int | None,
    sequence: int,
    layout: str | None,
    host_size: int | None,
    hardware: Device | None,
) -> "Explanation":
    import torch

    from plait.engine.spec import Arguments
    from plait.estimate.dry_run import HypotheticalRanks
    from plait.estimate.explain import explain as explain_model
    from plait.models import token_batch
    from plait.verify.model_spec import parse_source, to_module

    micro = plan.check_batch(batch or plan.data_ranks * plan.micro)
    spec = replace(parse_source(model, layers=0, full=True), layout=layout).spec()
    inputs = token_batch(micro, sequence) if spec.batch is None else spec.batch(0, micro)
    if hardware is not None:
        cluster = HypotheticalRanks.of_hardware(hardware, host_size)
    else:
        kind, transport = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "host")
        cluster = HypotheticalRanks(transport, host_size, torch.device(kind))
    given = Arguments(
        to_module(spec.model()), plan, loss=spec.loss, blocks=spec.blocks, tensor_plan=spec.tensor_plan
    )
    return explain_model(given, inputs, cluster)


def explain_run(path: Path, host_size: int | None) -> "tuple[Explanation, Measurements]":
    """Explain the plan that the run used, next to its measurements. Raises RunError."""
    check_is_run(path)
    from plait.train.explain_recipe import cluster_from_run, explain_recipe
    from plait.train.measurements import read_measured
    from plait.train.run_dir import RunDir

    directory = RunDir(path)
    recipe = directory.read_recipe()
    measured = read_measured(directory.measured)
    recipe = recipe.model_copy(update={"plan": measured.plan})
    return explain_recipe(recipe, cluster_from_run(measured, host_size), is_saved=True), measured
