"""`plait bench`: the collectives of this machine, and the latency breakdown of a DDP step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from plait.bench.ddp_request import CAPS, MODELS, PRECISIONS, TRANSPORT_CHOICES, DdpRequest, parse_caps
from plait.bench.request import (
    BUDGET_S,
    DTYPES,
    STORAGES,
    Request,
    available_bytes,
    check_memory,
    check_num_ranks,
    parse_collectives,
    parse_sizes,
)
from plait.cli.common import Debug, Json, Png, check_outputs, report_errors, write_json_output, write_output
from plait.cli.multirank import check_ranks, first_rank_first, report_once
from plait.plan.cost_model import COLLECTIVES, TRANSPORTS
from plait.plan.host_profile import check_writable, save

if TYPE_CHECKING:
    from plait.bench.collectives import Measurement
    from plait.bench.ddp import Breakdown
    from plait.comm.world import World

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)

T = TypeVar("T")

_RANKS = 2
_COLLECTIVE_HELP = f"Any of {', '.join(COLLECTIVES)}; repeatable, or separated by commas. Default: all."


@bench.callback()
def _bench() -> None:
    """Measure this machine."""


@bench.command()
@report_errors
def collectives(
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start. Default: 2.", show_default=False)
    ] = None,
    collective: Annotated[list[str] | None, typer.Option(help=_COLLECTIVE_HELP, show_default=False)] = None,
    sizes: Annotated[
        str, typer.Option(help="MIN:MAX by powers of 4, or a list separated by commas.")
    ] = "1K:256M",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    storage: Annotated[
        str,
        typer.Option(help=f"Allocator of the tensors, the transport's or torch's: {', '.join(STORAGES)}."),
    ] = "owned",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds. Default: as many as fit into --budget.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for, if three rounds fit.")] = BUDGET_S,
    json: Json = None,
    png: Png = None,
    profile: Annotated[
        Path | None, typer.Option(help="The profile of this host. Default: in ~/.cache/plait/profiles.")
    ] = None,
    is_saved: Annotated[
        bool, typer.Option("--save/--no-save", help="Save the fitted lines in the profile.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Time the collectives at every size, on local ranks or on the ranks of torchrun."""
    outputs = {"--json": json, "--png": png}
    with first_rank_first():
        request = Request(
            parse_collectives(collective or []), parse_sizes(sizes), transport, dtype, storage, rounds, budget
        )
        num_ranks, local_ranks = _num_ranks(ranks)
        check_outputs(outputs)
        if is_saved:
            check_writable(profile)
        from plait.bench.collectives import device_for, measure
        from plait.comm.launch import end_with_parent, launch_local
        from plait.comm.world import connect

        device = device_for(transport, local_ranks)
        check_memory(request, local_ranks, available_bytes())

        end_with_parent()
        if "WORLD_SIZE" not in os.environ:
            # The ranks get the same command line, and WORLD_SIZE.
            raise typer.Exit(launch_local(num_ranks, _words(request, outputs, profile, is_saved, debug)))
        world = connect(transport=transport, device=device)

    def run() -> int:
        measurement = _with_progress(world, lambda report: measure(world, request, report))
        if world.rank == 0:
            _show(measurement, json=json, png=png)
            if is_saved:
                _save(measurement, profile)
        return 0

    raise typer.Exit(report_once(run, world, debug=debug))


@bench.command()
@report_errors
def ddp(
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start. Default: 2.", show_default=False)
    ] = None,
    transport: Annotated[
        str, typer.Option(help=f"Transport of the gradients: {', '.join(TRANSPORT_CHOICES)}.")
    ] = "both",
    caps: Annotated[
        str,
        typer.Option(help='Bucket sizes, separated by commas; "one" bucket, or one for "each" gradient.'),
    ] = CAPS,
    model: Annotated[str, typer.Option(help=f"A Llama: {', '.join(MODELS)}.")] = "small",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Sequences per rank.")] = 2,
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    rounds: Annotated[int, typer.Option(help="Steps of each variant.")] = 9,
    json: Json = None,
    png: Png = None,
    debug: Debug = False,
) -> None:
    """Break down the step time of DistributedDataParallel by bucket size and transport, on CPU ranks."""
    outputs = {"--json": json, "--png": png}
    with first_rank_first():
        request = DdpRequest(parse_caps(caps), transport, model, precision, batch, sequence, rounds)
        num_ranks, local_ranks = _num_ranks(ranks)
        check_outputs(outputs)
        from plait.bench.ddp import check_ddp_memory, measure_ddp
        from plait.comm.launch import end_with_parent, launch_local
        from plait.comm.world import connect

        check_ddp_memory(request, local_ranks, available_bytes())
        end_with_parent()
        if "WORLD_SIZE" not in os.environ:
            raise typer.Exit(launch_local(num_ranks, _ddp_words(request, caps, outputs, debug)))
        world = connect(transport="gloo" if transport == "group" else "host", device="cpu")

    def run() -> int:
        breakdown = _with_progress(world, lambda report: measure_ddp(world, request, report))
        if world.rank == 0:
            _show_breakdown(breakdown, json=json, png=png)
        return 0

    raise typer.Exit(report_once(run, world, debug=debug))


def _num_ranks(requested: int | None) -> tuple[int, int]:
    """Return the number of ranks, and of those on this host. Raises ConfigError, PlanError."""
    if "WORLD_SIZE" not in os.environ:
        size = local_size = _RANKS if requested is None else requested
    else:
        check_ranks(requested)
        size = int(os.environ["WORLD_SIZE"])
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    check_num_ranks(size)
    return size, local_size


def _words(
    request: Request, outputs: dict[str, Path | None], profile: Path | None, is_saved: bool, debug: bool
) -> list[str]:
    """Return the same command line for the ranks."""
    values: dict[str, Any] = {
        "--transport": request.backend,
        "--collective": ",".join(request.collectives),
        "--sizes": ",".join(map(str, request.sizes)),
        "--dtype": request.dtype,
        "--storage": request.storage,
        "--rounds": request.rounds,
        "--budget": request.budget_s,
        **outputs,
        "--profile": profile,
    }
    return ["bench", "collectives", *_flags(values, debug), "--save" if is_saved else "--no-save"]


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


def _with_progress(world: "World", work: Callable[[Callable[[str], None]], T]) -> T:
    """Run `work`, show on rank 0 the progress that it reports, and return its result."""
    if world.rank != 0:
        return work(lambda _: None)
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        return work(status.update)


def _show(measurement: "Measurement", *, json: Path | None, png: Path | None) -> None:
    from rich.console import Console

    from plait.bench.report import draw, tables, to_json

    for table in tables(measurement):
        Console().print(table)
    ranks = f"{measurement.num_ranks} ranks on {_many(measurement.num_hosts, 'host')} ({measurement.device})"
    rounds = _many(measurement.rounds, "round")
    print(f"{ranks}, {measurement.dtype}; {rounds} in {measurement.seconds:.0f} s")
    if json is not None:
        write_json_output(json, to_json(measurement))
    write_output(png, lambda path: draw(measurement, path))


def _show_breakdown(breakdown: "Breakdown", *, json: Path | None, png: Path | None) -> None:
    from rich.console import Console

    from plait.bench.ddp_report import breakdown_json, breakdown_tables, draw_breakdown

    for table in breakdown_tables(breakdown):
        Console().print(table)
    rounds, hosts = _many(breakdown.request.rounds, "round"), _many(breakdown.num_hosts, "host")
    print(f"{breakdown.num_ranks} ranks on {hosts}; {rounds} in {breakdown.seconds:.0f} s")
    if json is not None:
        write_json_output(json, breakdown_json(breakdown))
    write_output(png, lambda path: draw_breakdown(breakdown, path))


def _save(measurement: "Measurement", profile: Path | None) -> None:

    if measurement.num_hosts > 1:
        print("not saved: a profile describes one host")
        return
    from plait.bench.report import to_profile

    print(f"saved: {save(to_profile(measurement), profile)}")


def _many(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
