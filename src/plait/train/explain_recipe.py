"""`plait explain`: shards, memory and traffic per rank, estimated before a run or compared with one."""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from plait.data.tokenizer import read_tokenizer
from plait.engine.spec import Arguments
from plait.errors import ConfigError
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import Explanation, RankClass, explain
from plait.models import token_batch
from plait.parallel.float8 import Float8Layers
from plait.plan import AXES, CommCount, CommKey, Grid, Plan, UnitLayout, format_bytes, used_categories
from plait.plan.axes import FEATURES, STAGE_PARTS
from plait.plan.comm_log import sum_traffic, to_rows
from plait.plan.context import MethodChoice
from plait.plan.devices import Device
from plait.plan.events import ServerTraffic, ring_bytes
from plait.plan.layout_rules import layer_collectives
from plait.plan.memory import COMPUTE_BYTES
from plait.tables import counted, facts_table, table
from plait.train.config import Recipe, micro_batch_shape
from plait.train.measurements import Measurements
from plait.train.model import check_config, complete_adapter, config_of, model_on_meta, with_adapter
from plait.train.optimizer import check_optimizer_args, optimizer_class, param_groups
from plait.train.run_report import memory_table

_MAX_SHOWN = 4  # classes of ranks whose traffic is printed, unless --rank selects one
_MAX_CATEGORIES = 7  # fit into 80 columns
_STAGE_MESSAGE = re.compile(r"(activations|gradients) from stage rank")
_PURPOSE = {
    "layers": "layers",
    "parameters": "parameters",
    "gradients": "gradients",
    "stages": "pipeline",
    "step": "loss, norm",
}


def print_explanation(
    explanation: Explanation, measured: Measurements | None, console: Console, *, rank: int | None = None
) -> None:
    """Print all tables; with `rank`, the traffic of that rank only."""
    _print_tables(explanation, measured, console, rank)
    if explanation.hardware is not None:
        console.print(_fit_text(explanation, explanation.hardware), highlight=False, soft_wrap=True)


def _fit_text(explanation: Explanation, hardware: Device) -> str:
    """Say whether the estimated memory of every rank fits the device."""
    row = explanation.fullest()
    used, size = row.memory.total, hardware.memory_bytes
    known = "" if row.memory.activations is not None else ", without activations, whose size is unknown"
    return (
        f"{'fits' if used <= size else 'does not fit'}: {_describe_ranks(row.ranks)} needs "
        f"{format_bytes(used)} of the {format_bytes(int(size))} "
        f"that programs can use on {hardware.name}{known}"
    )


def _print_tables(
    explanation: Explanation, measured: Measurements | None, console: Console, rank: int | None
) -> None:
    console.print(plan_table(explanation, measured))
    if explanation.tensor.lines:
        console.print(tensor_plan_text(explanation), highlight=False, markup=False, soft_wrap=True)
    console.print(shards_table(explanation))
    if measured is None:
        console.print(memory_by_class_table(explanation))
    if explanation.servers is not None:
        if measured is not None:  # by worker 0
            predicted, actual = explanation.rank_classes[0].memory, measured.of_rank(0).memory
            console.print(memory_table(predicted, actual, "of rank 0"))
        console.print(servers_table(explanation.plan, explanation.servers))
        return
    selected = explanation.rank_classes if rank is None else (explanation.of_rank(rank),)
    for row in selected[:_MAX_SHOWN]:
        if measured is None:
            console.print(traffic_table(explanation, row))
        else:
            _print_comparison(row, measured, console)
    if len(selected) > _MAX_SHOWN:
        more = len(selected) - _MAX_SHOWN
        console.print(f"{more} more classes of ranks: --rank N shows one, --json FILE writes all")


def plan_table(explanation: Explanation, measured: Measurements | None) -> Table:
    """Return a table of plan, grid, model and schedule."""
    plan, grid = explanation.plan, explanation.grid
    degrees = " x ".join(f"{axis} {grid.degree(axis)}" for axis in AXES if grid.degree(axis) > 1)
    shape = " x ".join(map(str, explanation.micro_shape))
    facts = {
        "plan": str(plan),
        "grid": counted(plan.num_ranks, "rank") + (f": {degrees}" if degrees else ""),
        "model": f"{explanation.model}, {explanation.num_parameters:,} trainable parameters"
        + _active(explanation),
        "micro-batch": f"{shape}, {plan.micro} per step on each data rank",
        "transport": explanation.transport,
    }
    if explanation.hardware is not None:
        facts["transport"] += f", on {explanation.hardware.name}"
    elif explanation.transport == "host" and plan.num_ranks > 1 and measured is None:
        facts["transport"] += ": CPU ranks that share memory (--device h100 explains ranks with GPUs)"
    if plan.is_float8:
        facts["float8"] = _float8_text(explanation.float8)
    if explanation.cp_choice is not None and explanation.cp_choice.sent:
        facts["attention"] = _method_text(explanation, explanation.cp_choice)
    if plan.capacity != "none":
        facts["experts"] = (
            f"each takes {plan.capacity} of an even share of a rank's tokens, others are dropped: not the "
            "numbers of one process. Memory and messages are the same for all routing"
        )
    elif plan.ep > 1:
        more = format_bytes(max(row.uneven_bytes for row in explanation.rank_classes))
        facts["experts"] = (
            "memory is for tokens that are spread evenly over ranks; "
            f"a rank whose experts receive all of them keeps {more} more"
        )
    if plan.pp > 1:
        bubble = f"{explanation.bubble:.1%} of the time, if all stages take equally long"
        if measured is not None and measured.bubble is not None:
            bubble += f"; {measured.bubble:.1%} measured"
        facts |= {"schedule": f"{plan.schedule}, {explanation.num_stages} stages", "bubble": bubble}
    if plan.num_servers:
        facts["grid"] += f": {counted(plan.dp, 'worker')}, {counted(plan.num_servers, 'server')}"
    if plan.local_steps:
        sent = max(ring_bytes(row.exchange, grid) for row in explanation.rank_classes)
        if explanation.servers is not None:
            sent = explanation.servers.worker[0] * plan.local_steps
        facts["exchange"] = (
            f"every {counted(plan.local_steps, 'step')}, {format_bytes(sent)} sent by each "
            f"{'rank' if explanation.servers is None else 'worker'}: "
            f"{format_bytes(sent // plan.local_steps)} per step"
        )
    return facts_table("plan", facts.items())


def _active(explanation: Explanation) -> str:
    """Say how many parameters of a mixture a token uses."""
    is_mixture = explanation.active_parameters < explanation.num_parameters
    return f", {explanation.active_parameters:,} of them for each token" * is_mixture


def _method_text(explanation: Explanation, choice: MethodChoice) -> str:
    """Say which method `cp_method=auto` takes, and why: what it sends in a stage's layers, and the others."""
    plan, (samples, sequence, *_) = explanation.plan, (*explanation.micro_shape, 1)
    tokens, columns = samples * -(-sequence // plan.cp), explanation.grid.degree(FEATURES)
    scale = tokens * COMPUTE_BYTES[plan.dtype] / columns / plan.pp
    numbers = {
        method: format_bytes(int(scale * (sent.between_hosts if choice.across_hosts else sent.received)))
        for method, sent in choice.sent.items()
    }
    own = f"{numbers.pop(choice.method)} for each micro-batch"
    others = ", ".join(f"{method} {number}" for method, number in numbers.items())
    who = "a rank receives " + own
    if choice.across_hosts:
        who = f"from other hosts, a sequence's ranks on one receive {own}"
    return f"cp_method={choice.method}: {who}" + f" ({others})" * bool(others)


def tensor_plan_text(explanation: Explanation) -> str:
    """Return the tensor plan as a recipe's table, with the dims' names and each layer's collectives."""
    tensor, sequence = explanation.tensor, explanation.plan.sp
    layers = {layer.module: layer for layer in tensor.layers}
    entries = [(json.dumps(line.pattern), json.dumps(line.style), line) for line in tensor.lines]
    widths = max(len(pattern) for pattern, _, _ in entries), max(len(style) for _, style, _ in entries)
    text = f"# layout: {tensor.layout}\n" if tensor.layout else ""
    text += "[model.tensor_plan]  # layers that read one input gather it, and reduce its gradient, once\n"
    for pattern, style, line in entries:
        passes = ("", "")
        if line.name in layers:
            passes = layer_collectives(layers[line.name], tensor.rows, tensor.cols, sequence=sequence)
        words = [f"{name}: {of_pass}" for name, of_pass in zip(("forward", "backward"), passes, strict=True)]
        comment = "; ".join(filter(None, [line.dims, *(word for word in words if not word.endswith(": "))]))
        text += f"{pattern:<{widths[0]}} = {style:<{widths[1]}}  # {comment}".rstrip(" #") + "\n"
    return text


def _float8_text(layers: Float8Layers) -> str:
    """Count the linear layers of the blocks in float8; name one of the others for each reason."""
    total = len(layers.names) + len(layers.others)
    text = f"{len(layers.names)} of {counted(total, 'linear layer')} in the blocks"
    for reason in dict.fromkeys(layers.others.values()):
        names = [name for name, other in layers.others.items() if other == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text += f"\nin bf16: {names[0]}{more} ({reason})"
    return text


def shards_table(explanation: Explanation) -> Table:
    """Return the parameter shards, with a row per class of equal ranks."""
    rows = (
        (format_ranks(row.ranks), _blocks(row), f"{row.parameters:,}", f"{row.boxes:,}", f"{row.owned:,}")
        for row in explanation.rank_classes
    )
    return table(
        "shards per rank",
        ("ranks", "blocks", "parameters", "boxes", "updated"),
        rows,
        left=("ranks", "blocks"),
        caption="boxes: slices of full tensors\nupdated: elements the optimizer updates, with padding",
    )


def memory_by_class_table(explanation: Explanation) -> Table:
    """Return the estimated bytes by category, with a row per class of equal ranks; with a column per class
    where categories would be too many columns for a terminal, as they are for GPUs."""
    classes = explanation.rank_classes
    on_device, elsewhere = used_categories(*(row.memory for row in classes))
    names = (*on_device, "total", *elsewhere)
    rows = [("ranks", *names)]
    rows += [(format_ranks(row.ranks), *(row.memory.text_of(name) for name in names)) for row in classes]
    if len(names) > _MAX_CATEGORIES and len(classes) < len(names):
        rows = list(zip(*rows, strict=True))
    return table("memory per rank", rows[0], rows[1:], left=("ranks",), padding=0)


def _blocks(row: RankClass) -> str:
    return ", ".join(
        first if first == last else f"{first} to {last.rpartition('.')[2]}" for first, last in row.blocks
    )


def servers_table(plan: Plan, traffic: ServerTraffic) -> Table:
    """Return the bytes of a step by process, and those of data parallelism over a ring of the workers."""
    rows = [("a worker" if traffic.server else "a worker with its server", traffic.worker)]
    if traffic.server is not None:
        rows.append(("a server", traffic.server))
    if any(traffic.replica):
        rows.append(("a server and the next, its replica", traffic.replica))
    rows.append((f"without servers: a rank of dp={plan.dp} zero=1", traffic.ring))
    return table(
        "communication per step",
        ("of", "sent", "received"),
        ((name, *map(format_bytes, sizes)) for name, sizes in rows),
        left=("of",),
        caption="on one host, this is read and written in shared memory",
    )


def traffic_table(explanation: Explanation, row: RankClass) -> Table:
    """Return the traffic of one step."""
    made = table(
        f"communication per step of {_describe_ranks(row.ranks)}",
        ("for", "operation", "over", "calls", "bytes", "sent"),
        left=("for", "operation", "over"),
        caption="bytes: of the full tensors, or of messages; sent: by ring algorithms, the lower bound"
        + "; over ep: tokens that are spread evenly over ranks"
        * (explanation.plan.ep > 1 and explanation.plan.capacity == "none"),
    )
    every = explanation.plan.local_steps
    purposes = [(_PURPOSE[strand], traffic) for strand, traffic in row.traffic.items()]
    for purpose, traffic in (*purposes, (f"exchange, every {counted(every, 'step')}", row.exchange)):
        for printed, counts in _merged(traffic):
            total = sum(counts.values(), CommCount())
            sizes = (total.num_bytes, ring_bytes(counts, explanation.grid))
            made.add_row(purpose, *printed, f"{total.count:,}", *map(format_bytes, sizes))
    total_sent_bytes = ring_bytes(sum_traffic(row.traffic.values()), explanation.grid)
    if every:
        total_sent_bytes += ring_bytes(row.exchange, explanation.grid) // every
    made.add_section()
    made.add_row("total per step" if every else "total", "", "", "", "", format_bytes(total_sent_bytes))
    return made


def _merged(
    traffic: Mapping[CommKey, CommCount],
) -> Iterator[tuple[tuple[str, str], dict[CommKey, CommCount]]]:
    """Group the entries that are printed the same."""
    keys = sorted(traffic, key=_printed)
    for printed, group in groupby(keys, key=_printed):
        yield printed, {key: traffic[key] for key in group}


def _printed(key: CommKey) -> tuple[str, str]:
    message = _STAGE_MESSAGE.match(key.channel)
    content = f" ({message[1]})" if message else ""
    return key.op, (" x ".join(key.axes) or "all ranks") + content


def _print_comparison(row: RankClass, measured: Measurements, console: Console) -> None:
    """Print estimated and measured memory and traffic of the first rank of a class."""
    rank = row.ranks[0]
    actual = measured.of_rank(rank)
    console.print(memory_table(row.memory, actual.memory, f"of rank {rank}"))
    estimates, measurements = _by_printed(sum_traffic(row.traffic.values())), _by_printed(actual.traffic)
    rows = []
    for printed in sorted({*estimates, *measurements}):
        counts = estimates.get(printed, CommCount()), measurements.get(printed, CommCount())
        calls, sizes = (f"{c.count:,}" for c in counts), (format_bytes(c.num_bytes) for c in counts)
        rows.append((*printed, *calls, *sizes, _difference(*counts)))
    headings = ("estimated calls", "measured", "estimated bytes", "measured", "difference")
    title = f"communication of rank {rank} in step {measured.step}"
    console.print(table(title, ("operation", "over", *headings), rows, left=("operation", "over")))


def _by_printed(traffic: Mapping[CommKey, CommCount]) -> dict[tuple[str, str], CommCount]:
    return {printed: sum(counts.values(), CommCount()) for printed, counts in _merged(traffic)}


def _difference(estimated: CommCount, measured: CommCount) -> str:
    if estimated == measured:
        return "none"
    if not measured.num_bytes:
        return "not measured" if not measured.count else f"{estimated.count - measured.count:+,} calls"
    return f"{estimated.num_bytes / measured.num_bytes - 1:+.1%}"


def format_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Format ranks as `0-3, 8-11`; with more than `most` ranges, the first ones and the number of ranks."""
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


def _describe_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {format_ranks(ranks)}"


def cluster_from_recipe(
    recipe: Recipe, host_size: int | None = None, hardware: Device | None = None
) -> HypotheticalRanks:
    """Return the cluster that the recipe would run on: of such devices, or judged by this machine.

    device=auto means CUDA if available; CPU ranks use shared memory. `host_size`: ranks per host; None: all
    on one host.
    """
    if hardware is not None:
        return HypotheticalRanks.of_hardware(hardware, host_size)
    run = recipe.run
    is_cuda = run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available())
    by_device = "nccl" if is_cuda else "host"
    transport = by_device if run.transport == "auto" else run.transport
    return HypotheticalRanks(transport, host_size, torch.device("cuda" if transport == "nccl" else "cpu"))


def cluster_from_run(measured: Measurements, host_size: int | None = None) -> HypotheticalRanks:
    """Return the cluster that a run had."""
    transport = "host" if measured.transport == "none" else measured.transport
    return HypotheticalRanks(transport, host_size, torch.device(measured.device))


def explain_recipe(recipe: Recipe, cluster: HypotheticalRanks, *, is_saved: bool = False) -> Explanation:
    """Explain a recipe's plan without ranks or data. `is_saved`: the recipe is a run's, whose engine was
    measured, without frozen models of others. Raises a PlaitError if it cannot be trained."""
    plan = Plan.parse(recipe.plan)
    batch_shape = micro_batch_shape(recipe, plan)
    check_optimizer_args(recipe.optimizer)
    adapter = recipe.adapter if is_saved else complete_adapter(recipe.adapter)
    check_config(recipe.model, recipe.data.sequence, plan, adapter, is_saved=is_saved)
    of_tokenizer = recipe.model.model_copy(update={"config": _config(recipe), "path": None})
    model = with_adapter(model_on_meta(of_tokenizer), adapter)
    given = Arguments(
        model,
        plan,
        optimizer=optimizer_class(recipe.optimizer),
        optimizer_args=recipe.optimizer.torch_args(),
        param_groups=param_groups(recipe.optimizer, model),
        router_z_loss=recipe.optimizer.router_z_loss,
        tensor_plan=recipe.model.tensor_plan,
        keep_zeros=recipe.model.keep_zeros,
    )
    explanation = explain(given, token_batch(*batch_shape), cluster)
    folder = None if is_saved else _frozen_folder(recipe)
    if folder is None:
        return explanation
    of_model = recipe.model.model_copy(update={"path": folder, "config": None})
    frozen = model_on_meta(of_model).requires_grad_(False)
    tensor_plan = None if recipe.distillation is not None else recipe.model.tensor_plan  # as its engine's
    other = explain(
        Arguments(frozen, plan, optimizer=torch.optim.SGD, tensor_plan=tensor_plan),
        token_batch(*batch_shape),
        cluster,
    )
    return replace(explanation, rank_classes=tuple(_with_frozen(explanation.rank_classes, other)))


def _frozen_folder(recipe: Recipe) -> Path | None:
    """Return the files of the model that the loss asks in each step besides the one that trains."""
    if recipe.distillation is not None:
        return recipe.distillation.teacher
    given = recipe.preference
    if given is None or given.reference != "model" or not given.options().needs_reference:
        return None
    return given.reference_model or recipe.model.path


def _with_frozen(classes: Sequence[RankClass], other: Explanation) -> Iterator[RankClass]:
    """Add the states and buffers of another model of the plan."""
    for row in classes:
        held = [of_class.memory for of_class in other.rank_classes if {*of_class.ranks} & {*row.ranks}]
        most = max(each.parameters + each.master + each.buffers for each in held)
        on_host = max(each.host for each in held)
        memory = replace(row.memory, frozen=most, host=row.memory.host + on_host)
        yield replace(row, memory=memory)


def _config(recipe: Recipe) -> dict[str, Any]:
    """Return the model config with a vocab_size: the tokenizer's, or the size it is to be trained to."""
    config = config_of(recipe.model)
    if "vocab_size" in config:
        return config
    if recipe.tokenizer.vocab_size is not None:
        return {**config, "vocab_size": recipe.tokenizer.vocab_size}
    assert recipe.tokenizer.path is not None, "a recipe's tokenizer has a path or a size"
    tokenizer = read_tokenizer(recipe.tokenizer.path, recipe.tokenizer.end_of_document)
    return {**config, "vocab_size": max(tokenizer.get_vocab().values()) + 1}


def check_rank(explanation: Explanation, rank: int | None) -> None:
    """Raise ConfigError unless the plan has this rank."""
    last = explanation.plan.num_ranks - 1
    if rank is not None and not 0 <= rank <= last:
        raise ConfigError(
            "the plan does not have this rank",
            given=f"--rank {rank}",
            expected=f"0 to {last}",
            hint="--rank 0",
        )


def to_json(explanation: Explanation, measured: Measurements | None) -> dict[str, Any]:
    """Return the contents of the tables, and more, as JSON values."""
    grid = dict(zip(AXES, explanation.grid.degrees, strict=True))
    values: dict[str, Any] = {
        "plan": str(explanation.plan),
        "grid": grid,
        "ranks": explanation.plan.num_ranks,
        "transport": explanation.transport,
        "model": explanation.model,
        "parameters": explanation.num_parameters,
        "active_parameters": explanation.active_parameters,
        "stages": explanation.num_stages,
        "micro_batch": list(explanation.micro_shape),
        "bubble": explanation.bubble,
        "alike": [_row(explanation, row) for row in explanation.rank_classes],
    }
    if explanation.tensor.lines:
        values["tensor_plan"] = {line.pattern: line.style for line in explanation.tensor.lines}
    if explanation.float8.names:
        others = dict(explanation.float8.others)
        values["float8"] = {"layers": sorted(explanation.float8.names), "others": others}
    if explanation.hardware is not None:
        size = explanation.hardware.memory_bytes
        fits = explanation.fullest().memory.total <= size
        values["device"] = {"name": explanation.hardware.name, "memory_bytes": size, "fits": fits}
    if explanation.servers is not None:
        values["servers"] = asdict(explanation.servers)
    if measured is not None:
        rows = [
            {"ranks": list(r.ranks), "memory": asdict(r.memory), "traffic": to_rows(r.traffic)}
            for r in measured.rank_classes
        ]
        values["measured"] = {"step": measured.step, "bubble": measured.bubble, "alike": rows}
    return values


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
            {"of": strand, "leaves": ring_bytes({key: count}, explanation.grid), **to_rows({key: count})[0]}
            for strand, traffic in row.traffic.items()
            for key, count in traffic.items()
        ],
        "exchange": to_rows(row.exchange),
        "uneven_bytes": row.uneven_bytes,
    }


def page_values(explanation: Explanation, measured: Measurements | None) -> dict[str, Any]:
    """Return the values of the page: those of --json, and the layout as it is drawn."""
    return to_json(explanation, measured) | {"units": _unit_values(explanation)}


def _unit_values(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the model's units in order, those with equal layouts together: their full tensors, and the
    ranges of each dim that the ranks of a tp grid hold, by row and column, and of experts those along ep. A
    unit's flat storage of `numel` elements is split into `shards` equal parts, one for each rank that shares
    its states; `start` is a tensor's place in it.
    """
    num_coords = explanation.grid.degree(*STAGE_PARTS)
    found: dict[Hashable, dict[str, Any]] = {}
    for stage, _, by_rank in explanation.shard_map.units():
        first = next(iter(by_rank.values()))
        at_coords = {rank % num_coords: unit for rank, unit in by_rank.items()}
        key = tuple(_shapes(unit) for unit in at_coords.values())
        unit = found.setdefault(key, {"names": [], "stages": [], **_drawn(at_coords, explanation.grid)})
        unit["names"].append(first.name)
        unit["stages"].append(stage)
    return list(found.values())


def _shapes(unit: UnitLayout) -> Hashable:
    return unit.numel, tuple((shard.full_shape, shard.boxes, shard.start) for shard in unit.params)


def _drawn(at_coords: Mapping[int, UnitLayout], grid: Grid) -> dict[str, Any]:
    first, places = next(iter(at_coords.values())), grid.group(0, *STAGE_PARTS)
    by_name = {at: {shard.name: shard for shard in unit.params} for at, unit in at_coords.items()}
    return {
        "numel": first.numel,
        "shards": first.num_shards,
        "trains": first.trains,
        "tensors": [
            {
                "name": shard.name,
                "shape": shard.full_shape,
                "start": shard.start,
                "numel": shard.boxes.numel,
                "held": [
                    {axis: grid.coord(places[at])[axis] for axis in STAGE_PARTS}
                    | {"ranges": of_coord[shard.name].boxes.ranges}
                    for at, of_coord in by_name.items()
                ],
            }
            for shard in first.params
        ],
    }
