"""`plait plan`: the best plan for a model on a cluster, the price of one, and where two differ."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.cli.common import (
    STDOUT,
    Debug,
    Html,
    Json,
    check_outputs,
    print_line,
    report_errors,
    write_json_output,
    write_page_output,
)
from plait.cli.multirank import report_once
from plait.errors import ConfigError, PlanError, shown
from plait.fileio import parse_json, read_text
from plait.launchers import adopt_ranks
from plait.plan import Plan
from plait.tables import counted, plain

if TYPE_CHECKING:
    from plait.comm.world import World
    from plait.planner import Cluster, ModelShape, RankedPlan, SearchResult, Workload
    from plait.planner.best_first import SearchCounts
    from plait.planner.calibrate import Run

_BATCH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KM]?)", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMBTG]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20}
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_EXAMPLE = "plait plan --model config.json --cluster dgx-h100:8 --batch-tokens 4M --seq 8192"


Model = Annotated[
    str | None,
    typer.Option(
        help='A config.json, a folder with one, a name (llama-3-8b), or "layers=32 hidden=4096 heads=32 ..."',
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        help="Such as dgx-h100:8 (hosts), h100:64 (devices), this:2x8, or a TOML file.", show_default=False
    ),
]
BatchTokens = Annotated[
    str | None, typer.Option(help="Tokens of a step; K and M are 1,024 and 1,048,576.", show_default=False)
]
Deadline = Annotated[
    str | None,
    typer.Option(help="Longest training, such as 30d: the fewest hosts that meet it.", show_default=False),
]
Measure = Annotated[
    int,
    typer.Option(
        min=0, help="Run this many of the best plans, with --cluster this:RANKS or this:HOSTSxRANKS."
    ),
]
Headroom = Annotated[
    float, typer.Option(min=0, max=0.9, help="Part of the devices' memory that plans leave free.")
]
Wide = Annotated[
    bool,
    typer.Option("--wide", help="Search up to 16 chunks, and recompute=every=2 and 4 too: twice the time."),
]
Seconds = Annotated[
    float, typer.Option(min=0, help="Processor time after which the search gives what it has found.")
]
Adapter = Annotated[
    str,
    typer.Option(
        metavar="r=RANK",
        help="LoRA of this rank on all linear layers of the blocks, over frozen weights (base=nf4 in --pin).",
        show_default=False,
    ),
]
Optimizer = Annotated[Literal["AdamW", "AdamW8bit"], typer.Option(help="AdamW8bit: states in 8 bits.")]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="A B", help="Compare two plans, part by part.", show_default=False),
]


@report_errors
def find(
    model: Model = None,
    cluster: ClusterName = None,
    batch_tokens: BatchTokens = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, whatever the model allows.")] = 2048,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the training, such as 15T.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of plans to show.")] = 10,
    objective: Annotated[Literal["time", "cost", "energy"], typer.Option(help="What is minimized.")] = "time",
    deadline: Deadline = None,
    pin: Annotated[str, typer.Option(help='Values that all plans have, such as "tp=8 zero=1".')] = "",
    plan: Annotated[str | None, typer.Option(help="Price this plan instead of searching.")] = None,
    compare: Compare = None,
    measure: Measure = 0,
    adapter: Adapter = "",
    optimizer: Optimizer = "AdamW",
    headroom: Headroom = 0.05,
    wide: Wide = False,
    seconds: Seconds = 60.0,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Find the best plan for a model on a cluster, without running anything."""
    check_outputs({"--json": json, "--html": html})
    _check_measured(measure, adapter, optimizer)
    if measure and adopt_ranks() and int(os.environ["RANK"]):
        raise typer.Exit(_on_all_ranks(_follow, debug=debug))
    shape, machine, work = _subject(model, cluster, batch_tokens, seq, adapter)
    total = None if tokens is None else read_count("--tokens", tokens)
    if texts := _texts(plan, compare):
        ranked_plans = [_price(text, shape, machine, work, total, optimizer) for text in texts]
        _show_prices(ranked_plans, json)
        _write_page(html, ranked_plans, {}, quiet=json == STDOUT)
        return
    from plait.planner import search
    from plait.planner.advice import advice
    from plait.planner.frontier import alternatives
    from plait.planner.workload import Software

    with _progress() as show:
        found = search(
            shape,
            machine,
            work,
            objective=objective,
            top=top,
            pins=pin,
            tokens=total,
            deadline_days=None if deadline is None else _days(deadline),
            software=Software(optimizer=optimizer),
            headroom=headroom,
            wide=wide,
            seconds=seconds,
            report=show,
        )
        choices = alternatives(found, show, of_degrees=html is not None)
    said = advice(found, machine, pin, headroom=headroom, objective=objective)
    _show(found, choices, said, json, html)
    if measure:
        _measure(model, found, machine, work, measure, debug=debug)


@contextmanager
def _progress() -> "Iterator[Callable[[SearchCounts], None]]":
    """Show a search's counts on a terminal, while entered."""
    from rich.console import Console

    with Console(stderr=True, quiet=not sys.stderr.isatty()).status("searching") as status:
        yield lambda counts: status.update(f"{counts.bounded:,} plans considered, {counts.priced:,} priced")


def _texts(plan: str | None, compare: tuple[str, str] | None) -> tuple[str, ...]:
    """Return the plans to price; () for a search."""
    if plan is not None and compare is not None:
        raise _not_both(plan, compare[0])
    return compare or ((plan,) if plan is not None else ())


def _show(
    found: "SearchResult",
    choices: "list[RankedPlan]",
    said: Iterator[str],
    json: Path | None,
    html: Path | None,
) -> None:
    """Print and write what a search found. `said`: sentences for the end."""
    from rich.console import Console

    from plait.planner.plan_report import search_json, search_tables

    values = search_json(found)
    write_json_output(json, values)
    if json != STDOUT:
        Console().print(*search_tables(found, choices), *map(plain, said), sep="\n")
    _write_page(html, choices, values, quiet=json == STDOUT)


def _check_measured(measure: int, adapter: str, optimizer: str) -> None:
    """Raise ConfigError for runs that --measure does not know."""
    if not measure or (not adapter and optimizer == "AdamW"):
        return
    raise ConfigError(
        "adapters and other optimizers cannot be measured",
        given="--measure " + (f"--adapter {adapter}" if adapter else f"--optimizer {optimizer}"),
        expected="a model of which all weights train, with AdamW",
        hint="no --measure",
    )


def _not_both(plan: str, other: str) -> ConfigError:
    return ConfigError(
        "--plan and --compare cannot be combined",
        given=f'--plan "{plan}" --compare "{other}"',
        expected="all plans after --compare",
        hint=f'--compare "{plan}" "{other}"',
    )


def _write_page(
    path: Path | None, ranked_plans: "list[RankedPlan]", values: dict[str, Any], *, quiet: bool
) -> None:
    """Write the page of priced plans, with the `values` of --json."""
    from plait.planner.plan_report import page_values, subject

    title, report = subject(ranked_plans[0]), sys.stderr if quiet else None
    write_page_output(path, "plan", title, lambda: values | page_values(ranked_plans), report=report)


def _measure(
    model: str | None,
    found: "SearchResult",
    cluster: "Cluster",
    work: "Workload",
    most: int,
    *,
    debug: bool,
) -> None:
    """Run the first plans on ranks that are started here, or on all that torchrun has started; print measured
    next to predicted times, and keep the constants that they determine. Raises ConfigError, PlaitError,
    before any run if the cluster is not this machine, or if it is not those ranks.
    """
    path = Path(model or "")
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            "only a model with a config.json can be run",
            given=f"--measure --model {model}",
            expected="a config.json, or a folder with one",
            hint="--model PATH, without --measure for other models",
        )
    ranks = cluster.num_devices
    if not cluster.device.product_rates:
        raise PlanError(
            "only plans on this machine can be measured",
            given=f"--cluster {cluster.name}",
            expected="a measured host",
            hint=f"plait bench device --ranks {ranks}, then --cluster this:{ranks}",
        )
    config, best = parse_json(read_text(path)), found.best[:most]
    started = os.environ.get("WORLD_SIZE", ranks if cluster.num_hosts == 1 else 1)
    if str(started) != str(ranks):
        raise PlanError(
            "the cluster is not the ranks that would run its plans",
            given=f"--cluster {cluster.name}, {counted(int(started), 'rank')}",
            expected=f"the {ranks} ranks of this cluster",
            hint=f"torchrun --nnodes {cluster.num_hosts} --nproc-per-node {cluster.host_size}",
        )
    if "WORLD_SIZE" not in os.environ:
        _compare(config, best, cluster, work, None)
        return
    raise typer.Exit(_on_all_ranks(partial(_compare, config, best, cluster, work), debug=debug))


def _on_all_ranks(run: "Callable[[World], None]", *, debug: bool) -> int:
    """Return the exit code of `run` on the ranks of torchrun."""
    from plait.comm.world import connect

    world = connect()

    def work() -> int:
        run(world)
        return 0

    return report_once(work, world, debug=debug)


def _follow(world: "World") -> None:
    from plait.bench.plans import follow

    follow(world)


def _compare(
    config: dict[str, Any],
    best: "Sequence[RankedPlan]",
    cluster: "Cluster",
    work: "Workload",
    world: "World | None",
) -> None:
    """Run these plans, print measured next to predicted times, and keep what they determine."""
    from rich.console import Console

    from plait.bench.plans import finish, step_seconds
    from plait.planner.calibrate import Run
    from plait.planner.model_shape import ModelShape
    from plait.planner.workload import Software
    from plait.tables import table

    shape = ModelShape.from_config(config)
    runs, rows = [], []
    for number, ranked in enumerate(best):
        plan, predicted_s = ranked.estimate.plan, ranked.estimate.step_s
        took_s = step_seconds(config, plan, sequence=work.sequence, batch=work.batch, world=world)
        runs.append(Run(number, "this machine", shape, (plan,), cluster, work, Software(), took_s))
        times = (f"{1e3 * predicted_s:,.1f}", f"{1e3 * took_s:,.1f}", f"{predicted_s / took_s - 1:+.0%}")
        rows.append((str(plan), *times))
    headings = ("plan", "predicted ms", "measured ms", "error")
    if world is not None:
        finish(world)
    Console().print(table("Measured steps", headings, rows, left=("plan",)))
    _refit(runs, cluster)


def _refit(runs: "list[Run]", cluster: "Cluster") -> None:
    """Fit the constants that these runs determine, keep them in the host's profile, and print them."""
    from plait.plan.host_profile import HostProfile, load, save
    from plait.planner.calibrate import determined, fit
    from plait.planner.cluster import profile_path_of
    from plait.planner.constants import Constants

    names = determined(runs, cluster.constants)
    fitted = fit(runs, cluster.constants, names, {})
    values = {name: getattr(fitted, name) for name in names}
    changes = [
        f"{name} {getattr(cluster.constants, name):.3g} -> {value:.3g}" for name, value in values.items()
    ]
    errors = [abs(run.estimate(fitted).step_s / run.step_s - 1) for run in runs if run.step_s]
    path = profile_path_of(cluster.name)
    speeds = load(path).devices
    any_gpu = next((ranks for ranks, speed in speeds.items() if speed.kind == "cuda"), cluster.host_size)
    ranks = cluster.host_size if cluster.host_size in speeds else any_gpu
    kept = replace(speeds[ranks], calibration={**speeds[ranks].calibration, **values})
    saved = save(HostProfile({}, {ranks: kept}), path)
    what = f"{counted(len(runs), 'plan')} determine {len(names)} of {len(Constants.names())} constants"
    print_line(f"{what}: {', '.join(changes) or 'none'}")
    print_line(f"error with them: {sum(errors) / len(errors):.0%} on average")
    print_line(f"saved: {saved}, for --cluster {cluster.name}")


def _show_prices(ranked_plans: "list[RankedPlan]", json: Path | None) -> None:
    """Print one plan's price, or compare two."""
    from rich.console import Console

    from plait.planner import plan_report

    if json is not None:
        values = [plan_report.to_json(ranked) for ranked in ranked_plans]
        write_json_output(json, values if len(values) > 1 else values[0])
    if json == STDOUT:
        return
    if len(ranked_plans) > 1:
        Console().print(plan_report.compare_table(*ranked_plans))
    else:
        Console().print(*plan_report.estimate_tables(ranked_plans[0]), sep="\n")


def _subject(
    model: str | None, cluster_text: str | None, batch_tokens: str | None, sequence: int, adapter: str
) -> "tuple[ModelShape, Cluster, Workload]":
    """Return the model, the cluster and the work of a step. Raises ConfigError."""
    if model is None or cluster_text is None or batch_tokens is None:
        given = {"--model": model, "--cluster": cluster_text, "--batch-tokens": batch_tokens}
        missing = [flag for flag, value in given.items() if value is None]
        raise ConfigError(
            "`plait plan` needs --model, --cluster and --batch-tokens",
            given=f"no {' and no '.join(missing)}",
            expected="a model, a cluster and a batch",
            hint=_EXAMPLE,
        )
    from plait.planner import ModelShape, Workload, cluster

    shape = ModelShape.named(model)
    if adapter:
        shape = shape.with_adapter(_adapter_rank(adapter))
    num = _batch_tokens(batch_tokens)
    if num < sequence or num % sequence:
        nearest = max(1, round(num / sequence))
        raise ConfigError(
            "the batch is not a number of full sequences",
            given=f"--batch-tokens {batch_tokens} ({num:,} tokens) --seq {sequence}",
            expected=f"a multiple of {sequence:,}",
            hint=f"--batch-tokens {nearest * sequence} ({counted(nearest, 'sequence')})",
        )
    return shape, cluster(cluster_text), Workload(sequence, num // sequence)


def _price(
    text: str,
    model: "ModelShape",
    cluster: "Cluster",
    work: "Workload",
    tokens: float | None,
    optimizer: Literal["AdamW", "AdamW8bit"],
) -> "RankedPlan":
    from plait.planner import RankedPlan, estimate_step
    from plait.planner.space import DEFAULT_PRECISION
    from plait.planner.workload import Software

    values = {"precision": DEFAULT_PRECISION} | Plan.read_values(text)
    plan = Plan(**values).resolved(cluster.num_devices)
    if plan.num_ranks < cluster.num_devices and plan.num_ranks % cluster.domain_size == 0:
        cluster = replace(
            cluster, num_hosts=plan.num_ranks // cluster.host_size
        )  # the other hosts are not used
    plan.check_ranks(cluster.num_devices)
    software = Software(optimizer=optimizer)
    estimate = estimate_step(model, plan, cluster, work, software)
    return RankedPlan(estimate, model, cluster, work, tokens, software)


def _adapter_rank(text: str) -> int:
    """Read `r=16`. Raises ConfigError: other keys of an adapter are not priced."""
    match = re.fullmatch(r"r=([1-9][0-9]{0,4})", text.strip())
    if match is None:
        raise ConfigError(
            "not the rank of an adapter",
            given=f"--adapter {shown(text)}",
            expected="r=RANK: LoRA of one rank on all linear layers of the blocks",
            hint="--adapter r=16; plait explain RECIPE knows all keys of [adapter]",
        )
    return int(match[1])


def _batch_tokens(text: str) -> int:
    match = _BATCH.fullmatch(text)
    num = float(match[1]) * _BINARY[match[2].upper()] if match else 0.0
    if not 1 <= num <= 1e12 or num != int(num):
        raise ConfigError(
            "not a number of tokens",
            given=f"--batch-tokens {text}",
            expected="an integer, or a number of millions (M: 1,048,576)",
            hint="--batch-tokens 4M, or 4194304",
        )
    return int(num)


def read_count(flag: str, text: str) -> float:
    """Read `70B` or `1.5e12`. Raises ConfigError."""
    match = _NUMBER.fullmatch(text.strip())
    count = float(match[1]) * _FACTORS[match[2].upper()] if match else 0.0
    if not 0 < count <= 1e21:
        raise ConfigError(
            f"{flag} is not a number", given=text, expected="digits and K, M, B or T, up to 1e21", hint="70B"
        )
    return count


def _days(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([hdw])", text)
    if match is None or not float(match[1]):
        raise ConfigError(
            "not a duration",
            given=f"--deadline {text}",
            expected="hours, days or weeks",
            hint="--deadline 30d",
        )
    return float(match[1]) * _DAYS[match[2]]
