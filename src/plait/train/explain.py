"""A recipe's plan explained before it runs, and a run's beside what it measured."""

from dataclasses import asdict
from typing import Any

import torch

from plait.dry import Cluster
from plait.errors import ConfigError
from plait.explain import Alike, Explanation, explain
from plait.models import read_config
from plait.plan import AXES, Plan
from plait.plan.foretold import ring_bytes
from plait.plan.traffic import to_rows
from plait.train.config import Recipe
from plait.train.data.tokenizer import read_tokenizer
from plait.train.measured import Measured
from plait.train.model import check_config, model_on_meta


def cluster_of(recipe: Recipe, host_size: int | None = None) -> Cluster:
    """The ranks that the recipe would run on, as far as this machine can tell: `auto` is CUDA where there is
    some, and CPU ranks share memory. `host_size`: ranks to a host; None: one host has them all."""
    run = recipe.run
    is_cuda = run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available())
    by_device = "nccl" if is_cuda else "host"
    transport = by_device if run.transport == "auto" else run.transport
    return Cluster(transport, host_size, torch.device("cuda" if transport == "nccl" else "cpu"))


def cluster_of_run(measured: Measured, host_size: int | None = None) -> Cluster:
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


def to_json(explanation: Explanation, measured: Measured | None) -> dict[str, Any]:
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
        "alike": [_row(explanation, row) for row in explanation.alike],
    }
    if measured is not None:
        rows = [
            {"ranks": list(r.ranks), "memory": asdict(r.memory), "traffic": to_rows(r.traffic)}
            for r in measured.alike
        ]
        found["measured"] = {"step": measured.step, "bubble": measured.bubble, "alike": rows}
    return found


def _row(explanation: Explanation, row: Alike) -> dict[str, Any]:
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
