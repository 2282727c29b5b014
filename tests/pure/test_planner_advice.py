"""Advice of `plait plan` on the cluster, the batch, the memory and the sequence."""

from dataclasses import replace

from plait.planner import ModelShape, Workload, cluster, search
from plait.planner.advice import advice
from plait.planner.cluster import Cluster

EIGHT_B = ModelShape.named("llama-3-8b")


def said(machine: Cluster, work: Workload, pins: str = "", model: ModelShape = EIGHT_B) -> str:
    return "\n".join(advice(search(model, machine, work, top=3, pins=pins), machine, pins))


def test_a_cluster_that_is_too_large_for_the_batch_is_named_with_the_plan_of_half_of_it() -> None:
    machine, work = cluster("dgx-h100:8"), Workload(8192, 2)
    text = said(machine, work)
    assert "The cluster is large for 2 sequences a step: 32 devices take" in text
    half = search(EIGHT_B, cluster("dgx-h100:4"), work, top=1).best[0].estimate.step_s
    times = float(text.partition("devices take ")[2].split()[0])
    best = search(EIGHT_B, machine, work, top=1).best[0].estimate.step_s
    assert 1 < times < 1.5
    assert times >= round(half / best, 2)
    assert "large" not in said(machine, Workload(8192, 512), "sp=false pp=1")


def test_devices_stay_unused_if_no_plan_of_all_divides_the_batch() -> None:
    """13 data ranks do not divide 64 sequences; the next part of the cluster has 12 hosts, then 8."""
    machine = replace(cluster("h100:1"), num_hosts=13)
    found = search(EIGHT_B, machine, Workload(2048, 64), top=1, pins="pp=1 tp=1")
    assert found.best[0].cluster.num_devices == 8
    assert "no plan of all 13 divides the batch" in said(machine, Workload(2048, 64), "pp=1 tp=1")


def test_memory_that_is_lacking_without_offload_is_said_in_bytes() -> None:
    machine = cluster("h100:1")
    text = said(machine, Workload(2048, 16))
    assert "Without offload=cpu, the first plan lacks" in text
    assert "GiB" in text


def test_long_sequences_are_for_cp() -> None:
    text = said(cluster("dgx-h100:1"), Workload(131072, 8), "offload=none sp=false")
    assert "Sequences of 131,072 tokens are for cp. Without it:" in text
