"""`plait train`, and `plait rank`, the process that it starts once per local rank; `plait data`."""

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli.common import LOST_RANK, Debug, PlanOverride, Run, Sets, print_line, report_errors
from plait.cli.multirank import check_limits, check_ranks, first_rank_first, rank_entry, report_once
from plait.cli.program import INTERRUPTED, outlive_output
from plait.data.sources import list_source
from plait.launchers import adopt_ranks
from plait.plan import Plan

if TYPE_CHECKING:
    from plait.comm.rank_monitor import RestartPolicy
    from plait.comm.world import World
    from plait.train.config import Recipe
    from plait.train.run_dir import RunDir

data = typer.Typer(help="Prepare text for training.", no_args_is_help=True)

_PREPARED = "plait: prepared"


@report_errors
def train(
    call: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file; with --resume, also the directory of a run.",
            show_default=False,
        ),
    ],
    plan: PlanOverride = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start. Default: the ranks of the plan.")
    ] = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Start from this checkpoint; with --resume, go back to it.", show_default=False
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Compare gradients with a one-process run before the first step.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Record a timeline of the pipeline in steps 3 to 5, as JSON.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model as a recipe says, on local ranks, or on those of torchrun, mpirun or srun."""
    outlive_output()
    check_limits()
    sets = [*(sets or []), *(["run.probe=true"] if probe else [])]
    sets += [] if trace is None else [f"run.trace={json.dumps(str(trace))}"]
    if adopt_ranks():
        raise typer.Exit(_train_under_torchrun(recipe, sets, plan, ranks, resume, start, debug))
    _check_before_imports(recipe, sets, plan, ranks, resume)
    from plait.comm.launch import fork_ranks, launch_local
    from plait.train.prepare import prepare

    fork_ranks(rank_entry(call))
    # A single rank is started the same way as several: the same signals, errors and exit codes.
    with contextlib.ExitStack() as lock:
        prepared = prepare(recipe, sets=sets, plan=plan, resume=resume, start=start, ranks=ranks, lock=lock)
        words = ["rank", str(prepared.dir.path), *(["--debug"] if debug else [])]
        code = LOST_RANK
        try:
            policy = _restart_policy(prepared.plan, prepared.recipe)
            code = launch_local(
                prepared.plan.num_ranks, words, save_s=prepared.recipe.run.save_s, policy=policy
            )
        finally:
            if code and not resume:
                _discard_unused(prepared.dir, start)
    raise typer.Exit(code)


def _restart_policy(plan: Plan, recipe: "Recipe") -> "RestartPolicy":
    from plait.comm.rank_monitor import RestartPolicy

    if not plan.num_servers:
        return RestartPolicy()
    from plait.server.job import restart_policy

    return restart_policy(plan, recipe.run.max_restarts)


def _check_before_imports(
    source: Path, sets: list[str], plan: str | None, ranks: int | None, resume: bool
) -> None:
    """Report errors that need no torch before it is imported."""
    from plait.data.config import INDEX
    from plait.train.config import check_batches, read_recipe

    if resume or source.is_dir():
        return
    recipe = read_recipe(source, sets, plan)
    parsed = Plan.parse(recipe.plan)
    if ranks is not None or parsed.dp:  # else by the devices
        num_ranks = ranks or parsed.num_ranks
        resolved = parsed.resolved(num_ranks)
        resolved.check_ranks(num_ranks)
        check_batches(recipe, resolved)
    if not (recipe.data.dir / INDEX).exists():
        for name in recipe.data.sources:
            if not name.startswith("hf:"):
                list_source(name)


@report_errors
def rank(run: Run, debug: Debug = False) -> None:
    """Run one rank of a run that `plait train` has prepared."""
    from plait.comm.launch import end_with_parent

    outlive_output()
    end_with_parent()
    from plait.train.run_dir import RunDir

    with first_rank_first():
        recipe = RunDir(run).read_recipe()
        world = _connect(recipe)
    raise typer.Exit(_train_on_rank(recipe, world, debug))


def _train_under_torchrun(
    source: Path,
    sets: list[str],
    plan: str | None,
    ranks: int | None,
    resume: bool,
    start: Path | None,
    debug: bool,
) -> int:
    """Prepare the run on rank 0, while the others wait however long the data takes; then train."""
    from plait.train.config import read_recipe
    from plait.train.prepare import prepare
    from plait.train.run_dir import RunDir, is_later_attempt

    with first_rank_first():
        check_ranks(ranks)
        recipe = (
            RunDir(source).read_recipe(sets, plan) if source.is_dir() else read_recipe(source, sets, plan)
        )
        world = _connect(recipe)
    run = RunDir(recipe.run.dir if not source.is_dir() else source)
    with contextlib.ExitStack() as lock:
        if world.rank == 0:
            if is_later_attempt(run):
                resume, start = True, None
            prepare(
                source,
                sets=sets,
                plan=plan,
                resume=resume,
                start=start,
                ranks=world.size,
                local=False,
                lock=lock,
            )
            world.store.set(_PREPARED)
        world.store.wait_for(_PREPARED)
        code = LOST_RANK
        try:
            code = _train_on_rank(run.read_recipe(), world, debug)
        finally:
            if code and not resume and world.rank == 0:  # whichever rank failed
                _discard_unused(run, start)
    return code


def _discard_unused(run: "RunDir", start: Path | None) -> None:
    from plait.train.prepare import discard_unused

    with contextlib.suppress(OSError):  # the run's own error is the one to report
        aside = discard_unused(run, start)
        if aside is not None:
            print_line(f"no step was taken: {run.path} is renamed to {aside}", file=sys.stderr)


def _connect(recipe: "Recipe") -> "World":
    from plait.comm.world import connect
    from plait.engine.numerics import set_numerics

    set_numerics(Plan.parse(recipe.plan))
    run, plan = recipe.run, Plan.parse(recipe.plan)
    if plan.num_servers:
        from plait.server.job import join_job, process_world

        process = join_job(plan, run.timeout_s, ends_with_first=True)
        return process_world(process, shares_memory=run.transport != "gloo")
    device = None if run.device == "auto" else run.device
    return connect(timeout_s=run.timeout_s, device=device, transport=run.transport)


def _train_on_rank(recipe: "Recipe", world: "World", debug: bool) -> int:
    from plait.train.trainer import train

    def run() -> int:
        return INTERRUPTED if train(recipe, world) == signal.SIGINT else 0

    return report_once(run, world, debug=debug)


@data.callback()
def _data() -> None:
    """Prepare text for training."""


@data.command()
@report_errors
def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)],
    sets: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of data.dir.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Tokenize the sources of a recipe into data.dir. `plait train` does so too where tokens are missing."""
    from plait.train.config import read_recipe

    values = read_recipe(recipe, sets or [])
    from plait.data.build import build as build_tokens

    store = build_tokens(values.data, values.tokenizer, force=force)
    print_line(f"{values.data.dir}: {store.train.num_tokens:,} training tokens,", end=" ")
    print_line(f"{store.validation.num_tokens:,} validation tokens, vocabulary {store.index.vocab_size:,}")
    if store.index.skipped:
        print_line(f"left out, as it is not text: {store.index.skipped}")
    print_line(f"content {store.digest}")


@data.command()
@report_errors
def show(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)],
    sets: Sets = None,
    row: Annotated[int, typer.Option("--row", help="The first one, from 0 on.")] = 0,
    num: Annotated[int, typer.Option("--num", min=1, help="Number of documents.")] = 3,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Print training documents of a recipe, with the trained tokens in colour, or between « and »."""
    from rich.console import Console

    from plait.train.config import read_recipe

    values = read_recipe(recipe, sets or [])
    from plait.data.build import build as build_tokens
    from plait.data.show import show_documents

    store = build_tokens(values.data, values.tokenizer)
    show_documents(store, Console(soft_wrap=True), first=row, number=num)
