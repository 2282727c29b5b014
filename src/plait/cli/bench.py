"""`plait bench`: the collectives of this machine, and the latency breakdown of a DDP step."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

import typer

from plait.bench.request import (
    ALGORITHM_CHOICES,
    BUDGET_S,
    CAPS,
    DTYPES,
    MODELS,
    PRECISIONS,
    STORAGES,
    TRANSPORT_CHOICES,
    DdpRequest,
    Request,
    available_bytes,
    check_algorithms,
    check_known,
    check_memory,
    check_num_ranks,
    parse_algorithms,
    parse_caps,
    parse_collectives,
    parse_sizes,
)
from plait.cli.common import (
    Debug,
    Html,
    Json,
    Png,
    check_outputs,
    print_line,
    report_errors,
    write_json_output,
    write_output,
)
from plait.cli.multirank import check_limits, check_ranks, first_rank_first, rank_entry, report_once
from plait.errors import ConfigError
from plait.launchers import adopt_ranks
from plait.pages.figures import Figure, write_figures
from plait.plan.cost_model import COLLECTIVES, TRANSPORTS
from plait.plan.host_profile import HostProfile, check_writable, save

if TYPE_CHECKING:
    from rich.table import Table

    from plait.bench.collectives import Measurement
    from plait.bench.ddp import Breakdown
    from plait.comm.world import World

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)

T = TypeVar("T")

_RANKS = 2
Ranks = Annotated[int | None, typer.Option(help="Local ranks to start. Default: 2.", show_default=False)]
Collective = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Any of {', '.join(COLLECTIVES)}; repeatable, or separated by commas. Default: all.",
        show_default=False,
    ),
]
Algorithm = Annotated[
    str,
    typer.Option(
        help=f"Any of {', '.join(ALGORITHM_CHOICES)}, by commas; chain:8: 8 segments; auto: the transport's."
    ),
]
Sizes = Annotated[str, typer.Option(help="MIN:MAX by powers of 4, or a list separated by commas.")]
Storage = Annotated[
    str,
    typer.Option(help=f"Allocator of the tensors, the transport's or torch's: {', '.join(STORAGES)}."),
]
Profile = Annotated[
    Path | None, typer.Option(help="The profile of this host. Default: in ~/.cache/plait/profiles.")
]


@bench.command()
@report_errors
def collectives(
    call: typer.Context,
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = "auto",
    ranks: Ranks = None,
    collective: Collective = None,
    algorithm: Algorithm = "auto",
    sizes: Sizes = "1K:256M",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    storage: Storage = "owned",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds. Default: as many as fit into --budget.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for, if three rounds fit.")] = BUDGET_S,
    json: Json = None,
    png: Png = None,
    html: Html = None,
    profile: Profile = None,
    is_saved: Annotated[
        bool, typer.Option("--save/--no-save", help="Save the fitted lines in the profile.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Time the collectives at every size, on local ranks or on the ranks of torchrun."""
    with first_rank_first():
        verbs, algorithms = parse_collectives(collective or []), parse_algorithms(algorithm)
        request = Request(verbs, parse_sizes(sizes), transport, dtype, storage, rounds, budget, algorithms)
        num_ranks, local_ranks = _num_ranks(ranks)
        check_outputs({"--json": json, "--png": png, "--html": html})
        if is_saved:
            check_writable(profile)
        from plait.bench.collectives import device_for, measure

        device = device_for(transport, local_ranks)
        check_algorithms(request, num_ranks, device)
        check_memory(request, local_ranks, available_bytes())
        world = _connect(call, num_ranks, transport, device)

    def run() -> int:
        found = _with_progress(world, lambda report: measure(world, request, report))
        if world.rank == 0:
            from plait.bench.report import collectives_figures, latency_fits, tables, to_json

            _show(tables(found), found, found.rounds, f" ({found.device}), {found.dtype}")
            write_json_output(json, to_json(found))
            _draw(collectives_figures(found), f"{num_ranks} ranks over {found.transport}", png, html)
            if is_saved and found.num_hosts > 1:
                print_line("not saved: a profile describes one host")
            elif is_saved:
                print_line(f"saved: {save(HostProfile(latency_fits(found)), profile)}")
        return 0

    raise typer.Exit(report_once(run, world, debug=debug))


@bench.command()
@report_errors
def ddp(
    call: typer.Context,
    ranks: Ranks = None,
    transport: Annotated[
        str, typer.Option(help=f"Transport of the gradients: {', '.join(TRANSPORT_CHOICES)}.")
    ] = "both",
    caps: Annotated[
        str, typer.Option(help='Bucket sizes, separated by commas; "one" bucket, or one for "each" gradient.')
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
    with first_rank_first():
        request = DdpRequest(parse_caps(caps), transport, model, precision, batch, sequence, rounds)
        num_ranks, local_ranks = _num_ranks(ranks)
        check_outputs({"--json": json, "--png": png})
        from plait.bench.ddp import check_ddp_memory, measure_ddp

        check_ddp_memory(request, local_ranks, available_bytes())
        world = _connect(call, num_ranks, "gloo" if transport == "group" else "host", "cpu")

    def run() -> int:
        found = _with_progress(world, lambda report: measure_ddp(world, request, report))
        if world.rank == 0:
            from plait.bench.report import breakdown_figure, breakdown_json, breakdown_tables

            _show(breakdown_tables(found), found, request.rounds)
            write_json_output(json, breakdown_json(found))
            write_output(png, lambda path: breakdown_figure(found).savefig(path, dpi=120))
        return 0

    raise typer.Exit(report_once(run, world, debug=debug))


@bench.command()
@report_errors
def device(
    call: typer.Context,
    ranks: Ranks = None,
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds of all measurements.", min=1)] = 5,
    profile: Profile = None,
    debug: Debug = False,
) -> None:
    """Measure products, memory, operators and collectives on all ranks at once, for `plait plan --cluster
    this:RANKS`."""
    with first_rank_first():
        num_ranks, local_ranks = _num_ranks(ranks, least=1)
        check_writable(profile)
        from plait.bench.collectives import device_for

        world = _connect(call, num_ranks, transport, device_for(transport, local_ranks))

    def run() -> int:
        from plait.bench.device import measure_device

        found = _with_progress(world, lambda report: measure_device(world, report, rounds))
        if world.rank == 0:
            from plait.bench.report import device_tables

            _print_tables(device_tables(found))
            saved = save(HostProfile({}, {found.num_ranks: found}), profile)
            hosts = max((hosts for _, _, hosts, *_ in found.network), default=1)
            name = f"{hosts}x{found.num_ranks}" if hosts > 1 else found.num_ranks
            print_line(f"saved: {saved}, for --cluster this:{name}")
        return 0

    raise typer.Exit(report_once(run, world, debug=debug))


@bench.command()
@report_errors
def scaling(
    plan: Annotated[str, typer.Option(help='A family of plans, with {n} for a degree: "dp={n} zero=1".')],
    numbers: Annotated[str, typer.Option(help="What {n} is in plans that run here, by commas.")] = "1,2",
    kind: Annotated[
        Literal["weak", "strong", "both"],
        typer.Option(help="The same sequences per rank (weak), or per step (strong)."),
    ] = "both",
    beyond: Annotated[str, typer.Option(help="What {n} is in plans that are only predicted.")] = "",
    cluster: Annotated[
        str | None,
        typer.Option(help="Predict on these machines, such as h100. Default: here.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help=f"A Llama: {', '.join(MODELS)}.")] = "small",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank; of the most ranks, if strong.")] = 2,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a plan in a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all plans.")] = 2,
    json: Json = None,
    png: Png = None,
    html: Html = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Measure how a family of plans scales over local ranks, and predict it beyond them."""
    check_known("--model", model, MODELS)
    check_outputs({"--json": json, "--png": png, "--html": html})
    check_limits()
    from plait.cli.bench_scaling import (
        Kind,
        ScalingRequest,
        measure_scaling,
        scaling_figures,
        scaling_json,
        scaling_tables,
    )

    kinds = get_args(Kind) if kind == "both" else (kind,)
    here, there = _numbers("--numbers", numbers), _numbers("--beyond", beyond) if beyond else ()
    request = ScalingRequest(
        plan, here, kinds, there, cluster, model, batch, sequence, steps, rounds
    )  # fmt: skip
    from rich.console import Console

    with Console(stderr=True, quiet=not sys.stderr.isatty()).status("starting") as status:
        points = measure_scaling(request, status.update)
    _print_tables(scaling_tables(request, points))
    write_json_output(json, scaling_json(request, points))
    _draw(scaling_figures(request, points), f"{request.family}, {request.model} Llama", png, html)


def _draw(figures: Sequence[Figure], title: str, png: Path | None, html: Path | None) -> None:
    from plait.pages.figures import draw_figures

    write_output(png, lambda path: draw_figures(figures, title, path))
    write_output(html, lambda path: write_figures(path, title, figures))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return distinct numbers of `1,2,4`. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        raise ConfigError(
            "not a list of numbers",
            given=f"{flag} {text}",
            expected="integers from 1 on, separated by commas",
            hint=f"{flag} 1,2,4",
        )
    return tuple(dict.fromkeys(map(int, words)))


def _num_ranks(requested: int | None, *, least: int = 2) -> tuple[int, int]:
    """Return the number of ranks, and of those on this host. Raises ConfigError, PlanError."""
    check_limits()
    if not adopt_ranks():
        size = local_size = _RANKS if requested is None else requested
    else:
        check_ranks(requested)
        size = int(os.environ["WORLD_SIZE"])
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    check_num_ranks(size, least)
    return size, local_size


def _connect(call: typer.Context, num_ranks: int, transport: str, device: str) -> "World":
    """Return the world of this rank; in the process that the user started, run the ranks and exit."""
    from plait.comm.launch import end_with_parent, fork_ranks, launch_local
    from plait.comm.world import connect

    end_with_parent()
    if not adopt_ranks():
        fork_ranks(rank_entry(call))
        raise typer.Exit(launch_local(num_ranks, sys.argv[1:]))  # the same command line, and WORLD_SIZE
    return connect(transport=transport, device=device)


def _with_progress(world: "World", work: Callable[[Callable[[str], None]], T]) -> T:
    """Run `work`, show on rank 0 the progress that it reports, and return its result."""
    if world.rank != 0:
        return work(lambda _: None)
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        return work(status.update)


def _show(tables: "list[Table]", found: "Measurement | Breakdown", rounds: int, what: str = "") -> None:
    """Print the tables, and a line about the setup."""
    from plait.tables import counted

    _print_tables(tables)
    ranks = f"{found.num_ranks} ranks on {counted(found.num_hosts, 'host')}"
    print_line(f"{ranks}{what}; {counted(rounds, 'round')} in {found.seconds:.0f} s")


def _print_tables(tables: "list[Table]") -> None:
    from rich.console import Console

    for table in tables:
        Console().print(table)
