"""`plait train`, and `plait rank`: what it starts once per rank."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.letters import CTRL_C, LOST_RANK, USER_MISTAKE, ends_with_letter, show_letter
from plait.cli.options import Debug, Run, Sets
from plait.comm import World, connect, launch_local
from plait.comm.launch import end_with_parent
from plait.errors import CommError, PlaitError, PlanError
from plait.plan import Plan
from plait.train.config import Recipe, read_recipe
from plait.train.loop import train as train_on_this_rank
from plait.train.run import RunDir, discard_unused, prepare

_PREPARED = "plait: prepared"
_LETTER, _LETTER_SHOWN = "plait: letter", "plait: letter shown"


@ends_with_letter
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
    debug: Debug = False,
) -> None:
    """Train what the recipe says: under torchrun on its ranks, else on local ranks that this starts."""
    sets = sets or []
    if "WORLD_SIZE" in os.environ:
        raise typer.Exit(_train_under_torchrun(recipe, sets, plan, ranks, resume, debug))
    # One rank is started like many: the same signals, letters and exit codes.
    prepared = prepare(recipe, sets=sets, plan=plan, resume=resume, ranks=ranks)
    run, num_ranks = prepared.run.dir, Plan.parse(prepared.plan).num_ranks
    words = ["rank", str(run), *(["--debug"] if debug else [])]
    code = launch_local(num_ranks, words, save_s=prepared.run.save_s)
    if code == USER_MISTAKE and not resume:
        discard_unused(RunDir(run))
    raise typer.Exit(code)


@ends_with_letter
def rank(run: Run, debug: Debug = False) -> None:
    """One rank of a run that `plait train` has prepared."""
    end_with_parent()
    recipe = RunDir(run).read_recipe()
    raise typer.Exit(_train_as_one_of_many(recipe, _join(recipe), debug))


def _train_under_torchrun(
    source: Path, sets: list[str], plan: str | None, ranks: int | None, resume: bool, debug: bool
) -> int:
    """The first rank prepares the run, the others wait for it however long the data takes."""
    try:
        _check_ranks(ranks)
        recipe = (
            RunDir(source).read_recipe(sets, plan) if source.is_dir() else read_recipe(source, sets, plan)
        )
        world = _join(recipe)
    except PlaitError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)  # the first rank finds the same, tells it, and torchrun then ends us all
        raise
    if world.rank == 0:
        prepare(source, sets=sets, plan=plan, resume=resume, ranks=world.size, local=False)
        world.announce(_PREPARED)
    world.wait_for(_PREPARED)
    run = RunDir(recipe.run.dir if not source.is_dir() else source)
    code = _train_as_one_of_many(run.read_recipe(), world, debug)
    if code and not resume and world.rank == 0:  # whichever rank found why
        discard_unused(run)
    return code


def _check_ranks(ranks: int | None) -> None:
    started = os.environ["WORLD_SIZE"]
    if ranks is not None and str(ranks) != started:
        raise PlanError(
            "torchrun has started another number of ranks",
            given=f"--ranks {ranks}, WORLD_SIZE={started}",
            hint="without --ranks, which is for ranks that plait starts",
        )


def _join(recipe: Recipe) -> World:
    run = recipe.run
    device = None if run.device == "auto" else run.device
    return connect(timeout_s=run.timeout_s, device=device, transport=run.transport)


def _train_as_one_of_many(recipe: Recipe, world: World, debug: bool) -> int:
    """The exit code. A mistake that every rank finds is told by one of them."""
    try:
        stopped_by = train_on_this_rank(recipe, world)
    except PlaitError as error:
        if world.claim(_LETTER):
            show_letter(error, debug=debug)
            world.announce(_LETTER_SHOWN)
        else:  # a rank that ends takes the others down: not before the letter is out
            world.wait_for(_LETTER_SHOWN)
        return LOST_RANK if isinstance(error, CommError) else USER_MISTAKE
    world.close()
    return CTRL_C if stopped_by == signal.SIGINT else 0
