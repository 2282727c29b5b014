"""The planner's devices and clusters: names, figures, arithmetic of the network, errors."""

import re
from pathlib import Path

import pytest

from plait.errors import ConfigError, PlanError
from plait.plan.devices import device, device_of_driver, devices
from plait.planner.cluster import Cluster, cluster, fat_tree, max_endpoints, preset_names
from planner_lab.figures import machines


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "h100-sxm-80gb"),
        ("A100-SXM-80GB(inferred)", "a100-sxm-80gb"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("NVIDIA H200 NVL", "h200-nvl-141gb"),
        ("V100-32GB", "v100-32gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
    ],
)
def test_a_device_is_found_by_the_names_of_published_reports(name: str, expected: str) -> None:
    assert device(name).name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM-64GB", "a100-sxm-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA GB200", "gb200-186gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_reports(name: str, expected: str | None) -> None:
    found = device_of_driver(name)
    assert (found and found.name) == expected


def test_figures_are_those_of_the_lectures_tables() -> None:
    h100, nvl, h200_nvl = device("h100"), device("h100-nvl"), device("h200-nvl")
    assert h100.memory_bytes_per_s == 3350e9
    assert 2 * h100.link_bytes_per_s == 900e9  # NVSwitch, both ways
    assert 2 * h100.host_bytes_per_s == 128e9  # PCIe 5 x16, both ways
    # The data sheet's bandwidth; the lecture has 3.35 TB/s, that of an H100 SXM, and from it a ratio of 1.4.
    assert (nvl.sheet_bytes, nvl.memory_bytes_per_s) == (94e9, 3938e9)
    assert (h200_nvl.sheet_bytes, h200_nvl.memory_bytes_per_s) == (141e9, 4800e9)
    assert nvl.peak_flops["bf16"] == h200_nvl.peak_flops["bf16"] == 835.5e12
    assert cluster("dgx-a100").network_bytes_per_s * 8 == 1.6e12
    assert cluster("hgx-h100").network_bytes_per_s * 8 == 3.2e12
    [bridges] = [each for each in machines() if "bridges" in each.title]
    pair, four, ratio = ((row[1], row[2], row[4], row[5]) for row in bridges.rows)
    assert (pair, four) == ((2, 188, 600, 600), (4, 564, 900, 1800))
    assert (ratio[1], ratio[3]) == (3, 3)
    assert round(4800 / 3350, 1) == 1.4
    for name, of in (("h100-nvl-pair", nvl), ("h200-nvl-four", h200_nvl)):
        hosts = cluster(f"{name}:1")
        assert (hosts.domain_size, hosts.device.link_bytes_per_s) == (of.bridged, of.bridge_bytes_per_s)


def test_every_device_has_plausible_figures_and_their_source() -> None:
    for each in devices():
        peaks = each.peak_flops
        assert re.search(r"20\d\d", each.source), each.name
        assert 0.9 < each.memory_bytes / each.sheet_bytes <= 2**30 / 1e9, each.name
        assert peaks["fp64"] <= peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) <= peaks["fp16"], each.name
        assert each.link_bytes_per_s < each.memory_bytes_per_s, each.name
        assert hash(each) == hash(each)


@pytest.mark.parametrize(
    ("text", "hosts", "host_size", "domain"),
    [
        ("dgx-h100:64", 64, 8, 8),
        ("gb200-nvl72:8", 144, 4, 72),
        ("p4d:16", 16, 8, 8),
        ("dgx-h100:512gpus", 64, 8, 8),
        ("h100:64", 8, 8, 8),
        ("dgx-h100:4gpus", 1, 4, 4),
        ("gb200-nvl72:8gpus", 2, 4, 8),
        ("gb200-nvl72:144gpus", 36, 4, 72),
        ("gb200-nvl72:64gpus", 16, 4, 64),
        ("dgx-h100:3gpus", 1, 3, 3),
        ("dgx-h100:12gpus", 2, 6, 6),
    ],
)
def test_a_preset_counts_hosts_racks_or_devices(text: str, hosts: int, host_size: int, domain: int) -> None:
    found = cluster(text)
    assert (found.num_hosts, found.host_size, found.domain_size) == (hosts, host_size, domain)


def test_every_preset_is_a_cluster() -> None:
    assert len(preset_names()) >= 25
    for name in preset_names():
        found = cluster(f"{name}:2")
        assert found.num_devices == 2 * cluster(name).num_devices
        assert found.bisection_bytes_per_s > 0


def test_a_full_fat_tree_has_a_quarter_of_the_ports_cubed_of_hosts() -> None:
    for ports in (4, 24, 48, 64):
        assert max_endpoints(ports, 1) == ports
        assert max_endpoints(ports, 2) == ports**2 // 2
        hosts = max_endpoints(ports, 3)
        assert hosts == ports**3 // 4
        tree = fat_tree(hosts, ports)
        assert tree.switches == (ports**2 // 2, ports**2 // 2, ports**2 // 4)
        assert (tree.num_switches, tree.links) == (5 * ports**2 // 4, 3 * hosts)
        assert tree.bisection_links == hosts // 2  # full bisection


def test_the_network_of_512_gpus_has_16_leaves_and_8_spines() -> None:
    tree = cluster("dgx-h100:64").tree()
    assert (tree.switches, tree.links, tree.bisection_links) == ((16, 8), 1024, 256)


def test_oversubscription_divides_bisection_and_switches_above_the_leaves() -> None:
    full, shared = fat_tree(1536, 64), fat_tree(1536, 64, 3.0)
    assert (full.bisection_links, shared.bisection_links) == (768, 256)
    assert shared.num_switches < full.num_switches
    pods = cluster("grand-teton:2048")
    assert pods.bisection_bytes_per_s == cluster("dgx-h100:2048").bisection_bytes_per_s / 7
    one_pod = cluster("grand-teton:384")
    assert one_pod.bisection_bytes_per_s == cluster("dgx-h100:384").bisection_bytes_per_s


def test_the_bisection_of_a_ring_is_two_cables() -> None:
    assert cluster("workstation-ring:8").bisection_bytes_per_s == 2 * 25e9 / 8 / 2
    assert cluster("workstation-ring:2").bisection_bytes_per_s == 25e9 / 8 / 2


def _written(folder: Path, text: str) -> Cluster:
    path = folder / "own.toml"
    path.write_text(text)
    return cluster(str(path))


def test_a_file_describes_a_cluster_of_its_own(tmp_path: Path) -> None:
    own = _written(
        tmp_path,
        'device = "h100-pcie"\nhosts = 6\ndevices_per_host = 4\nnetwork_gbit_per_s = 100\n'
        "dollars_per_hour = 1.5\nlink_gb_per_s = 300\n",
    )
    assert (own.name, own.num_devices, own.network_bytes_per_s) == ("own", 24, 12.5e9)
    assert (own.device.dollars_per_hour, own.device.link_bytes_per_s) == (1.5, 300e9)
    changed = _written(tmp_path, 'base = "dgx-h100"\nhosts = 16\noversubscription = 2\n')
    assert (changed.num_devices, changed.rails, changed.oversubscription) == (128, 8, 2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dgx-h100:13gpus", "13 devices do not fill hosts of 8.*try     : dgx-h100:8gpus"),
        ("h100:60", "60 devices do not fill hosts of 8.*try     : h100:56 or h100:64"),
        ("dgx-h10:3", "unknown cluster.*try     : dgx-h100"),
        ("dgx-h100:many", "a cluster's count is not a number.*NAME:UNITS"),
        ("missing/own.toml", "the cluster's file cannot be read.*No such file"),
    ],
)
def test_an_unusable_name_gets_one_error_with_what_would_work(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(text)
    assert re.search(words, str(error.value), re.DOTALL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'device = "h100"\nhosts = 8\ndevices_per_host = 8',
            "no network_gbit_per_s.*network_gbit_per_s = 3200",
        ),
        ('base = "dgx-h100"', "no hosts.*try     : hosts = 8"),
        ('base = "dgx-h100"\nhosts = 2\ndevice = "h300"', "unknown device"),
        ('base = "dgx-h100"\nhosts = 2\nhots = 3', "unknown key 'hots'.*try     : hosts"),
        ('base = "dgx-h100"\nhosts = 2\ndomain = 12', "not a number of full hosts.*domain = 8"),
        ('base = "dgx-h100"\nhosts = 0', "hosts of a cluster is not a number"),
        ('base = "dgx-h100"\nhosts = 2\noversubscription = 0.5', "out of range.*from 1"),
        ('base = "dgx-h100"\nhosts = 2\ntopology = "torus"', "unknown topology.*tree or ring"),
        ("hosts = = 2", "not TOML"),
    ],
)
def test_a_file_with_a_mistake_gets_one_error_with_what_would_work(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _written(tmp_path, text)
    assert re.search(words, str(error.value), re.DOTALL)


def test_an_unknown_device_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown device(.|\n)*try     : h100"):
        device("h1000")


def test_a_device_with_float8_has_both_ways_of_scaling_and_tf32_is_not_named_as_a_precision() -> None:
    device("h100").check_precision("fp8-rowwise")
    with pytest.raises(PlanError) as caught:
        device("a100").check_precision("fp8-rowwise")
    assert caught.value.expected == "fp64 or fp32 or bf16 or fp16"
