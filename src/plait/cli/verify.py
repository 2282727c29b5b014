"""`plait verify`: does a plan compute what one process computes? And what it starts once per rank."""

import json
import tempfile
from dataclasses import replace
from enum import StrEnum
from math import lcm
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch.cuda import device_count
from transformers.utils import logging

from plait.cli.common import LOST_RANK, USER_MISTAKE, Debug, report_errors, write_output
from plait.comm.launch import end_with_parent
from plait.errors import ConfigError, PlaitError, PlanError
from plait.fileio import check_output_paths, write_json
from plait.plan import Plan
from plait.plan.schedule.load import load_schedule
from plait.verify import (
    PRECISIONS,
    Case,
    Outcome,
    Verdict,
    WorkerOptions,
    all_plans,
    check,
    parse_source,
    serve,
)
from plait.verify import verify as verify_on_ranks
from plait.verify.report import line, matrix, tables

DIFFERS = 1
_LAYERS = 4  # of a model made small, or as many as there are stages


class Dtype(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bf16 = "bf16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@report_errors
def verify(
    model: Annotated[
        str,
        typer.Option(
            help="A config.json, a folder with one, a model_type of transformers, or module:function.",
            show_default=False,
        ),
    ],
    plan: Annotated[str | None, typer.Option(help='The plan, e.g. "pp=2 dp=2 zero=1".')] = None,
    plans: Annotated[Path | None, typer.Option(help="A file with a plan per line.")] = None,
    all_of: Annotated[
        int, typer.Option("--all-plans", min=0, metavar="N", help="Every legal plan on N ranks.")
    ] = 0,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; by default the plan's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    dtype: Annotated[Dtype, typer.Option(help="What is computed in, instead of the plan's precision.")] = (
        Dtype.float64
    ),
    full: Annotated[
        bool, typer.Option("--full/--shrink", help="The model as it is, or small: few layers, narrow.")
    ] = False,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of initial weights and data.")] = 0,
    device: Annotated[
        Device, typer.Option(help="What ranks compute on; by default GPUs, where there is one for each.")
    ] = Device.auto,
    transport: Annotated[str, typer.Option(help="What CPU ranks talk through: host or gloo.")] = "auto",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative difference; by default the dtype's.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was found.")] = None,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Hold a plan against one process: losses, gradients, weights. Ends with 0: the same; 1: not, or a rank
    died; 2: the plan cannot be."""
    check_output_paths({"--json": json_file})
    _check_tolerance(tolerance)
    asked = _plans(plan, plans, all_of, ranks)
    asked = [_in(dtype, one) for one in asked]
    stages = max(load_schedule(p.schedule, p.pp, p.micro, p.chunks).num_stages for p in asked)
    source = parse_source(model, layers=max(_LAYERS, stages), length=length, full=full)
    on = _device(device, transport, max(p.num_ranks for p in asked))
    samples = 2 * lcm(*(p.dp * p.micro for p in asked))
    jobs = [Case(source, str(p), dtype.value, steps, samples, length, seed, tolerance) for p in asked]
    console = Console()
    if plan is not None:
        check(source.subject(), asked[0])
    with tempfile.TemporaryDirectory(prefix="plait-verify-") as folder:
        how = WorkerOptions(on, transport, blame=plan is not None)
        found = verify_on_ranks(jobs, Path(folder), how)
    if plan is not None:
        tables(found[0], console)
    else:
        console.print(matrix(found))
    write_output(json_file, lambda path: write_json(path, [one.to_values() for one in found]))
    raise typer.Exit(_code(found))


@report_errors
def verify_rank(room: Path) -> None:
    """One rank of what `plait verify` has started, which tells the letters of its ranks."""
    end_with_parent()
    logging.set_verbosity(logging.CRITICAL)
    several = len(json.loads((room / "jobs.json").read_text(encoding="utf-8"))["jobs"]) > 1
    try:
        serve(room, (lambda verdict: print(line(verdict), flush=True)) if several else None)
    except PlaitError:
        raise typer.Exit(LOST_RANK) from None


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError("that is no relative difference", given=f"--tolerance {tolerance}", hint="1e-6")


def _device(asked: Device, transport: str, num_ranks: int) -> str:
    """Raises ConfigError for a transport that is none, or between other devices, and for too few GPUs."""
    if transport not in ("auto", "host", "gloo"):
        raise ConfigError(
            "there is no such transport for CPU ranks", given=f"--transport {transport}", hint="host or gloo"
        )
    if asked is Device.cpu or (asked is Device.auto and transport != "auto"):
        return "cpu"
    gpus = device_count()
    if asked is Device.cuda and (gpus < num_ranks or transport != "auto"):
        raise ConfigError(
            "these ranks cannot be on GPUs",
            given=f"--device cuda --transport {transport}, {num_ranks} ranks, {gpus} GPUs",
            expected="a GPU for each, and no transport",
            hint="--device cpu",
        )
    return "cuda" if gpus >= num_ranks else "cpu"


def _in(dtype: Dtype, plan: Plan) -> Plan:
    """The plan, computing in what is verified in. Raises ConfigError."""
    try:
        return replace(plan, precision=PRECISIONS[dtype.value])
    except PlanError as error:
        raise ConfigError(
            f"this plan cannot be verified in {dtype.value}",
            given=f"{plan}: {error.fact}",
            hint="--dtype bf16, which measures what rounding does",
        ) from error


def _plans(plan: str | None, plans: Path | None, all_of: int, ranks: int | None) -> list[Plan]:
    """Raises ConfigError, and PlanError for one that cannot be."""
    given = [flag for flag, value in (("--plan", plan), ("--plans", plans), ("--all-plans", all_of)) if value]
    if len(given) != 1:
        raise ConfigError(
            "one plan, a file of plans, or all plans",
            given=" and ".join(given) or "none of them",
            expected="one of --plan, --plans and --all-plans",
            hint='--plan "pp=2 dp=2 zero=1"',
        )
    if plan is not None:
        found = [Plan.parse(plan)]
    elif plans is not None:
        found = _of_file(plans)
    else:
        found = all_plans(all_of)
    for one in found:
        if ranks is not None and one.num_ranks != ranks:
            one.check_ranks(ranks)
    return found


def _of_file(path: Path) -> list[Plan]:
    try:
        lines = [text.partition("#")[0].strip() for text in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the plans cannot be read", given=f"{path}: {error}") from error
    found = []
    for number, text in enumerate(lines, start=1):
        try:
            found += [Plan.parse(text)] if text else []
        except PlanError as error:
            raise PlanError(
                error.fact,
                given=f"{path}:{number}: {error.given}",
                expected=error.expected,
                hint=error.hint,
            ) from error
    if not found:
        raise ConfigError("there is no plan in the file", given=path, expected="a plan per line")
    return found


def _code(found: list[Verdict]) -> int:
    outcomes = {one.outcome for one in found}
    if outcomes & {Outcome.DIFFERS, Outcome.DIED}:
        return DIFFERS
    return USER_MISTAKE if outcomes == {Outcome.REFUSED} else 0
