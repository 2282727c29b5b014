"""`plait train`, and `plait rank`: what it starts once per rank."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.common import CTRL_C, USER_MISTAKE, Debug, Run, Sets, report_errors
from plait.cli.multirank import check_ranks, first_rank_first, told_by_one
from plait.comm import World, connect, launch_local
from plait.comm.launch import end_with_parent
from plait.plan import Plan
from plait.train.config import Recipe, read_recipe
from plait.train.prepare import num_local_ranks, prepare
from plait.train.run_dir import RunDir, discard_unused, is_later_attempt
from plait.train.trainer import train as train_on_this_rank

_PREPARED = "plait: prepared"


@report_errors
def train(
    recipe: Annotated[
        Path, typer.Argument(help="A TOML file; with --resume also a run's directory.", show_default=False)
    ],
    plan: Annotated[str | None, typer.Option(help='Put a plan over the recipe\'s, e.g. "dp=4".')] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start. By default as many as the plan has.")
    ] = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A checkpoint: go back to it, with --resume; else begin with it.",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Before the first step, compare with the model in one process.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Record when the ranks of a pipeline do what in steps 3 to 5: JSON.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train what the recipe says: under torchrun on its ranks, else on local ranks that this starts."""
    sets = [*(sets or []), *(["run.probe=true"] if probe else [])]
    sets += [] if trace is None else [f"run.trace={json.dumps(str(trace))}"]
    if "WORLD_SIZE" in os.environ:
        raise typer.Exit(_train_under_torchrun(recipe, sets, plan, ranks, resume, start, debug))
    # One rank is started like many: the same signals, letters and exit codes.
    with contextlib.ExitStack() as alone:
        prepared = prepare(recipe, sets=sets, plan=plan, resume=resume, start=start, ranks=ranks, lock=alone)
        run, asked = prepared.run.dir, Plan.parse(prepared.plan)
        num_ranks = ranks if ranks is not None else num_local_ranks(asked, prepared.run.device)
        words = ["rank", str(run), *(["--debug"] if debug else [])]
        code = launch_local(num_ranks, words, save_s=prepared.run.save_s)
    if code == USER_MISTAKE and not resume:
        discard_unused(RunDir(run))
    raise typer.Exit(code)


@report_errors
def rank(run: Run, debug: Debug = False) -> None:
    """One rank of a run that `plait train` has prepared."""
    end_with_parent()
    recipe = RunDir(run).read_recipe()
    raise typer.Exit(_train_as_one_of_many(recipe, _join(recipe), debug))


def _train_under_torchrun(
    source: Path,
    sets: list[str],
    plan: str | None,
    ranks: int | None,
    resume: bool,
    start: Path | None,
    debug: bool,
) -> int:
    """The first rank prepares the run, the others wait for it however long the data takes."""
    with first_rank_first():
        check_ranks(ranks)
        recipe = (
            RunDir(source).read_recipe(sets, plan) if source.is_dir() else read_recipe(source, sets, plan)
        )
        world = _join(recipe)
    run = RunDir(recipe.run.dir if not source.is_dir() else source)
    with contextlib.ExitStack() as alone:
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
                lock=alone,
            )
            world.announce(_PREPARED)
        world.wait_for(_PREPARED)
        code = _train_as_one_of_many(run.read_recipe(), world, debug)
    if code and not resume and world.rank == 0:  # whichever rank found why
        discard_unused(run)
    return code


def _join(recipe: Recipe) -> World:
    run = recipe.run
    device = None if run.device == "auto" else run.device
    return connect(timeout_s=run.timeout_s, device=device, transport=run.transport)


def _train_as_one_of_many(recipe: Recipe, world: World, debug: bool) -> int:
    def run() -> int:
        return CTRL_C if train_on_this_rank(recipe, world) == signal.SIGINT else 0

    return told_by_one(run, world, debug=debug)
