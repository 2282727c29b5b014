"""Adapters under local steps and on parameter servers: as one process, and only adapters are exchanged."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import plait
from plait.errors import CheckpointError
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach
from plait.plan import Plan
from plait.server.job import join_job, process_world
from support import adapters, changed_models, local_steps, programs
from support.pool import Pool

DILOCO = "outer=nesterov:0.7:0.9"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    adapters.save_base(folder, "llama")
    return folder


def _world(plan: Plan) -> Any:
    return process_world(join_job(plan), shares_memory=False) if plan.num_servers else None


def _engine(base: Path, plan: str) -> Any:
    """An engine and its world; None on a server."""
    try:
        world = _world(Plan.parse(plan))
        return adapters.engine_of(base, adapters.LORA, plan, world=world)
    except SystemExit:
        return None


def _trained(base: Path, plan: str, start: Path | None, out: Path | None) -> Any:
    """Losses of four steps, the trained weights, and the bytes that this worker sent to the servers; None on
    a server. `start`: an adapter to load first. `out`: a folder for the trained one."""
    engine = _engine(base, plan)
    if engine is None:
        return None
    if start is not None:
        engine.load_adapter(start)
    with engine.adapters_off():
        before = adapters.logits(engine)
    losses = [adapters.step(engine, seed) for seed in range(4)]
    if out is not None:
        engine.save_adapter(out)
    with engine.adapters_off():
        assert torch.equal(adapters.logits(engine), before)
    weights = {name: of for name, of in engine.full_parameters().items() if "lora_" in name}
    counts = engine.server_counts()
    if engine.plan.num_servers:
        engine.world.close()
    return losses, weights, counts


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and programs.largest_difference(ours, theirs)[0] < 1e-9


@pytest.fixture(scope="module")
def start(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose B is not zero."""
    folder = tmp_path_factory.mktemp("start") / "adapter"
    engine = adapters.engine_of(base, adapters.LORA, "dp=1")
    for seed in range(2):
        adapters.step(engine, 70 + seed)
    engine.save_adapter(folder)
    engine.save(folder.parent / "checkpoint")
    return folder


@pytest.mark.parametrize("servers", ["servers=1", "servers=2 server=replicated", "server=colocated"])
def test_servers_train_adapters_as_one_process_and_only_adapters_are_sent(
    pool: Pool, base: Path, start: Path, tmp_path: Path, servers: str
) -> None:
    expected, weights, _ = pool.run(_trained, 1, base, "dp=1", start, tmp_path / "alone")[0]
    plan = f"dp=2 {servers}"
    found = pool.run(_trained, Plan.parse(plan).num_ranks, base, plan, start, tmp_path / "adapter")
    for losses, ours, _ in found[:2]:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert _same(ours, weights)
    files = [load_file(tmp_path / of / "adapter_model.safetensors") for of in ("alone", "adapter")]
    torch.testing.assert_close(files[1], files[0], rtol=0, atol=1e-6)  # in float32
    size = sum(weight.nbytes for weight in weights.values())
    if (
        servers == "servers=1"
    ):  # of worker 1: a push and a pull in each step, two pulls and a read at the ends
        sent, received = found[1][2]["moved_bytes"][1]
        assert 4 * size <= sent < 4.3 * size
        assert received < 10.3 * size


def _islands(task: programs.Task, plan: str) -> Any:
    """A trace, and the elements that this rank's exchanges sum; None on a server."""
    try:
        world = _world(Plan.parse(plan))
        engine = programs.engine_of(task, plan, world=world)
    except SystemExit:
        return None
    first = engine.full_parameters()
    losses = [engine.step(programs.share_of(batch, engine)).loss for batch in task.data(task.steps)]
    state = engine.state()
    shards = engine._parts.islands.outer.shards
    names = {param.name for shard in shards for param in shard.unit.layout.params}
    if world is not None:
        world.close()
    return local_steps.IslandsTrace(first, losses, state, []), names


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 local_steps=2",
        f"dp=4 zero=3 shard=2 local_steps=2 {DILOCO}",
        f"dp=2 tp=2 local_steps=2 exchange_parts=2 {DILOCO}",
        f"dp=2 local_steps=2 servers=1 {DILOCO}",
    ],
)
def test_islands_exchange_adapters_as_in_a_simulation(pool: Pool, words: str) -> None:
    plan = Plan.parse(f"{words} precision=fp64")
    task = local_steps.task(functools.partial(changed_models.lora, "llama"))
    trace, names = pool.run(_islands, plan.num_ranks, task, str(plan))[0]
    assert names
    assert all(".lora_" in name for name in names)
    if plan.exchange_parts > 1:  # numbers of parts: test_local_steps.py
        return
    weights, losses = local_steps.simulate(task, plan, trace.first_weights)[1:]
    assert trace.losses == pytest.approx(losses, rel=1e-9)
    assert programs.largest_difference(trace.weights_of("weights/"), weights)[0] <= 1e-9
    frozen = {key.partition("weights/")[2] for key in trace.state if key.startswith("islands/")} - {""}
    assert all(".lora_" in name for name in frozen), "an island has states of the base"


def _of_loaded(base: Path, plan: str, start: Path, *, is_adapter: bool) -> list[float]:
    engine = adapters.engine_of(base, adapters.LORA, plan)
    if is_adapter:
        engine.load_adapter(start)
    else:
        engine.load(next((start.parent / "checkpoint").glob("step-*")), weights_only=True)
    return [adapters.step(engine, seed) for seed in range(4)]


def test_islands_begin_with_an_adapter_that_is_loaded(pool: Pool, base: Path, start: Path) -> None:
    """Their changes are measured from it."""
    plan = f"dp=2 local_steps=2 {DILOCO}"
    one, other = (pool.run(_of_loaded, 2, base, plan, start, is_adapter=of)[0] for of in (True, False))
    assert one == pytest.approx(other, rel=1e-6)  # files of adapters are in float32


def _load_later(base: Path, start: Path, adapter: str) -> str:
    """The error of a load after a step, into one of two adapters."""
    import peft  # noqa: PLC0415 - takes seconds

    plan = "dp=1 servers=1"
    model = attach(causal_lm_on_meta(base), adapters.LORA)
    with torch.device("meta"):
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"]), low_cpu_mem_usage=True)
    try:
        engine = plait.parallelize(model, plan, weights=base, world=_world(Plan.parse(plan)))
    except SystemExit:
        return ""
    adapters.step(engine, 0)
    try:
        engine.load_adapter(start, adapter)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.world.close()
    return "loaded"


@pytest.mark.parametrize(
    ("adapter", "fact"),
    [
        ("default", "states belong to the adapter that has been trained"),
        ("other", "servers have newer weights"),
    ],
)
def test_adapters_are_loaded_on_servers_before_the_first_step(
    pool: Pool, base: Path, start: Path, adapter: str, fact: str
) -> None:
    assert fact in pool.run(_load_later, 2, base, start, adapter)[0]
