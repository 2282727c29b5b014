"""A recipe's plan explained before it runs, and a run's beside what it measured.

What `plait explain` prints: the plan, what ranks hold and say, and beside it what a run measured.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from plait.data.tokenizer import read_tokenizer
from plait.errors import ConfigError
from plait.estimate.dry_run import Cluster
from plait.estimate.explain import Explanation, RankClass, explain
from plait.models import read_config
from plait.plan import AXES, CommCount, CommKey, Plan, sum_traffic
from plait.plan.comm_log import to_rows
from plait.plan.estimate.traffic import ring_bytes
from plait.train.config import Recipe
from plait.train.measurements import Measurements
from plait.train.model import check_config, model_on_meta
from plait.train.report import memory_table, used_categories

_MOST = 4  # kinds of ranks whose traffic is printed, if nobody asks for one
_LANE = re.compile(r"(activations|gradients) from stage rank")
_OF = {
    "layers": "cut layers",
    "parameters": "parameters",
    "gradients": "gradients",
    "stages": "stages",
    "step": "loss, norm",
}


def show(
    explanation: Explanation, measured: Measurements | None, console: Console, *, rank: int | None = None
) -> None:
    """All tables; of what is said, that of `rank` alone if it is given."""
    console.print(plan_table(explanation, measured))
    console.print(holdings_table(explanation))
    if measured is None:
        console.print(memory_of_kinds(explanation))
    chosen = explanation.rank_classes if rank is None else (explanation.of_rank(rank),)
    for row in chosen[:_MOST]:
        if measured is None:
            console.print(traffic_table(explanation, row))
        else:
            _show_beside(row, measured, console)
    if len(chosen) > _MOST:
        more = len(chosen) - _MOST
        console.print(f"{more} more kinds of ranks: --rank N shows one, --json FILE has them all")


def plan_table(explanation: Explanation, measured: Measurements | None) -> Table:
    """The plan as a whole."""
    plan, grid = explanation.plan, explanation.grid
    table = Table(title="this plan", show_header=False, title_justify="left")
    table.add_column()
    table.add_column()
    axes = ("pp", "replicate", "shard", "row", "col")
    degrees = " x ".join(f"{axis} {grid.degree(axis)}" for axis in axes if grid.degree(axis) > 1)
    ranks = "1 rank" if grid.num_ranks == 1 else f"{grid.num_ranks:,} ranks: {degrees}"
    table.add_row("plan", str(plan))
    table.add_row("grid", ranks)
    table.add_row("model", f"{explanation.model}, {explanation.num_parameters:,} parameters")
    shape = " x ".join(map(str, explanation.micro_shape))
    table.add_row("micro-batch", f"{shape}, {plan.micro} a step on each data rank")
    table.add_row("transport", explanation.transport)
    if plan.pp > 1:
        bubble = f"{explanation.bubble:.1%} of the time, if stages are alike"
        if measured is not None and measured.bubble is not None:
            bubble += f"; {measured.bubble:.1%} measured"
        table.add_row("schedule", f"{plan.schedule}, {explanation.num_stages} stages")
        table.add_row("bubble", bubble)
    return table


def holdings_table(explanation: Explanation) -> Table:
    """Who has what of the model: a line for ranks that are alike."""
    table = Table(
        title="what a rank holds",
        title_justify="left",
        caption="boxes: of whole tensors, which its parameters are\n"
        "updated: elements of its own range, padding included",
        caption_justify="left",
    )
    for heading in ("ranks", "blocks"):
        table.add_column(heading)
    for heading in ("parameters", "boxes", "updated"):
        table.add_column(heading, justify="right")
    for row in explanation.rank_classes:
        numbers = (f"{number:,}" for number in (row.parameters, row.boxes, row.owned))
        table.add_row(in_words(row.ranks), ", ".join(_blocks(row)), *numbers)
    return table


def memory_of_kinds(explanation: Explanation) -> Table:
    """Bytes by category: a line for ranks that are alike."""
    rows = explanation.rank_classes
    on_device, elsewhere = used_categories(*(row.memory for row in rows))
    table = Table(title="memory per rank", title_justify="left", padding=0)
    for heading in ("ranks", *on_device, "in all", *elsewhere):
        table.add_column(heading, justify="left" if heading == "ranks" else "right")
    for row in rows:
        numbers = [getattr(row.memory, name) for name in (*on_device, "total", *elsewhere)]
        table.add_row(in_words(row.ranks), *("not known" if n is None else _bytes(n) for n in numbers))
    return table


def _blocks(row: RankClass) -> Iterator[str]:
    for first, last in row.blocks:
        yield first if first == last else f"{first} to {last.rpartition('.')[2]}"


def traffic_table(explanation: Explanation, row: RankClass) -> Table:
    """What is said in a step."""
    table = Table(
        title=f"said in a step by {_whose(row.ranks)}",
        title_justify="left",
        caption="bytes: of the whole tensors; leaving: by rings, the least that there is",
        caption_justify="left",
    )
    for heading in ("of", "verb", "over", "calls", "bytes", "leaving"):
        table.add_column(heading, justify="right" if heading in ("calls", "bytes", "leaving") else "left")
    for strand, traffic in row.traffic.items():
        for (verb, over), found in _merged(traffic):
            tally = sum(found.values(), CommCount())
            leaves = ring_bytes(found, explanation.grid)
            table.add_row(
                _OF[strand], verb, over, f"{tally.count:,}", _bytes(tally.num_bytes), _bytes(leaves)
            )
    leaving = ring_bytes(sum_traffic(row.traffic.values()), explanation.grid)
    table.add_section()
    table.add_row("in all", "", "", "", "", _bytes(leaving))
    return table


def _merged(
    traffic: Mapping[CommKey, CommCount],
) -> Iterator[tuple[tuple[str, str], dict[CommKey, CommCount]]]:
    """Lines that differ in nothing that is printed, together."""
    lines = sorted(traffic, key=_printed)
    for printed, found in groupby(lines, key=_printed):
        yield printed, {line: traffic[line] for line in found}


def _printed(line: CommKey) -> tuple[str, str]:
    found = _LANE.match(line.channel)
    what = f" ({found[1]})" if found else ""
    return line.op, (" x ".join(line.axes) or "all ranks") + what


def _show_beside(row: RankClass, measured: Measurements, console: Console) -> None:
    """Memory and traffic of the kind's first rank, foretold and measured."""
    rank = row.ranks[0]
    real = measured.of_rank(rank)
    console.print(memory_table(row.memory, real.memory, f"of rank {rank}"))
    table = Table(title=f"said by rank {rank} in step {measured.step}", title_justify="left")
    columns = ("calls foretold", "measured", "bytes foretold", "measured", "off by")
    for heading in ("verb", "over", *columns):
        table.add_column(heading, justify="right" if heading in columns else "left")
    ours = _by_words(sum_traffic(row.traffic.values()))
    theirs = _by_words(real.traffic)
    for words in sorted({*ours, *theirs}):
        one, other = ours.get(words, CommCount()), theirs.get(words, CommCount())
        table.add_row(
            *words,
            f"{one.count:,}",
            f"{other.count:,}",
            _bytes(one.num_bytes),
            _bytes(other.num_bytes),
            _off(one, other),
        )
    console.print(table)


def _by_words(traffic: Mapping[CommKey, CommCount]) -> dict[tuple[str, str], CommCount]:
    return {printed: sum(found.values(), CommCount()) for printed, found in _merged(traffic)}


def _off(estimated: CommCount, measured: CommCount) -> str:
    if estimated == measured:
        return "nothing"
    if not measured.num_bytes:
        return "not said" if not measured.count else f"{estimated.count - measured.count:+,} calls"
    return f"{estimated.num_bytes / measured.num_bytes - 1:+.1%}"


def in_words(ranks: Sequence[int], most: int = 4) -> str:
    """As `0-3, 8-11`; of many such runs the first ones."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])}, ... ({len(ranks):,} ranks)"


def _whose(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {in_words(ranks)}"


def _bytes(num_bytes: int) -> str:
    """In the unit in which it has one to four digits before the point."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes} B"


def cluster_of(recipe: Recipe, host_size: int | None = None) -> Cluster:
    """The ranks that the recipe would run on, as far as this machine can tell: `auto` is CUDA where there is
    some, and CPU ranks share memory. `host_size`: ranks to a host; None: one host has them all."""
    run = recipe.run
    is_cuda = run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available())
    by_device = "nccl" if is_cuda else "host"
    transport = by_device if run.transport == "auto" else run.transport
    return Cluster(transport, host_size, torch.device("cuda" if transport == "nccl" else "cpu"))


def cluster_of_run(measured: Measurements, host_size: int | None = None) -> Cluster:
    """The ranks that a run had."""
    transport = "host" if measured.transport == "none" else measured.transport
    return Cluster(transport, host_size, torch.device(measured.device))


def explain_recipe(recipe: Recipe, cluster: Cluster) -> Explanation:
    """Raises a PlaitError for a recipe that could not be trained, as far as that needs no data."""
    plan = Plan.parse(recipe.plan)
    sequences = plan.check_batch(recipe.run.batch)
    check_config(recipe.model, recipe.data.sequence, plan)
    ids = torch.zeros(sequences, recipe.data.sequence, dtype=torch.long, device="meta")
    return explain(
        model_on_meta(recipe.model.model_copy(update={"config": _config(recipe), "path": None})),
        plan,
        {"input_ids": ids, "labels": ids},
        cluster=cluster,
        optimizer=recipe.optimizer.torch_class(),
        optimizer_args=recipe.optimizer.torch_args(),
        tensor_plan=recipe.model.tensor_plan,
    )


def _config(recipe: Recipe) -> dict[str, Any]:
    """With a vocabulary: the tokenizer's, of one that is to be trained as large as it is asked to become."""
    model = recipe.model
    if model.config is not None:
        config = dict(model.config)
    else:
        assert model.path is not None, "a recipe's model has a configuration or a path"
        config = read_config(model.path)
    if "vocab_size" in config:
        return config
    if recipe.tokenizer.vocab_size is not None:
        return {**config, "vocab_size": recipe.tokenizer.vocab_size}
    assert recipe.tokenizer.path is not None, "a recipe's tokenizer has a path or a size"
    found = read_tokenizer(recipe.tokenizer.path, recipe.tokenizer.end_of_document)
    return {**config, "vocab_size": max(found.get_vocab().values()) + 1}


def check_rank(explanation: Explanation, rank: int | None) -> None:
    """Raises ConfigError unless the plan has it."""
    last = explanation.grid.num_ranks - 1
    if rank is not None and not 0 <= rank <= last:
        raise ConfigError("the plan has no such rank", given=f"--rank {rank}", expected=f"0 to {last}")


def to_json(explanation: Explanation, measured: Measurements | None) -> dict[str, Any]:
    """All that the tables show, and more."""
    grid = dict(zip(AXES, explanation.grid.degrees, strict=True))
    found: dict[str, Any] = {
        "plan": str(explanation.plan),
        "grid": grid,
        "ranks": explanation.grid.num_ranks,
        "transport": explanation.transport,
        "model": explanation.model,
        "parameters": explanation.num_parameters,
        "stages": explanation.num_stages,
        "micro_batch": list(explanation.micro_shape),
        "bubble": explanation.bubble,
        "alike": [_row(explanation, row) for row in explanation.rank_classes],
    }
    if measured is not None:
        rows = [
            {"ranks": list(r.ranks), "memory": asdict(r.memory), "traffic": to_rows(r.traffic)}
            for r in measured.alike
        ]
        found["measured"] = {"step": measured.step, "bubble": measured.bubble, "alike": rows}
    return found


def _row(explanation: Explanation, row: RankClass) -> dict[str, Any]:
    return {
        "ranks": list(row.ranks),
        "coord": dict(row.coord),
        "stages": list(row.stages),
        "blocks": [list(names) for names in row.blocks],
        "parameters": row.parameters,
        "boxes": row.boxes,
        "updated": row.owned,
        "memory": asdict(row.memory),
        "traffic": [
            {"of": strand, "leaves": ring_bytes({line: tally}, explanation.grid), **to_rows({line: tally})[0]}
            for strand, traffic in row.traffic.items()
            for line, tally in traffic.items()
        ],
    }
