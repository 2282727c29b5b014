"""Plans explained by one process that starts no rank."""

import io
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from plait.comm import all_reduce
from plait.engine.spec import Arguments
from plait.errors import ConfigError, ModelError, PlanError
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import Explanation, explain
from plait.models import causal_lm_on_meta
from plait.optim.adamw_8bit import AdamW8bit
from plait.parallel.zero.rank_context import RankGroups
from plait.plan import CommCount, CommKey, Grid, Plan, sum_traffic
from plait.plan.events import ServerTraffic, ring_bytes
from plait.plan.memory import format_bytes
from plait.plan.schedule import Durations, make_schedule, simulate
from plait.train.explain_recipe import format_ranks, plan_table, traffic_table
from support import own_context

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPE = (2, 8)


def small(layers: int, heads: int = 4) -> nn.Module:
    return causal_lm_on_meta(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 8 * heads,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }
    )


def explained(
    model: nn.Module, plan: str, cluster: HypotheticalRanks | None = None, **options: Any
) -> Explanation:
    ids = torch.zeros(SHAPE, dtype=torch.long, device="meta")
    return explain(Arguments(model, plan, **options), {"input_ids": ids, "labels": ids}, cluster)


def test_16384_ranks_are_explained_in_seconds() -> None:
    plan = "pp=16 dp=128 tp=8 zero=3 shard=32 micro=32 schedule=zb-h1 precision=bf16 recompute=full"
    cluster = HypotheticalRanks("nccl", 8, torch.device("cuda"))
    model = small(16, heads=8)
    explained(small(1), "dp=1")  # what torch and transformers import when they are first asked
    begun_s = time.process_time()
    found = explained(model, plan, cluster=cluster)
    assert time.process_time() - begun_s < 5.0
    assert sorted(rank for row in found.rank_classes for rank in row.ranks) == list(range(16_384))
    assert len(found.rank_classes) == 16
    assert all(row.memory.activations for row in found.rank_classes)
    first, middle = (found.of_rank(rank).memory for rank in (0, 8_192))
    assert middle.runtime == first.runtime  # as many communicators
    assert first.allocator > 0


def test_a_rank_of_many_makes_its_own_groups_and_no_others() -> None:
    plan = Plan.parse("pp=16 dp=128 tp=8 zero=1 shard=16")
    grid, rank = Grid.from_plan(plan), 9_999
    begun_s = time.process_time()
    mesh = HypotheticalRanks("nccl", 8, CPU).mesh(grid, rank)
    groups = RankGroups.build(mesh, plan)
    assert time.process_time() - begun_s < 1.0
    made = [ranks for ranks, _ in mesh._groups]
    assert all(rank in ranks for ranks in made)
    assert len(made) <= 12
    assert (groups.pp.size, groups.dense.gradient_sum.size, groups.dense.reduce_scatter.size) == (16, 128, 16)


def test_ranks_with_equal_memory_are_one_row() -> None:
    found = explained(small(4), "pp=2 dp=2 tp=2")
    assert [row.ranks for row in found.rank_classes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [row.blocks for row in found.rank_classes] == [
        (("model.layers.0", "model.layers.1"),),
        (("model.layers.2", "model.layers.3"),),
    ]
    whole = explained(small(4), "dp=1")
    assert whole.of_rank(0).parameters == found.num_parameters
    assert whole.of_rank(0).traffic == {}
    apart = explained(small(4), "dp=4 algorithm=tree")
    assert [row.ranks for row in apart.rank_classes] == [(0,), (1,), (2,), (3,)]


def test_hosts_that_share_no_memory_gather() -> None:
    one, two = (
        explained(small(2), "dp=4 zero=3", cluster=HypotheticalRanks("host", size, CPU)) for size in (None, 2)
    )
    verbs = [{line.op for line in of.of_rank(0).traffic["parameters"]} for of in (one, two)]
    assert verbs == [{"barrier"}, {"all-gather"}]
    assert two.of_rank(0).memory.buffers > one.of_rank(0).memory.buffers


@pytest.mark.parametrize(
    ("plan", "host_size", "cut"),
    [("dp=12 zero=3 shard=4", 6, range(4, 8)), ("pp=2 dp=4 zero=3", 6, range(4, 8))],
)
def test_where_a_host_ends_inside_of_a_group_its_ranks_gather_and_others_do_not(
    plan: str, host_size: int, cut: range
) -> None:
    found = explained(small(2), plan, cluster=HypotheticalRanks("host", host_size, CPU))
    for rank in range(found.grid.num_ranks):
        verbs = {line.op for line in found.of_rank(rank).traffic["parameters"]}
        assert verbs == ({"all-gather"} if rank in cut else {"barrier"})


def test_columns_whose_data_ranks_are_placed_differently_on_hosts_have_their_own_rows() -> None:
    found = explained(small(2), "dp=3 tp=2 algorithm=two-level", cluster=HypotheticalRanks("gloo", 3, CPU))
    assert [row.ranks for row in found.rank_classes] == [(rank,) for rank in range(6)]
    aligned = explained(small(2), "dp=3 tp=2 algorithm=two-level", cluster=HypotheticalRanks("gloo", 2, CPU))
    assert [row.ranks for row in aligned.rank_classes] == [(0, 1), (2, 3), (4, 5)]


def test_the_bubble_is_that_of_the_schedule() -> None:
    found = explained(small(4), "pp=4 micro=8")
    schedule = make_schedule("1f1b", 4, 8)
    assert found.bubble == simulate(schedule, Durations.uniform(4)).bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("host_size", "said"),
    [
        # 2 layers of 8 heads and 2 kv heads; 2 rows of 2 tokens on a rank, keys and values of 16, 4 bytes
        (None, f"allgather: a rank receives {format_bytes(2 * 18 * 16 * 16)} for each micro-batch"),
        (4, f"2x2: from other hosts, a sequence's ranks on one receive {format_bytes(2 * 12 * 16 * 16)} for"),
    ],
)
def test_the_method_of_attention_is_said_with_its_bytes(host_size: int | None, said: str) -> None:
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 8}
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = causal_lm_on_meta(config | sizes)
    found = explained(model, "cp=4 dp=2 tp=1", HypotheticalRanks("gloo", host_size and 2, CPU))
    console = Console(file=io.StringIO(), width=400)
    console.print(plan_table(found, None))
    assert isinstance(console.file, io.StringIO)
    assert f"cp_method={said}" in " ".join(console.file.getvalue().split())


def test_a_module_of_ones_own_is_explained_with_its_attention() -> None:
    model = own_context.gpt(kv_heads=2)
    found = explained(model, "cp=2 recompute=full", loss=own_context.summed_loss)
    gathers = found.of_rank(0).traffic["layers"][CommKey(("cp",), "", "all-gather")]
    # Two layers; in forward and backward, keys and values of 2 rows of 8 tokens, of 2 x 4 features each.
    assert gathers.num_bytes == 2 * 2 * 2 * 8 * 2 * 8 * 4


def test_a_recomputed_block_communicates_again() -> None:
    def calls(recompute: str) -> CommCount:
        found = explained(small(2), f"tp=2 recompute={recompute}").of_rank(0).traffic
        return found["layers"][CommKey(("col",), "", "all-reduce")]

    none, selective, full = (calls(how) for how in ("none", "selective", "full"))
    assert none == selective
    assert full.count == none.count + 2 * 2  # two sums in the forward of each block


def test_the_model_is_left_as_it_was() -> None:
    model = small(2)
    names, forward = [name for name, _ in model.named_parameters()], type(model).forward
    explained(model, "pp=2 tp=2 recompute=full")
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.shape for parameter in model.parameters())
    assert type(model).forward is forward
    assert not any("forward" in vars(module) for module in model.modules())


def test_only_a_dry_world_communicates_meta_tensors() -> None:
    mesh = HypotheticalRanks("gloo", None, CPU).mesh(Grid.from_degrees(col=4), 1)
    all_reduce(torch.ones(3, device="meta"), mesh.group("col"))
    assert mesh.world.comm_log.read() == {CommKey(("col",), "", "all-reduce"): CommCount(1, 12)}


class Looking(nn.Module):
    """Its course depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[x[:, 0].tolist().index(0.5)]
        return x


def test_a_model_that_needs_values_is_an_error() -> None:
    micro = {"x": torch.ones(2, 4), "labels": torch.ones(2, 4)}
    with pytest.raises(ModelError, match="cannot run on meta tensors"):
        explain(Arguments(Looking(), "dp=2", loss=lambda out, _: (out.sum(), 1)), micro)


@pytest.mark.parametrize(
    ("plan", "communicators"),
    [("dp=1", 0), ("dp=2 zero=3", 3), ("pp=2 dp=2 zero=1 micro=2", 5), ("tp=2 dp=4 shard=2 zero=3", 5)],
)
def test_memory_of_communicators_is_estimated_for_each_that_a_rank_makes(
    plan: str, communicators: int
) -> None:
    gpus = HypotheticalRanks("nccl", 8, torch.device("cuda"))
    for rank_class in explained(small(2), plan, cluster=gpus).rank_classes:
        assert rank_class.memory.runtime == (600 + 64 + 200 * communicators) * 2**20


def test_a_gpu_holds_the_same_with_states_on_disk_and_in_host_memory() -> None:
    gpus = HypotheticalRanks("nccl", 8, torch.device("cuda"))
    in_memory, on_disk = (
        explained(small(2), f"dp=2 zero=3 precision=bf16 offload={place}", cluster=gpus)
        .rank_classes[0]
        .memory
        for place in ("cpu", "disk")
    )
    assert on_disk.total == in_memory.total
    assert on_disk.disk > 0 == in_memory.disk


def test_stages_without_blocks_have_the_names_of_their_units() -> None:
    found = explained(small(2), "pp=4 stages=0,1,1,0 micro=2")
    names = [first for row in found.rank_classes for first, _ in row.blocks]
    assert names == ["embedding", "model.layers.0", "model.layers.1", "head"]


def test_invalid_plans_are_refused_as_on_real_ranks() -> None:
    with pytest.raises(PlanError, match="cannot fill"):
        explained(small(2), "pp=5")
    gpus = HypotheticalRanks("nccl", 8, torch.device("cuda"))
    with pytest.raises(PlanError, match="named all-reduce algorithms need CPU ranks"):
        explained(small(2), "dp=2 algorithm=ring", cluster=gpus)
    with pytest.raises(PlanError, match="needs repeated blocks"):
        explain(Arguments(nn.Linear(4, 4), "recompute=full"), {"input": torch.ones(2, 4)})
    with pytest.raises(ConfigError, match="optimizer must be a class"):
        explained(small(2), "dp=2", optimizer="adamw")


def test_servers_are_explained_next_to_a_ring() -> None:
    alone = explained(small(2), "dp=1")
    found = explained(small(2), "dp=4 servers=2 reduce=bf16")
    pushed, pulled = 2 * found.num_parameters, 4 * found.num_parameters
    assert found.servers is not None
    assert found.servers.worker == (pushed, pulled)
    assert found.servers.server == (2 * pulled, 2 * pushed)
    assert found.servers.ring == (3 * (pushed + pulled) // 4,) * 2
    workers, servers = found.rank_classes
    assert (workers.ranks, servers.ranks) == ((0, 1, 2, 3), (4, 5))
    assert workers.memory.total == alone.rank_classes[0].memory.total - alone.rank_classes[0].memory.optimizer
    assert servers.memory.total == 4 * (pulled // 2)
    replicated = explained(small(2), "dp=4 servers=2 server=replicated reduce=bf16")
    assert replicated.rank_classes[1].memory.total == 2 * servers.memory.total
    assert replicated.servers == replace(found.servers, replica=(pulled // 2, pulled // 2))
    (kept, _) = explained(small(2), "dp=4 servers=2 reduce=int8").rank_classes
    assert kept.memory.gradients == workers.memory.gradients + pulled, "with what was not sent"
    (both,) = explained(small(2), "dp=4 server=colocated").rank_classes
    assert both.memory.total == workers.memory.total + pulled
    islands = explained(small(2), "dp=4 servers=2 local_steps=8 outer=nesterov:0.7:0.9 exchange=bf16")
    assert islands.servers == ServerTraffic(
        (pushed // 8, pulled // 8), (2 * pulled // 8, 2 * pushed // 8), (3 * pulled // 2,) * 2
    )
    workers, servers = islands.rank_classes
    assert workers.memory.total == alone.rank_classes[0].memory.total + pulled, "with the global weights"
    assert servers.memory.total == 3 * (pulled // 2), "weights, the sum of changes, and momentum"


def test_activations_over_lengths_are_drawn_and_halve_with_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture of docs/context.md, for a small model."""
    words = [str(ROOT / "tools" / "plot_context_memory.py"), "--smallest", str(tmp_path / "memory.svg")]
    with mock.patch.object(sys, "argv", words), matplotlib.rc_context({"svg.fonttype": "none"}):
        runpy.run_path(words[0], run_name="__main__")
    _, _, *lines = capsys.readouterr().out.splitlines()
    of_degree = [[float(cell) for cell in line.strip("|").split("|")[1:]] for line in lines]
    head = 256 * 64 * 2 / (1 << 30)  # the gradient of its weight, which no length changes
    of_tokens = [[short - head, long - head] for short, long in of_degree]
    assert all(long == pytest.approx(4 * short, rel=0.01) for short, long in of_tokens)
    _, two, four, eight = (short for short, _ in of_tokens)
    assert (four, eight) == (pytest.approx(two / 2, rel=0.01), pytest.approx(two / 4, rel=0.01))
    drawn = (tmp_path / "memory.svg").read_text()
    assert all(f">{label}<" in drawn for label in ("cp=1", "cp=8", "memory of an H100"))


def test_the_table_of_traffic_has_the_exchanges_of_local_steps_and_their_share_of_a_step() -> None:
    found = explained(small(2), "dp=2 local_steps=4")
    shown = io.StringIO()
    Console(file=shown, width=150).print(traffic_table(found, found.rank_classes[0]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines()]
    sent = ring_bytes(found.rank_classes[0].exchange, found.grid)
    exchange, total = (row for row in rows if row)
    assert exchange == ["exchange, every 4 steps", "all-reduce", "replicate", "5", *[format_bytes(sent)] * 2]
    assert total == ["total per step", "", "", "", "", format_bytes(sent // 4)]


def test_an_empty_micro_batch_is_an_error() -> None:
    with pytest.raises(ModelError, match="a micro-batch has no tensors"):
        explain(Arguments(small(2), "dp=2"), {})


@pytest.mark.quick
def test_traffic_by_strand_adds_up_to_the_total() -> None:
    row = explained(
        small(2), "pp=2 dp=2 tp=2 zero=3 micro=2", cluster=HypotheticalRanks("gloo", None, CPU)
    ).of_rank(0)
    assert set(row.traffic) == {"layers", "parameters", "gradients", "stages", "step"}
    total = sum_traffic(row.traffic.values())
    assert sum(t.num_bytes for t in total.values()) == sum(
        t.num_bytes for traffic in row.traffic.values() for t in traffic.values()
    )


def test_ranks_are_written_as_ranges() -> None:
    assert format_ranks((0, 1, 2, 3)) == "0-3"
    assert format_ranks((0, 2, 3)) == "0, 2-3"
    assert format_ranks(range(0, 40, 2)) == "0, 2, 4, ... (20 ranks)"


def test_states_in_8_bit_codes_are_a_quarter() -> None:
    model = small(2, heads=32)
    wide, coded = (
        explained(model, "dp=2 zero=1", optimizer=optimizer).of_rank(0).memory.optimizer
        for optimizer in (torch.optim.AdamW, AdamW8bit)
    )
    assert coded / wide == pytest.approx((1 + 4 / 256) / 4, rel=1e-3)
