"""`plait verify`: compare a plan with one process; and `plait verify-rank`, which it starts once per rank."""

import json
import sys
import tempfile
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plait.cli.common import (
    LOST_RANK,
    USER_ERROR,
    Debug,
    Json,
    check_outputs,
    print_line,
    report_errors,
    write_json_output,
)
from plait.cli.explain import LAYOUT_HELP, MODEL_HELP
from plait.cli.multirank import check_limits, rank_entry
from plait.errors import ConfigError, PlaitError, PlanError
from plait.fileio import read_text, temporary_folder
from plait.plan import Plan
from plait.plan.schedule.load import load_schedule

if TYPE_CHECKING:
    from plait.verify.model_spec import ModelSource
    from plait.verify.result import Verdict

DIFFERS = 1
_LAYERS = 4  # of a model made small, or as many as there are stages
Dtype = Literal["float64", "float32", "bf16", "fp8", "fp8-rowwise"]
Device = Literal["auto", "cpu", "cuda"]
Packed = Annotated[
    bool, typer.Option("--packed", help="Pack documents into rows; compare with each of them alone.")
]
Tolerance = Annotated[
    float | None, typer.Option(min=0.0, help="Largest relative difference. Default: by dtype.")
]


@report_errors
def verify(
    call: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP, show_default=False)],
    plan: Annotated[str | None, typer.Option(help='The plan, e.g. "pp=2 dp=2 zero=1".')] = None,
    plans: Annotated[Path | None, typer.Option(help="A file with one plan per line.")] = None,
    num_ranks_of_all: Annotated[
        int, typer.Option("--all-plans", min=0, metavar="N", help="Every valid plan on N ranks.")
    ] = 0,
    layout: Annotated[str | None, typer.Option(help=LAYOUT_HELP)] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks. Default: those of the plan.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    dtype: Annotated[Dtype, typer.Option(help="Dtype to compute in, not the plan's precision.")] = "float64",
    full: Annotated[
        bool,
        typer.Option("--full/--shrink", help="Verify the full model, or a small copy: few layers, narrow."),
    ] = False,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 16,
    packed: Packed = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial weights and data.")] = 0,
    device: Annotated[
        Device, typer.Option(help="Device of the ranks. Default: GPUs, if there is one for each rank.")
    ] = "auto",
    transport: Annotated[str, typer.Option(help="Transport of CPU ranks: host or gloo.")] = "auto",
    tolerance: Tolerance = None,
    json: Json = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Compare losses, gradients and weights under a plan with those of one process.

    Exit code 0: they are equal; 1: they differ, or a rank died; 2: the plan is impossible.
    """
    _check_options(json, tolerance)
    plan = "dp=1" if packed and not (plan or plans or num_ranks_of_all) else plan
    selected = [_with_dtype(dtype, one) for one in _select_plans(plan, plans, num_ranks_of_all, ranks)]
    stages = max(load_schedule(p.schedule, p.pp, p.micro, p.chunks).num_stages for p in selected)
    from rich.console import Console

    from plait.comm.launch import fork_ranks
    from plait.verify import runner
    from plait.verify.model_spec import parse_source
    from plait.verify.result import print_verdict, verdict_matrix
    from plait.verify.worker import Case, check

    fork_ranks(rank_entry(call))
    source = _noted(parse_source(model, layers=max(_LAYERS, stages), length=sequence, full=full), layout)
    selected = _with_experts(selected, source) if num_ranks_of_all else selected
    on = _device(device, transport, max(p.num_ranks for p in selected))
    samples = 2 * lcm(*(p.dp * p.micro for p in selected))
    cases = [Case(source, str(p), dtype, steps, samples, sequence, seed, tolerance, packed) for p in selected]
    if plan is not None:
        check(cases[0])
    with temporary_folder(Path(tempfile.gettempdir()) / "plait-verify", 0o700) as folder:
        options = runner.WorkerOptions(on, transport, find_suspects=plan is not None)
        verdicts = runner.verify(cases, folder, options)
    if plan is not None:
        print_verdict(verdicts[0], Console())
    else:
        Console().print(verdict_matrix(verdicts))
    write_json_output(json, [verdict.to_values() for verdict in verdicts])
    raise typer.Exit(_exit_code(verdicts))


@report_errors
def verify_rank(work_dir: Path) -> None:
    """Run one rank of a job that `plait verify` has started, which reports the errors of its ranks."""
    from plait.comm.launch import end_with_parent

    end_with_parent()
    from transformers.utils import logging

    from plait.verify.result import summary_line
    from plait.verify.runner import serve

    logging.set_verbosity(logging.CRITICAL)
    are_several = len(json.loads((work_dir / "jobs.json").read_text(encoding="utf-8"))["jobs"]) > 1
    try:
        serve(work_dir, (lambda verdict: print_line(summary_line(verdict))) if are_several else None)
    except PlaitError:
        raise typer.Exit(LOST_RANK) from None


def _check_options(json: Path | None, tolerance: float | None) -> None:
    check_outputs({"--json": json})
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError(
            "not a relative difference",
            given=f"--tolerance {tolerance}",
            expected="a number between 0 and 1",
            hint="--tolerance 1e-6",
        )


def _noted(source: "ModelSource", layout: str | None) -> "ModelSource":
    """Return the source with layout rules. Prints what the small model leaves out of the configuration."""
    if source.left_out:
        keys = ", ".join(source.left_out)
        print_line(f"note: the small model leaves out of the configuration: {keys}", file=sys.stderr)
    return replace(source, layout=layout)


def _device(asked: Device, transport: str, num_ranks: int) -> str:
    """Choose the device of the ranks. Raises ConfigError for an unknown transport, for too few GPUs, and for
    too low limits."""
    check_limits()
    if transport not in ("auto", "host", "gloo"):
        raise ConfigError(
            "there is no such transport for CPU ranks",
            given=f"--transport {transport}",
            expected="auto, host or gloo",
            hint="--transport host",
        )
    if asked == "cpu" or (asked == "auto" and transport != "auto"):
        return "cpu"
    from torch.cuda import device_count

    gpus = device_count()
    if asked == "cuda" and (gpus < num_ranks or transport != "auto"):
        raise ConfigError(
            "these ranks cannot run on GPUs",
            given=f"--device cuda --transport {transport}, {num_ranks} ranks, {gpus} GPUs",
            expected="one GPU per rank, and no --transport",
            hint="--device cpu",
        )
    return "cuda" if gpus >= num_ranks else "cpu"


def _with_dtype(dtype: Dtype, plan: Plan) -> Plan:
    """Return the plan with the precision to verify in. Prints if it replaces one that was chosen. Raises
    ConfigError."""
    from plait.verify.worker import PRECISIONS

    if plan.precision not in (Plan().precision, PRECISIONS[dtype]):
        text = f"note: precision={plan.precision} is replaced by {PRECISIONS[dtype]}; --dtype measures others"
        print_line(text, file=sys.stderr)
    try:
        return replace(plan, precision=PRECISIONS[dtype])
    except PlanError as error:
        raise ConfigError(
            f"this plan cannot be verified in {dtype}",
            given=f"{plan}: {error.fact}",
            expected=f"a plan that allows precision={PRECISIONS[dtype]}",
            hint="--dtype bf16, which measures the rounding error",
        ) from error


def _select_plans(
    plan: str | None, plans: Path | None, num_ranks_of_all: int, ranks: int | None
) -> list[Plan]:
    """Return the plans to verify. Raises ConfigError, and PlanError for an impossible one."""
    given = [
        flag
        for flag, value in (("--plan", plan), ("--plans", plans), ("--all-plans", num_ranks_of_all))
        if value
    ]
    if len(given) != 1:
        raise ConfigError(
            "verify needs one plan, a file of plans, or all plans",
            given=" and ".join(given) or "none",
            expected="one of --plan, --plans and --all-plans",
            hint='--plan "pp=2 dp=2 zero=1"',
        )
    if plan is not None:
        selected = [Plan.parse(plan)]
    elif plans is not None:
        selected = _read_plans(plans)
    else:
        from plait.verify.sweep import all_plans

        selected = all_plans(num_ranks_of_all)
    for one in selected:
        if ranks is not None and one.num_ranks != ranks:
            one.check_ranks(ranks)
    return selected


def _with_experts(plans: list[Plan], source: "ModelSource") -> list[Plan]:
    """Return the plans of a sweep with those that the experts of the model add."""
    from plait.verify.sweep import all_plans
    from plait.verify.worker import common_experts

    found = all_plans(plans[0].num_ranks, common_experts(source))
    return [replace(plan, precision=plans[0].precision) for plan in found]


def _read_plans(path: Path) -> list[Plan]:
    try:
        lines = [text.partition("#")[0].strip() for text in read_text(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the plans cannot be read",
            given=f"{path}: {error}",
            expected="a file of plans, one per line",
            hint=f"ls -l {path}",
        ) from error
    parsed = []
    for number, text in enumerate(lines, start=1):
        try:
            parsed += [Plan.parse(text)] if text else []
        except PlanError as error:
            raise PlanError(
                error.fact, given=f"{path}:{number}: {error.given}", expected=error.expected, hint=error.hint
            ) from error
    if not parsed:
        raise ConfigError(
            "the file contains no plan",
            given=path,
            expected="at least one plan, each on its line",
            hint="dp=2 zero=3",
        )
    return parsed


def _exit_code(verdicts: "list[Verdict]") -> int:
    from plait.verify.result import Outcome

    outcomes = {verdict.outcome for verdict in verdicts}
    if outcomes & {Outcome.DIFFERS, Outcome.DIED}:
        return DIFFERS
    return USER_ERROR if outcomes == {Outcome.REFUSED} else 0
