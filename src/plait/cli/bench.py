"""`plait bench`: what ranks of this machine need to talk to each other, and where a DDP step's time goes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from plait.bench import (
    BUDGET_S,
    CAPS,
    CARRIERS,
    DTYPES,
    MODELS,
    PRECISIONS,
    STORAGES,
    Breakdown,
    DdpRequest,
    Measurement,
    Request,
    available_bytes,
    breakdown_json,
    breakdown_tables,
    check_ddp_memory,
    check_memory,
    check_num_ranks,
    device_for,
    draw,
    draw_breakdown,
    measure,
    measure_ddp,
    parse_caps,
    parse_sizes,
    parse_verbs,
    profile_of,
    tables,
    to_json,
)
from plait.cli.common import Debug, check_picture, report_errors, write_output
from plait.cli.multirank import check_ranks, first_rank_first, told_by_one
from plait.comm import TRANSPORTS, World, connect, launch_local
from plait.comm.launch import end_with_parent
from plait.fileio import check_output_paths, write_json
from plait.plan.cost_model import COLLECTIVES
from plait.plan.host_profile import check_writable, save

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)

T = TypeVar("T")

_RANKS = 2
_VERB_HELP = f"One of {', '.join(COLLECTIVES)}; may be given several times, or with commas. By default all."


@bench.callback()
def _bench() -> None:
    """Measure this machine."""


@bench.command()
@report_errors
def collectives(
    backend: Annotated[str, typer.Option(help=f"The transport: {', '.join(TRANSPORTS)}.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start: by default 2.", show_default=False)
    ] = None,
    verb: Annotated[list[str] | None, typer.Option(help=_VERB_HELP, show_default=False)] = None,
    sizes: Annotated[str, typer.Option(help="MIN:MAX by powers of 4, or a list with commas.")] = "1K:256M",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    storage: Annotated[
        str, typer.Option(help=f"Whose the tensors are, the transport's or not: {', '.join(STORAGES)}.")
    ] = "owned",
    rounds: Annotated[
        int | None, typer.Option(help="By default as many as --budget allows.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure in, if three rounds fit.")] = BUDGET_S,
    json: Annotated[Path | None, typer.Option(help="Write times and facts to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into this file, e.g. bench.png.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The host's profile, where not in ~/.cache/plait/profiles.")
    ] = None,
    to_save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the lines in the profile.")] = True,
    debug: Debug = False,
) -> None:
    """Time every verb at every size: under torchrun on its ranks, else on local ranks that this starts."""
    end_with_parent()
    outputs = {"--json": json, "--plot": plot}
    with first_rank_first():
        request = Request(
            parse_verbs(verb or []), parse_sizes(sizes), backend, dtype, storage, rounds, budget
        )
        num_ranks, local_ranks = _num_ranks(ranks)
        check_num_ranks(num_ranks)
        device = device_for(backend, local_ranks)
        check_memory(request, local_ranks, available_bytes())
        check_output_paths(outputs)
        check_picture(plot)
        if to_save:
            check_writable(profile)
        if "WORLD_SIZE" not in os.environ:
            # The ranks read the same words, and find WORLD_SIZE.
            raise typer.Exit(launch_local(num_ranks, _words(request, outputs, profile, to_save, debug)))
        world = connect(transport=backend, device=device)

    def run() -> int:
        found = _told_how_far(world, lambda tell: measure(world, request, tell))
        if world.rank == 0:
            _show(found, json=json, plot=plot)
            if to_save:
                _keep(found, profile)
        return 0

    raise typer.Exit(told_by_one(run, world, debug=debug))


@bench.command()
@report_errors
def ddp(
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start: by default 2.", show_default=False)
    ] = None,
    transport: Annotated[str, typer.Option(help=f"What carries gradients: {', '.join(CARRIERS)}.")] = "both",
    caps: Annotated[
        str, typer.Option(help='Where buckets close, with commas; "one" bucket, or one for "each" gradient.')
    ] = CAPS,
    model: Annotated[str, typer.Option(help=f"A Llama: {', '.join(MODELS)}.")] = "small",
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Sequences per rank.")] = 2,
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    rounds: Annotated[int, typer.Option(help="Steps of each variant.")] = 9,
    json: Annotated[Path | None, typer.Option(help="Write times and facts to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into this file, e.g. ddp.png.")] = None,
    debug: Debug = False,
) -> None:
    """Take DistributedDataParallel's step apart, by buckets and by what carries them: on CPU ranks."""
    end_with_parent()
    outputs = {"--json": json, "--plot": plot}
    with first_rank_first():
        request = DdpRequest(parse_caps(caps), transport, model, precision, batch, sequence, rounds)
        num_ranks, local_ranks = _num_ranks(ranks)
        check_num_ranks(num_ranks)
        check_ddp_memory(request, local_ranks, available_bytes())
        check_output_paths(outputs)
        check_picture(plot)
        if "WORLD_SIZE" not in os.environ:
            raise typer.Exit(launch_local(num_ranks, _ddp_words(request, caps, outputs, debug)))
        world = connect(transport="gloo" if transport == "group" else "host", device="cpu")

    def run() -> int:
        found = _told_how_far(world, lambda tell: measure_ddp(world, request, tell))
        if world.rank == 0:
            _show_breakdown(found, json=json, plot=plot)
        return 0

    raise typer.Exit(told_by_one(run, world, debug=debug))


def _num_ranks(asked: int | None) -> tuple[int, int]:
    """In all, and on this host."""
    if "WORLD_SIZE" not in os.environ:
        return (_RANKS, _RANKS) if asked is None else (asked, asked)
    check_ranks(asked)
    size = int(os.environ["WORLD_SIZE"])
    return size, int(os.environ.get("LOCAL_WORLD_SIZE", size))


def _words(
    request: Request, outputs: dict[str, Path | None], profile: Path | None, to_save: bool, debug: bool
) -> list[str]:
    """The command line that says the same."""
    values: dict[str, Any] = {
        "--backend": request.backend,
        "--verb": ",".join(request.verbs),
        "--sizes": ",".join(map(str, request.sizes)),
        "--dtype": request.dtype,
        "--storage": request.storage,
        "--rounds": request.rounds,
        "--budget": request.budget_s,
        **outputs,
        "--profile": profile,
    }
    return ["bench", "collectives", *_flags(values, debug), "--save" if to_save else "--no-save"]


def _ddp_words(request: DdpRequest, caps: str, outputs: dict[str, Path | None], debug: bool) -> list[str]:
    values: dict[str, Any] = {
        "--transport": request.transport,
        "--caps": caps,
        "--model": request.model,
        "--precision": request.precision,
        "--batch": request.sequences,
        "--sequence": request.length,
        "--rounds": request.rounds,
        **outputs,
    }
    return ["bench", "ddp", *_flags(values, debug)]


def _flags(values: dict[str, Any], debug: bool) -> list[str]:
    given = [str(word) for flag, value in values.items() if value is not None for word in (flag, value)]
    return [*given, *["--debug"] * debug]


def _told_how_far(world: World, work: Callable[[Callable[[str], None]], T]) -> T:
    """What `work` returns; what it tells meanwhile is shown by the first rank."""
    if world.rank != 0:
        return work(lambda _: None)
    with Console(stderr=True).status("starting") as status:
        return work(status.update)


def _show(found: Measurement, *, json: Path | None, plot: Path | None) -> None:
    for table in tables(found):
        Console().print(table)
    where = f"{found.num_ranks} ranks on {_many(found.num_hosts, 'host')}"
    print(f"{where} ({found.device}), {found.dtype}; {_many(found.rounds, 'round')} in {found.seconds:.0f} s")
    write_output(json, lambda path: write_json(path, to_json(found)))
    write_output(plot, lambda path: draw(found, path))


def _show_breakdown(found: Breakdown, *, json: Path | None, plot: Path | None) -> None:
    for table in breakdown_tables(found):
        Console().print(table)
    rounds, hosts = _many(found.request.rounds, "round"), _many(found.num_hosts, "host")
    print(f"{found.num_ranks} ranks on {hosts}; {rounds} in {found.seconds:.0f} s")
    write_output(json, lambda path: write_json(path, breakdown_json(found)))
    write_output(plot, lambda path: draw_breakdown(found, path))


def _keep(found: Measurement, profile: Path | None) -> None:
    if found.num_hosts > 1:
        print("not saved: a profile is of one host")
        return
    print(f"saved: {save(profile_of(found), profile)}")


def _many(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
