"""Walls and bills: the lectures' figures, ZeRO's table, published trainings within their intervals."""

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.plan import Plan
from plait.plan.devices import device
from plait.planner.cluster import cluster
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import estimate_step
from plait.planner.workload import Software, Workload
from planner_lab.bills import bill, energy_watt_hours, training, trainings, walls, zero_bytes

DATA = Path(__file__).parents[1] / "data" / "planner"


def test_the_walls_are_those_of_the_lectures() -> None:
    values = {wall.name.strip(): wall.value for wall in walls()}
    assert values["compute: GPT-3"] == pytest.approx(314e21, rel=0.002)
    assert values["one device, 2 PFLOP/s (with sparsity)"] / 86_400 / 365.25 == pytest.approx(5.0, rel=0.01)
    assert values["memory: 175 B weights in fp32"] == 700e9
    assert values["of an H100"] == 80e9
    assert values["memory: 7.5 B weights in fp16"] == 15e9
    assert values["with Adam in mixed precision"] == 120e9, "of 7.5 B"
    assert values["communication: 128 copies, one iteration"] == 89.6e12
    assert values["all of it over one link of 800 Gb/s"] == 896
    assert values["embedding: 64,000 x 5,120 in fp32"] == 1250 * 2**20
    assert round(values["with its gradient"] / 2**30, 1) == 2.4


def test_gradients_in_fp32_are_two_bytes_more() -> None:
    assert zero_bytes(1, 1, 0, gradient_bytes=4) == 18
    assert zero_bytes(1, 8, 1, gradient_bytes=4) == 6 + 12 / 8
    assert zero_bytes(1, 8, 3, gradient_bytes=4) == 18 / 8


@pytest.mark.parametrize("name", trainings())
def test_reported_hours_of_published_trainings_are_within_the_interval(name: str) -> None:
    published = training(name)
    low, high = published.bill().hours
    assert low <= published.hours <= high
    assert high / low < 2


def test_two_months_of_opt_are_within_its_bill_with_the_time_that_it_lost() -> None:
    """34 days of work (2302.13971, table 15) in two months of 992 A100 (2205.01068, section 2.5)."""
    opt, months = training("OPT-175B"), 992 * 61 * 24
    low, high = opt.bill().hours
    assert high < months, "without lost time"
    lost = 1 - opt.hours / months
    assert lost == pytest.approx(0.44, abs=0.01)
    found = bill(opt.parameters, opt.tokens, opt.device, 992, lost=lost)
    assert found.hours[0] <= months <= found.hours[1]
    assert found.hours == (pytest.approx(low / (1 - lost)), pytest.approx(high / (1 - lost)))
    assert found.days[0] <= 61 <= found.days[1]


def test_energy_is_that_of_published_reports() -> None:
    llama, bloom = training("llama-65b"), training("BLOOM-176B")
    assert energy_watt_hours(llama.hours, llama.device) / 1e6 == pytest.approx(449, abs=1.0)
    assert bloom.hours * bloom.device.watts / 1e6 == pytest.approx(433.2, abs=0.1)  # without the facility


def test_twice_the_devices_take_half_the_days_and_the_same_money() -> None:
    one, two = (bill(70e9, 1e12, device("h100"), num, (0.4, 0.4)) for num in (512, 1024))
    assert two.days[0] == pytest.approx(one.days[0] / 2)
    assert two.dollars == one.dollars
    assert one.hours[0] == one.hours[1]


def test_an_unknown_training_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="try     : LLaMA-65B"):
        training("llama-65")


def test_bloom_under_its_published_plan_has_its_published_throughput() -> None:
    """See 2211.05100, section 3.3: 48 hosts of 8 A100, 150 TFLOP/s per GPU with recomputation."""
    config = {"model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880}
    bloom = ModelShape.from_config(config)
    assert bloom.num_params == 176_247_271_424
    plan = Plan.parse("pp=12 dp=8 tp=4 zero=1 micro=128 recompute=full precision=bf16")
    work, hosts = Workload(sequence=2048, batch=2048), cluster("jean-zay:48")
    found = estimate_step(bloom, plan, hosts, work, Software(fused_attention=False, overlaps_data=False))
    hardware_flops = 4 / 3 * bloom.training_flops_per_token(2048, causal=False) * work.tokens
    published_s = hardware_flops / (384 * 150e12)
    assert found.low_s <= published_s <= found.high_s
    assert found.memory_high_bytes < hosts.device.memory_bytes
