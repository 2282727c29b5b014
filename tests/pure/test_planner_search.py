"""The search finds the plans that an exhaustive search finds, and its bounds hold."""

import random
import time
from dataclasses import replace

import pytest

from plait.errors import ConfigError, PlanError
from plait.plan import Plan
from plait.planner import Cluster, ModelShape, Software, Workload, cluster, price, search
from plait.planner.best_first import Field, Search
from plait.planner.bounds import Prices
from plait.planner.search import parts
from plait.planner.space import Decided, Space, read_pins

SMALL = ModelShape.parse("layers=6 hidden=1024 heads=8 kv_heads=2 ffn=2816 vocab=32000 gated=true")
SEVEN_B = ModelShape.parse("layers=32 hidden=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256 gated=true")
WORK = Workload(sequence=2048, batch=16)


def small_cluster(devices: int, memory_gib: float = 80) -> Cluster:
    found = cluster(f"h100:{devices}")
    return replace(found, device=replace(found.device, memory_bytes=memory_gib * 2**30))


@pytest.mark.parametrize(
    ("devices", "memory_gib", "pins"),
    [(4, 3.5, "micro=4"), (8, 5.0, "pp=2 zero=1"), (8, 3.0, "tp=2 sp=true")],
)
def test_the_best_plans_are_those_of_an_exhaustive_search(devices: int, memory_gib: float, pins: str) -> None:
    machine = small_cluster(devices, memory_gib)
    space = Space(SMALL, devices, WORK.batch, read_pins(pins))
    prices = [price(SMALL, plan, machine, WORK) for plan in space.plans()]
    fitting = [each for each in prices if each.memory_high_bytes <= machine.device.memory_bytes]
    assert len(fitting) > 20
    expected = sorted(fitting, key=lambda each: (each.step_s, str(each.plan)))[:10]
    found = search(SMALL, machine, WORK, top=10, pins=pins)
    assert [str(each.plan) for each in found.best] == [str(each.plan) for each in expected]
    least = min(prices, key=lambda each: each.memory_high_bytes)
    smallest = Search().smallest(Field(machine, space, Prices(SMALL, machine, WORK, Software())))
    assert smallest is not None
    assert smallest[1] == least.memory_high_bytes


def test_bounds_are_below_prices() -> None:
    machine, work = cluster("dgx-h100:8"), Workload(2048, 128)
    prices = Prices(SEVEN_B, machine, work, Software())
    space, draw = Space(SEVEN_B, 64, work.batch), random.Random(5)
    for _ in range(100):
        plan, path = Plan(), list[tuple[Plan, Decided]]()
        for level in (Decided.NOTHING, Decided.DEGREES, Decided.COMPUTATION, Decided.SCHEDULE):
            plan = draw.choice(list(space.expand(plan, level)) or [plan])
            path.append((plan, Decided(level + 1)))
        found = price(SEVEN_B, plan, machine, work)
        for partial, decided in path:
            assert prices.least_seconds(partial, decided) <= found.step_s * (1 + 1e-9), (plan, decided)
            assert prices.least_bytes(partial, decided) <= found.memory_high_bytes * (1 + 1e-9), (
                plan,
                decided,
            )


def test_degrees_multiply_to_the_devices_and_pins_hold() -> None:
    plans = list(Space(SEVEN_B, 24, 48, read_pins("zero=1 tp=2")).plans())
    assert plans
    assert all(plan.num_ranks == 24 and plan.zero == 1 and plan.tp == "2" for plan in plans)
    assert len(set(plans)) == len(plans)


def test_a_larger_cluster_is_not_slower() -> None:
    work = Workload(2048, 256)
    times = [search(SEVEN_B, cluster(f"dgx-h100:{n}"), work, top=1).best[0].price.step_s for n in (1, 4)]
    assert times == sorted(times, reverse=True)


def test_the_smallest_cluster_meets_the_deadline_and_the_next_smaller_does_not() -> None:
    machine, work = cluster("dgx-h100:4"), Workload(2048, 128)
    best = search(SEVEN_B, machine, work, top=1, tokens=4e10, deadline_days=4).best[0]
    assert best.days is not None
    assert best.days <= 4
    smaller = [each for each in parts(machine) if each.num_devices < best.cluster.num_devices][-1]
    with pytest.raises(PlanError, match="no plan meets the deadline"):
        search(SEVEN_B, smaller, work, top=1, tokens=4e10, deadline_days=4)


def test_families_say_why_their_plans_are_not_the_best() -> None:
    found = search(SEVEN_B, cluster("dgx-h100:1"), Workload(2048, 64), top=3)
    families = {family.name: family for family in found.families}
    shown = {each.plan.tp for each in found.best}
    assert families
    assert all(f"tp={tp}" not in families for tp in shown)
    assert all((family.slowdown is None) != (family.excess_bytes is None) for family in found.families)
    assert all(family.slowdown >= 0.999 for family in found.families if family.slowdown is not None)


@pytest.mark.parametrize(
    ("devices", "batch", "pins", "fact", "hint"),
    [
        (24, 48, "tp=16", "no plan of 24 devices has the pinned values", "tp=1"),
        (64, 128, "dp=64 micro=3", "no plan of 64 devices divides the batch", "batch=192"),
        (8, 8, "schedule=zbv chunks=3", "no plan of 8 devices has the pinned values", "chunks"),
        (1, 8, "", "no plan fits into the memory", "2 devices"),
        (8, 8, "zero=5", "unknown ZeRO stage", ""),
    ],
)
def test_searches_without_a_plan_say_what_would_work(
    devices: int, batch: int, pins: str, fact: str, hint: str
) -> None:
    machine = small_cluster(devices, 14 if devices == 1 else 80)
    with pytest.raises(PlanError) as error:
        search(SEVEN_B, machine, Workload(2048, batch), pins=pins)
    assert fact in error.value.fact
    assert hint in str(error.value.hint or "")


def test_a_deadline_needs_tokens() -> None:
    with pytest.raises(ConfigError, match="tokens"):
        search(SMALL, small_cluster(8), WORK, deadline_days=3)


def test_a_large_search_is_no_slower_than_the_published_plan() -> None:
    model = ModelShape.parse("layers=126 hidden=16384 heads=128 kv_heads=8 ffn=53248 vocab=128256 gated=true")
    machine, work = cluster("dgx-h100:2048"), Workload(8192, 2048)  # Llama 3 405B (2407.21783, table 4)
    space = Space(model, machine.num_devices, work.batch)
    found = Search()
    begun_s = time.process_time()
    _, best = next(found.fastest([Field(machine, space, Prices(model, machine, work, Software()))]))
    elapsed_s = time.process_time() - begun_s
    assert elapsed_s < found.counts.bounded / 1000  # a second per thousand
    published = price(
        model, Plan.parse("tp=8 pp=16 dp=128 micro=16 sp=true zero=1 precision=bf16"), machine, work
    )
    assert best.step_s <= published.step_s
    assert best.memory_high_bytes <= machine.device.memory_bytes
