"""The search finds the plans that an exhaustive search finds, and its bounds hold."""

import importlib
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

from plait.errors import ConfigError, PlanError
from plait.plan import Plan
from plait.plan.plan import show_value
from plait.planner import OBJECTIVES, Cluster, ModelShape, Software, Workload, cluster, estimate_step, search
from plait.planner.best_first import Field, Search
from plait.planner.bounds import EstimateCache
from plait.planner.plan_families import PlanFamily
from plait.planner.search import parts
from plait.planner.space import LEAST_TOKENS, Decided, Space, read_pins
from plait.planner.step_estimate import TYPICAL_ERROR, StepEstimate

SMALL = ModelShape.parse("layers=4 hidden=1024 heads=8 kv_heads=2 ffn=2816 vocab=32000 gated=true")
MIXTURE = replace(SMALL, experts=4, experts_per_token=2, ffn=1408)
SEVEN_B = ModelShape.parse("layers=32 hidden=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256 gated=true")


def small_cluster(devices: int, memory_gib: float = 80) -> Cluster:
    found = cluster(f"h100:{devices}")
    return replace(found, device=replace(found.device, memory_bytes=memory_gib * 2**30))


def fields(model: ModelShape, machine: Cluster, work: Workload, pins: str = "") -> list[Field]:
    space = Space(model, machine.num_devices, work.batch, read_pins(pins), sequence=work.sequence)
    return [Field(machine, space, EstimateCache(model, machine, work, Software()))]


@pytest.mark.parametrize(
    ("devices", "batch", "sequence", "memory_gib", "pins"),
    [
        (4, 4, 1024, 80, "offload=none"),
        (4, 4, 1024, 2.3, "recompute=none"),
        (8, 8, 1024, 2.3, "pp=2 sp=false zero=1"),
        (8, 8, 1024, 2.3, "tp=2 sp=true zero=3"),
        (4, 2, 32768, 12, "offload=none sp=false"),
        (8, 1, 32768, 6, "pp=2 zero=1"),
        (4, 4, 1024, 4, "mixture: offload=none"),
        (4, 2, 32768, 8, "mixture: offload=none sp=false recompute=selective"),
        pytest.param(4, 4, 1024, 80, "", marks=pytest.mark.sweep),
        pytest.param(4, 4, 1024, 2.3, "", marks=pytest.mark.sweep),
        pytest.param(4, 4, 32768, 12, "", marks=pytest.mark.sweep),
        pytest.param(8, 8, 1024, 2.3, "pp=2 sp=false", marks=pytest.mark.sweep),
        pytest.param(8, 8, 1024, 2.3, "tp=2 sp=true", marks=pytest.mark.sweep),
    ],
)
def test_the_best_plans_are_those_of_an_exhaustive_search(
    devices: int, batch: int, sequence: int, memory_gib: float, pins: str
) -> None:
    """Search all plans of 4 devices, of which some do not fit, and parts of the plans of 8."""
    machine, work = small_cluster(devices, memory_gib), Workload(sequence, batch)
    model, pins = MIXTURE if pins.startswith("mixture") else SMALL, pins.removeprefix("mixture: ")
    [at] = fields(model, machine, work, pins)
    estimates = [estimate_step(model, plan, machine, work) for plan in at.space.plans()]
    assert any(each.plan.ep > 1 for each in estimates) == bool(model.experts)
    fitting = [each for each in estimates if each.memory_high_bytes <= machine.device.memory_bytes]
    assert len(estimates) > 100
    assert len(fitting) > 10
    assert (len(fitting) < len(estimates)) == (memory_gib < 80)
    assert any(each.plan.cp > 1 for each in fitting) == (sequence > 1024)
    expected = sorted(fitting, key=lambda each: (each.step_s, str(each.plan)))[:10]
    found = islice(Search().fastest(fields(model, machine, work, pins)), 10)
    assert [str(each.plan) for _, each in found] == [str(each.plan) for each in expected]
    smallest = Search().smallest(fields(model, machine, work, pins)[0])
    assert smallest is not None
    assert smallest[1] == min(each.memory_high_bytes for each in estimates)


@pytest.mark.parametrize("work", [Workload(2048, 128), Workload(65536, 16)])
@pytest.mark.parametrize(
    "model",
    [
        SEVEN_B,
        SEVEN_B.with_adapter(16),
        replace(SEVEN_B, experts=8, experts_per_token=2, dense_layers=2, dense_ffn=28672),
    ],
)
def test_bounds_are_below_prices(model: ModelShape, work: Workload) -> None:
    machine = cluster("dgx-h100:8")
    estimates = EstimateCache(model, machine, work, Software())
    space, draw = Space(model, 64, work.batch, sequence=work.sequence), random.Random(5)
    for _ in range(60):
        plan, path = Plan(), list[tuple[Plan, Decided]]()
        for level in (
            Decided.NOTHING,
            Decided.DEGREES,
            Decided.COMPUTATION,
            Decided.SCHEDULE,
            Decided.SIMULATED,
            Decided.STATES,
        ):
            plan = draw.choice(list(space.expand(plan, level)) or [plan])
            path.append((plan, Decided(level + 1)))
        found = estimate_step(model, plan, machine, work)
        for partial, decided in path:
            assert estimates.least_seconds(partial, decided) <= found.step_s * (1 + 1e-9), (plan, decided)
            assert estimates.least_bytes(partial, decided) <= found.memory_high_bytes * (1 + 1e-9), (
                plan,
                decided,
            )


def test_tp_groups_have_as_many_ranks_in_each_host() -> None:
    space = Space.of(SEVEN_B, cluster("dgx-a100:3"), Workload(2048, 24), read_pins("zero=1 micro=1"))
    sizes = {plan.rows * plan.cols for plan in space.plans()}
    assert {1, 2, 4, 8} <= sizes <= {1, 2, 4, 8, 24}
    assert {3, 6, 12} & {plan.rows * plan.cols for plan in replace(space, domain=0, known={}).plans()}


def test_degrees_multiply_to_the_devices_and_pins_hold() -> None:
    plans = list(Space(SEVEN_B, 24, 48, read_pins("zero=1 tp=2")).plans())
    assert plans
    assert all(plan.num_ranks == 24 and plan.zero == 1 and plan.tp == "2" for plan in plans)
    assert len(set(plans)) == len(plans)


def test_only_long_sequences_are_divided_over_ranks() -> None:
    """Ranks of cp have LEAST_TOKENS each; a pin is for any sequence."""

    def degrees(sequence: int, pins: str = "") -> set[int]:
        space = Space(SEVEN_B, 24, 24, read_pins(pins), sequence=sequence)
        return {plan.cp for plan in space.expand(Plan(), Decided.NOTHING)}

    assert degrees(2 * LEAST_TOKENS - 1) == {1}
    assert degrees(2 * LEAST_TOKENS) == {1, 2}
    assert degrees(8 * LEAST_TOKENS) == {1, 2, 3, 4, 6, 8}
    assert degrees(512, "cp=3") == {3}
    assert degrees(512, "cp=3 cp_method=ulysses tp=1") == set()


@pytest.mark.parametrize(("devices", "sequence"), [(8, 1 << 17), (32, 1 << 20)])
def test_sequences_that_do_not_fit_one_rank_are_divided(devices: int, sequence: int) -> None:
    """The best plan is no slower than the best without cp, if there is one; families say why."""
    machine, work = cluster(f"h100:{devices}"), Workload(sequence, 4)
    found = search(SEVEN_B, machine, work, top=1, pins="offload=none")
    [best] = found.best
    assert best.plan.cp > 1
    assert best.estimate.memory_high_bytes < machine.device.memory_bytes
    assert "cp=1" in {family.name for family in found.families}
    with suppress(PlanError):  # none fits
        [without] = search(SEVEN_B, machine, work, top=1, pins="offload=none cp=1").best
        assert best.estimate.step_s < without.estimate.step_s


def test_a_larger_cluster_is_not_slower() -> None:
    times = [
        next(Search().fastest(fields(SMALL, small_cluster(devices), Workload(1024, 8), "sp=false")))[1].step_s
        for devices in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


HOSTS = replace(cluster("dgx-h100:4"), host_size=2, domain_size=2)  # 1, 2, 3 or 4 of them can be used
FEW = Workload(1024, 24)


def test_objectives_choose_among_the_parts_of_a_cluster() -> None:
    """Money and energy grow with the devices, so they are the least where these are used best."""
    alone = {
        part.num_devices: next(Search().fastest(fields(SMALL, part, FEW, "pp=1 sp=false")))[1].step_s
        for part in parts(HOSTS)
    }
    cheapest = min(alone, key=lambda devices: devices * alone[devices])
    found = {
        objective: search(
            SMALL, HOSTS, FEW, objective=objective, top=1, pins="pp=1 sp=false", tokens=1e9
        ).best[0]
        for objective in OBJECTIVES
    }
    assert {name: each.cluster.num_devices for name, each in found.items()} == {
        "time": HOSTS.num_devices,
        "cost": cheapest,
        "energy": cheapest,
    }
    assert cheapest < HOSTS.num_devices
    device, hours = HOSTS.device, cheapest * alone[cheapest] * 1e9 / FEW.tokens / 3600
    assert found["cost"].dollars == pytest.approx(hours * device.dollars_per_hour)
    assert found["energy"].joules == pytest.approx(hours * 3600 * device.watts)


def test_the_smallest_cluster_meets_the_deadline_and_the_next_smaller_does_not() -> None:
    def days(part: Cluster) -> float:
        return search(SMALL, part, FEW, top=1, pins="pp=1 sp=false", tokens=1e12).best[0].days or 0.0

    one, two = (days(part) for part in parts(HOSTS)[:2])
    options = {"top": 1, "tokens": 1e12, "pins": "pp=1 sp=false"}
    best = search(SMALL, HOSTS, FEW, deadline_days=(one + two) / 2, **options).best[0]
    assert best.cluster.num_devices == parts(HOSTS)[1].num_devices
    assert best.days == pytest.approx(two)
    with pytest.raises(PlanError, match="no plan meets the deadline"):
        search(SMALL, parts(HOSTS)[0], FEW, deadline_days=(one + two) / 2, **options)


def test_families_say_why_their_plans_are_not_the_best() -> None:
    machine, work = small_cluster(4, 1.7), Workload(1024, 4)
    found = search(SMALL, machine, work, top=3, headroom=0.0)
    families = {family.name: family for family in found.families}
    assert all(f"tp={each.plan.tp}" not in families for each in found.best)
    found_plans = [family for family in families.values() if family.best is not None]
    assert found_plans
    assert any(family.excess_bytes is not None for family in families.values())
    for family in found_plans:
        assert family.best is not None
        assert family.best.memory_high_bytes <= machine.device.memory_bytes
        assert family.slowdown == family.best.step_s / found.best[0].estimate.step_s >= 1
        key, _, value = family.name.partition("=")
        assert value.lower() in (str(getattr(family.best.plan, key, "")).lower(), ""), family


@pytest.mark.parametrize("most_steps", [400, 30, 3])
def test_families_agree_with_an_exhaustive_search(monkeypatch: pytest.MonkeyPatch, most_steps: int) -> None:
    """A family's plan is its fastest, or its bounds hold, however soon the search gives up."""
    monkeypatch.setattr(importlib.import_module("plait.planner.plan_families"), "_MOST_STEPS", most_steps)
    machine, work, pins = small_cluster(4, 2.3), Workload(1024, 4), "offload=none"
    found = search(SMALL, machine, work, top=3, pins=pins, headroom=0.0)
    estimates = [
        estimate_step(SMALL, plan, machine, work) for plan in Space(SMALL, 4, 4, read_pins(pins)).plans()
    ]
    fitting = [each for each in estimates if each.memory_high_bytes <= machine.device.memory_bytes]
    are_exact = []
    for family in found.families:
        key, _, value = family.name.partition("=")
        own = [
            p
            for p in fitting
            if (show_value(key, getattr(p.plan, key)) == value if value else p.plan.rows > 1)
        ]
        least = min((each.step_s for each in own), default=math.inf) / found.best[0].estimate.step_s
        bound = re.match(r"(?:at least )?([0-9.]+)x(?: to|;)", family.reason)
        if family.excess_bytes is not None:
            assert not own, family
        if bound is not None:
            assert float(bound[1]) - 0.005 <= least, family
        if family.best is not None:
            assert family.slowdown is not None
            assert least <= family.slowdown * (1 + 1e-9), family
        are_exact.append(bound is None and not family.reason.startswith("at "))
        if are_exact[-1] and family.best is not None:
            assert least == pytest.approx(family.slowdown)
    assert len(are_exact) > 4
    assert all(are_exact) == (most_steps == 400)


def test_families_are_compared_with_plans_for_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def families(at: Field, best: Sequence[StepEstimate], report: object) -> Iterator[PlanFamily]:
        compared.append({estimate.plan.num_ranks for estimate in best})
        return iter(())

    monkeypatch.setattr(importlib.import_module("plait.planner.search"), "rejected_families", families)
    found = search(SMALL, HOSTS, FEW, objective="cost", top=400, pins="tp=1 zero=1 offload=none", tokens=1e9)
    assert len({each.cluster.num_devices for each in found.best}) > 1
    assert compared == [{found.best[0].cluster.num_devices}]


def test_a_family_that_is_too_large_to_exhaust_has_a_bound_and_a_plan() -> None:
    """The bound is not above the plan, and all plans of the family are above the bound."""
    machine, work = cluster("dgx-h100:2"), Workload(2048, 64)
    found = search(SEVEN_B, machine, work, top=3, pins="micro=2 sp=false")
    known = [(each.reason.partition(":")[0], each.slowdown or 0) for each in found.families if each.best]
    bounded = [(*text.split(" to "), slowdown) for text, slowdown in known if " to " in text]
    assert bounded or any(text.startswith("at most ") for text, _ in known)
    for low, high, slowdown in bounded:
        assert 1 < float(low.removesuffix("x")) <= float(high.removesuffix("x")) == round(slowdown, 2)
    for family in found.families:
        if family.best is not None and (family.slowdown or 0.0) < 1.005:
            assert family.reason.startswith(("as fast as the best", "at most 1.00x")), family


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
    machine = small_cluster(devices, 16 if devices == 1 else 80)
    with pytest.raises(PlanError) as error:
        search(SEVEN_B, machine, Workload(2048, batch), pins=pins)
    assert fact in error.value.fact
    assert hint in str(error.value.hint or "")


def test_a_deadline_needs_tokens() -> None:
    with pytest.raises(ConfigError, match="tokens"):
        search(SMALL, small_cluster(8), FEW, deadline_days=3)


def test_the_best_plans_differ_in_degrees_and_leave_memory_free() -> None:
    found = search(SEVEN_B, cluster("dgx-h100:2"), Workload(2048, 64), top=5, pins="micro=2 sp=false")
    assert len({(p.plan.pp, p.plan.tp) for p in found.best}) == 5
    capacity_bytes = cluster("dgx-h100:2").device.memory_bytes
    assert all(each.estimate.memory_high_bytes <= 0.95 * capacity_bytes for each in found.best)


def test_plans_as_fast_within_the_typical_error_are_those_of_an_exhaustive_search() -> None:
    """One of each pp, tp, cp and ep, up to as many as are asked for, and none slower than the error."""
    machine, work, pins = small_cluster(4), Workload(2 * LEAST_TOKENS, 4), "offload=none sp=false"
    fastest = dict[tuple[int, ...], float]()
    for plan in Space.of(SMALL, machine, work, read_pins(pins)).plans():
        degrees = plan.pp, plan.rows * plan.cols, plan.cp
        step_s = estimate_step(SMALL, plan, machine, work).step_s
        fastest[degrees] = min(step_s, fastest.get(degrees, math.inf))
    assert any(cp > 1 for _, _, cp in fastest)
    times = sorted(fastest.values())
    are_near = sum(each <= (1 + TYPICAL_ERROR) * times[0] for each in times)
    assert 2 <= are_near < len(times)
    for top in (1, are_near - 1, are_near):
        found = search(SMALL, machine, work, top=top, pins=pins, headroom=0.0)
        near = [each for each in times[top : 2 * top] if each <= (1 + TYPICAL_ERROR) * times[0]]
        assert [each.estimate.step_s for each in found.best] == times[:top]
        assert [each.estimate.step_s for each in found.near] == near


def test_a_search_ends_when_its_time_is_over() -> None:
    sizes = "layers=720 hidden=2520 heads=2520 head_dim=64 ffn=10080 vocab=50400"  # with many divisors
    machine, work = cluster("dgx-h100:90"), Workload(2048, 23040)
    start_s = time.process_time()
    with pytest.raises(PlanError, match="has found no plan yet") as caught:
        search(ModelShape.parse(sizes), machine, work, seconds=0.5)
    assert time.process_time() - start_s < 5
    assert "--pin" in str(caught.value)
    assert "--seconds 5" in str(caught.value)


def test_a_search_is_complete_if_its_time_is_over_only_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0

    def families(*_: object) -> list[object]:
        nonlocal clock_s
        clock_s = 100.0
        return []

    monkeypatch.setattr("time.process_time", lambda: clock_s)
    module = importlib.import_module("plait.planner.search")  # the package's `search` is the function
    monkeypatch.setattr(module, "rejected_families", families)
    assert search(SMALL, cluster("dgx-h100:1"), Workload(2048, 8), top=1).is_complete


def test_a_large_search_is_no_slower_than_the_published_plan() -> None:
    model = ModelShape.parse("layers=126 hidden=16384 heads=128 kv_heads=8 ffn=53248 vocab=128256 gated=true")
    machine, work = cluster("dgx-h100:2048"), Workload(8192, 2048)  # Llama 3 405B (2407.21783, table 4)
    found = Search()
    begun_s = time.process_time()
    _, best = next(found.fastest(fields(model, machine, work, "tp=8 sp=true offload=none")))
    elapsed_s = time.process_time() - begun_s
    assert elapsed_s < found.counts.bounded / 1000  # a second per thousand
    published = estimate_step(
        model, Plan.parse("tp=8 pp=16 dp=128 micro=16 sp=true zero=1 precision=bf16"), machine, work
    )
    assert best.step_s <= published.step_s
    assert best.memory_high_bytes <= machine.device.memory_bytes


def test_tensor_parallelism_pays_from_some_30_billion_parameters_on() -> None:
    """The table of docs/hybrid.md: Llamas on 128 DGX A100, 4 M tokens a step; the best plan without `tp` and
    the best with."""
    hosts, work = cluster("dgx-a100:128"), Workload(2048, 2048)
    layers, best = "layers={} hidden={} heads={} ffn={} vocab=32000 gated=true", dict[int, Sequence[float]]()
    for billions, shape, plans in (
        (7, (32, 4096, 32, 11008), ("dp=1024 zero=1 shard=64", "dp=512 tp=2 sp=true zero=1 shard=64")),
        (13, (40, 5120, 40, 13824), ("dp=1024 zero=3 shard=64", "dp=512 tp=2 sp=true zero=2 shard=64")),
        (33, (60, 6656, 52, 17920), _THIRTY_THREE),
        (65, (80, 8192, 64, 22016), _SIXTY_FIVE),
    ):
        model = ModelShape.parse(layers.format(*shape))
        assert round(model.num_params / 1e9) == billions
        found = [estimate_step(model, Plan.parse(f"{plan} precision=bf16"), hosts, work) for plan in plans]
        assert all(each.memory_high_bytes < hosts.device.memory_bytes for each in found)
        best[billions] = [each.step_s for each in found]
        if billions == 33:
            [fastest] = search(model, hosts, work, top=1, pins="pp=1").best
            assert fastest.estimate.step_s == pytest.approx(best[33][0])
    assert {billions: round(with_tp / without, 2) for billions, (without, with_tp) in best.items()} == {
        7: 1.05,
        13: 1.01,
        33: 1.02,
        65: 0.91,
    }


_THIRTY_THREE = (
    "dp=1024 zero=3 shard=128 recompute=selective",
    "dp=512 tp=2 sp=true zero=3 shard=64 recompute=selective",
)
_SIXTY_FIVE = (
    "dp=1024 zero=3 shard=64 micro=2 recompute=selective",
    "pp=8 dp=64 tp=2 schedule=dualpipev sp=true zero=1 micro=32",
)
