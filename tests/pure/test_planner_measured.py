"""The planner on a measured host: its profile, its calibration, and what they change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ProfileError
from plait.plan import Plan
from plait.plan.host_profile import OPERATORS, DeviceSpeed, HostProfile, save
from plait.planner.calibrate import Run, determined, fit
from plait.planner.cluster import cluster
from plait.planner.communication import Group, Links, collective_s, send_s
from plait.planner.constants import Constants
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import estimate_step
from plait.planner.workload import Software, Workload

MODEL = ModelShape.parse("layers=4 hidden=512 heads=8 kv_heads=8 ffn=1536 vocab=4096 gated=true")
WORK = Workload(sequence=256, batch=4)
RATES = {"fp32": ((1e6, 2e10), (1e9, 8e10))}
OPERATOR_RATES = {"fp32": dict.fromkeys(OPERATORS, ((1.0, 1000000000.0), (1000000.0, 1000000000.0)))}
OPERATOR_RATES["fp32"]["linear"] = ((8.0, 2e10), (1024.0, 1e11))
COLLECTIVES = (
    ("all-reduce", 2, 1e-4, 1e-9),
    ("scattered sum", 2, 1e-4, 5e-10),
    ("unshard", 2, 2e-5, 0.0),
    ("foreign all-reduce", 2, 1e-4, 2e-9),
    ("send-receive", 2, 1e-5, 1 / 3e9),
)


def _profile(folder: Path, *speeds: DeviceSpeed) -> str:
    return str(save(HostProfile({}, {speed.num_ranks: speed for speed in speeds}), folder / "host.json"))


def _cpu(num_ranks: int, cores: int, **changes: Any) -> DeviceSpeed:
    """Ranks of a host with 2 cores: more ranks than cores are each slower in proportion."""
    speed = DeviceSpeed(
        num_ranks, "x86_64", "cpu", cores, 1, 1e10, 6e9, 5e-6, RATES, OPERATOR_RATES, COLLECTIVES
    )
    return replace(speed, **changes)


def test_a_measured_host_is_a_cluster_of_its_ranks(tmp_path: Path) -> None:
    path = _profile(tmp_path, _cpu(2, 2))
    found = cluster(f"{path}:2")
    assert (found.num_devices, found.device.peak_flops["fp32"], found.constants.launch_s) == (2, 8e10, 5e-6)
    assert found.device.link_bytes_per_s == pytest.approx(3e9)
    assert found.ranks_per_core == 1
    assert cluster(path).num_devices == 2
    with pytest.raises(ProfileError, match=r"4 ranks at work(.|\n)*plait bench device --ranks 4"):
        cluster(f"{path}:4")


def test_a_link_whose_bytes_took_no_time_is_a_copy_through_memory(tmp_path: Path) -> None:
    """As when noise exceeds what larger messages take."""
    lines = (("send-receive", 2, 1e-5, 0.0),)
    assert cluster(f"{_profile(tmp_path, _cpu(2, 2, collectives=lines))}:2").device.link_bytes_per_s == 3e9


def _step_s(folder: Path, plan: str, speed: DeviceSpeed) -> float:
    return estimate_step(
        MODEL, Plan.parse(plan), cluster(f"{_profile(folder, speed)}:{speed.num_ranks}"), WORK
    ).step_s


def test_a_step_is_priced_with_the_measured_operators(tmp_path: Path) -> None:
    before = _step_s(tmp_path, "dp=2", _cpu(2, 2))
    for name in OPERATORS:
        halved = {
            "fp32": OPERATOR_RATES["fp32"]
            | {name: tuple((a, r / 2) for a, r in OPERATOR_RATES["fp32"][name])}
        }
        assert _step_s(tmp_path, "dp=2", _cpu(2, 2, operator_rates=halved)) > before, name


def test_communication_is_priced_with_the_measured_lines(tmp_path: Path) -> None:
    def added_s(plan: str, kind: str) -> float:
        slower = tuple((k, n, a + 1.0 * (k == kind), b) for k, n, a, b in COLLECTIVES)
        return _step_s(tmp_path, plan, _cpu(2, 2, collectives=slower)) - _step_s(tmp_path, plan, _cpu(2, 2))

    units = MODEL.layers + 2  # a call for each in a step; on a core that computes, not hidden
    assert added_s("dp=2", "all-reduce") == pytest.approx(units)
    assert added_s("dp=2 zero=1", "scattered sum") == pytest.approx(units)
    assert added_s("dp=2 zero=1", "unshard") == pytest.approx(units)
    assert added_s("dp=2 zero=1", "all-reduce") == 0
    assert added_s("tp=2", "foreign all-reduce") == pytest.approx(4 * MODEL.layers)
    assert added_s("pp=2 micro=2", "send-receive") > 0


def test_a_pipeline_of_more_ranks_than_cores_has_almost_no_bubble(tmp_path: Path) -> None:
    def bubble(cores: int) -> float:
        on = cluster(f"{_profile(tmp_path, _cpu(2, cores))}:2")
        return estimate_step(MODEL, Plan.parse("pp=2 micro=2"), on, WORK).bubble

    assert bubble(2) > 0.2
    assert bubble(1) < 0.1  # the difference between the stages


def test_a_calibration_is_read_with_the_hosts_speeds(tmp_path: Path) -> None:
    slow = _cpu(2, 2, calibration={"product_fraction": 0.5, "step_s": 1.0})
    assert _step_s(tmp_path, "dp=2", slow) > 1.0 + _step_s(tmp_path, "dp=2", _cpu(2, 2)) / 2
    path = _profile(tmp_path, _cpu(2, 2, calibration={"product_speed": 0.5}))
    with pytest.raises(ProfileError, match=r"unknown constants: product_speed"):
        cluster(f"{path}:2")


def test_plans_determine_at_most_as_many_constants_as_there_are_of_them(tmp_path: Path) -> None:
    on = cluster(f"{_profile(tmp_path, _cpu(2, 2))}:2")
    truth = replace(on.constants, product_fraction=0.8, step_s=0.05)
    plans = [Plan.parse(text) for text in ("dp=2", "tp=2", "dp=2 zero=1", "pp=2 micro=4")]
    runs = []
    for number, plan in enumerate(plans):
        took = estimate_step(MODEL, plan, replace(on, constants=truth), WORK).step_s
        runs.append(Run(number, "here", MODEL, (plan,), on, WORK, Software(), took, None, False))
    for count in range(1, len(runs) + 1):
        names = determined(runs[:count], on.constants)
        assert 1 <= len(names) <= count
        fitted = fit(runs[:count], on.constants, names, {})
        errors = [abs(run.estimate(fitted).step_s / (run.step_s or 1) - 1) for run in runs[:count]]
        assert max(errors) < 0.05
        assert all(
            getattr(fitted, name) == getattr(on.constants, name) for name in {*Constants.names()} - {*names}
        )
    assert len(determined(runs[:1] * 4, on.constants)) == 1  # the same plan again says nothing new


def test_a_measured_gpu_has_the_tables_power_and_the_measured_speed(tmp_path: Path) -> None:
    speed = DeviceSpeed(1, "NVIDIA H200", "cuda", 8, 132, 1.5e11, 4.2e12, 3e-6, {"bf16": ((1e12, 7e14),)})
    path = _profile(tmp_path, speed)
    found = cluster(f"{path}:4").device
    assert (found.watts, found.peak_flops["bf16"], found.memory_bytes_per_s) == (700, 989.4e12, 4.2e12)
    assert found.product_rates["bf16"] == ((1e12, 7e14),)
    with pytest.raises(ProfileError, match="with 16 ranks at work"):
        cluster(f"{path}:16")


NETWORK = (
    ("all-gather", 1, 2, 2e-4, 1.25e-8),
    ("all-gather", 2, 2, 4e-4, 0.75e-8),
    ("all-reduce", 1, 2, 3e-4, 2e-8),
    ("send-receive", 1, 2, 1e-4, 3e-8),
)


def test_a_measured_network_prices_collectives_over_hosts(tmp_path: Path) -> None:
    path = _profile(tmp_path, _cpu(2, 2, network=NETWORK))
    links = Links.of(two := cluster(f"{path}:2x2"), two.constants)
    assert (two.num_hosts, two.num_devices) == (2, 4)
    assert collective_s("all-gather", links, Group(4, 1, 4), 1e6) == pytest.approx(4e-4 + 0.75e-2)
    assert collective_s("foreign all-reduce", links, Group(2, 2, 4), 1e6) == pytest.approx(3e-4 + 2e-2)
    assert collective_s("foreign all-reduce", links, Group(2, 1, 4), 1e6) == pytest.approx(1e-4 + 2e-3)
    assert send_s(links, 2, 4, 1e6) == pytest.approx(1e-4 + 3e-2)


def test_a_measured_network_is_extrapolated_to_more_hosts(tmp_path: Path) -> None:
    """The ring over 16 hosts passes on 31/32 of the bytes, and those of two hosts 3/4 in 7.5 ns per byte."""
    path = _profile(tmp_path, _cpu(2, 2, network=NETWORK))
    links = Links.of(many := cluster(f"{path}:16x2"), many.constants)
    assert many.network_bytes_per_s == pytest.approx(1e8)
    large_s = collective_s("all-gather", links, Group(32, 1, 32), 2e9)
    assert large_s == pytest.approx(31 / 32 * 20, rel=0.01)
    two_s, many_s = (_step_at(f"{path}:{hosts}x2", f"dp={2 * hosts}", 2 * hosts) for hosts in (2, 16))
    assert many_s > two_s


def _step_at(name: str, plan: str, batch: int) -> float:
    return estimate_step(MODEL, Plan.parse(plan), cluster(name), replace(WORK, batch=batch)).step_s


def test_a_network_that_was_not_measured_is_an_error_that_says_how(tmp_path: Path) -> None:
    for network in ((), (("all-reduce", 1, 2, 3e-4, 2e-8),)):
        path = _profile(tmp_path, _cpu(2, 2, network=network))
        with pytest.raises(ProfileError, match=r"json:4x2(.|\n)*torchrun --nnodes 2 --nproc-per-node 2"):
            cluster(f"{path}:4x2")


def test_a_measurement_on_one_host_keeps_the_network(tmp_path: Path) -> None:
    _profile(tmp_path, _cpu(2, 2, network=NETWORK))
    path = _profile(tmp_path, _cpu(2, 2, launch_s=1e-6))
    assert cluster(f"{path}:2x2").constants.launch_s == 1e-6
