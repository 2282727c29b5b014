"""Bandwidths are nccl-tests' own, a fit finds the line through the times, a profile keeps its numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ProfileError
from plait.plan.cost_model import LatencyFit, algorithm_bandwidth, bus_bandwidth, fit
from plait.plan.host_profile import (
    DeviceSpeed,
    HostProfile,
    ProfileEntry,
    check_writable,
    load,
    profile_path,
    save,
)

SIZES = [1 << power for power in range(10, 29, 2)]
ALL_REDUCE = ProfileEntry("gloo", "all-reduce", 2)


@pytest.mark.parametrize(
    ("verb", "factor"),
    [
        ("all-reduce", 1.5),
        ("reduce-scatter", 0.75),
        ("all-gather", 0.75),
        ("scatter", 0.75),
        ("gather", 0.75),
        ("all-to-all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send-receive", 1.0),
        ("barrier", 0.0),
    ],
)
def test_bus_bandwidth_on_4_ranks_is_that_of_nccl_tests(verb: str, factor: float) -> None:
    assert algorithm_bandwidth(4000, 2.0) == 2000.0
    assert bus_bandwidth(verb, 4000, 4, 2.0) == factor * 2000.0


@given(st.integers(2, 64), st.floats(1e-6, 10.0), st.integers(1, 10**9))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(p: int, seconds: float, size: int) -> None:
    parts = bus_bandwidth("reduce-scatter", size, p, seconds) + bus_bandwidth("all-gather", size, p, seconds)
    assert math.isclose(bus_bandwidth("all-reduce", size, p, seconds), parts)


# Where both can be seen: the smallest size's time is mostly latency, the largest one's mostly bandwidth.
LATENCIES = st.floats(1e-6, 1e-2)
CROSSINGS = st.floats(2.0**11, 2.0**27)  # bytes that take as long as the latency


@given(LATENCIES, CROSSINGS, st.lists(st.sampled_from(SIZES), max_size=5))
def test_times_on_a_line_give_back_the_line(latency: float, crossing: float, more: list[int]) -> None:
    truth = LatencyFit(latency, crossing / latency, 0.0)
    found = fit([(size, truth.time_s(size)) for size in SIZES + more])
    assert found is not None
    assert math.isclose(found.latency_s, latency, rel_tol=1e-7)
    assert math.isclose(found.bytes_per_s, truth.bytes_per_s, rel_tol=1e-7)
    assert found.error < 1e-9


@given(LATENCIES, CROSSINGS, st.sampled_from(range(len(SIZES))), st.floats(2.0, 20.0))
def test_one_disturbed_size_hardly_moves_the_line(
    latency: float, crossing: float, disturbed: int, factor: float
) -> None:
    truth = LatencyFit(latency, crossing / latency, 0.0)
    points = [(size, truth.time_s(size)) for size in SIZES]
    points[disturbed] = (points[disturbed][0], factor * points[disturbed][1])
    found = fit(points)
    assert found is not None
    others = [size for number, size in enumerate(SIZES) if number != disturbed]
    assert all(math.isclose(found.time_s(size), truth.time_s(size), rel_tol=0.02) for size in others)


@given(st.lists(st.tuples(st.sampled_from([0, *SIZES]), st.floats(1e-7, 10.0)), min_size=2, max_size=20))
def test_no_times_give_a_negative_latency_or_bandwidth(points: list[tuple[int, float]]) -> None:
    found = fit(points)
    if found is None:
        assert len({size for size, _ in points}) == 1
    else:
        assert found.latency_s >= 0
        assert found.bytes_per_s > 0
        assert found.time_s(1 << 20) > 0


def test_a_barrier_is_all_latency_and_a_single_size_has_no_line() -> None:
    assert fit([(0, 2.0), (0, 2.0)]) == LatencyFit(2.0, math.inf, 0.0)
    assert fit([(1024, 2.0), (1024, 3.0)]) is None
    assert fit([]) is None


def test_a_profile_returns_the_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "host.json"
    barrier = ProfileEntry("gloo", "barrier", 2)
    save(
        HostProfile({ALL_REDUCE: LatencyFit(1e-4, 1e9, 0.1), barrier: LatencyFit(3e-5, math.inf, 0.0)}), path
    )
    found = load(path)
    assert found.time_s("all-reduce", 10**6, 2, transport="gloo") == pytest.approx(1.1e-3)
    assert found.time_s("barrier", 0, 2, transport="gloo") == 3e-5
    newer = LatencyFit(2e-4, 2e9, 0.2)
    save(HostProfile({ALL_REDUCE: newer, ProfileEntry("gloo", "all-reduce", 4): newer}), path)
    assert load(path).lines == {
        ALL_REDUCE: newer,
        ProfileEntry("gloo", "all-reduce", 4): newer,
        barrier: LatencyFit(3e-5, math.inf, 0.0),
    }
    assert [file.name for file in path.parent.iterdir()] == ["host.json"]


def test_an_unmeasured_verb_is_an_error_with_the_command_that_measures_it() -> None:
    with pytest.raises(ProfileError) as caught:
        HostProfile({ALL_REDUCE: LatencyFit(1e-4, 1e9, 0.1)}).time_s("all-reduce", 8, 4, transport="gloo")
    assert "all-reduce of float32 over gloo on 4 ranks, owned" in str(caught.value)
    assert "--transport gloo --ranks 4 --collective all-reduce" in str(caught.value)


def test_a_profile_is_stored_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "nostromo")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "plait/profiles/nostromo.json"
    assert load().lines == {}
    monkeypatch.setenv("HOME", "/home/ripley")
    for not_absolute in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        assert profile_path() == Path("/home/ripley/.cache/plait/profiles/nostromo.json")


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "transport": "gloo",
        "verb": "all-reduce",
        "num_ranks": 2,
        "storage": "owned",
        "dtype": "float32",
        "latency_s": 1e-4,
        "bytes_per_s": 1e9,
        "error": 0.1,
        **changes,
    }


def file_of(*lines: object) -> str:
    return json.dumps({"format": "plait host profile 1", "lines": lines})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"format": "plait host', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "its format is not"),
        ('{"format": "plait host profile 2", "lines": []}', "its format is not 'plait host profile 1'"),
        ('{"format": "plait host profile 1", "lines": {}}', "`lines` is not a list"),
        (file_of(entry(), 7), "line 1 does not have the keys bytes_per_s"),
        (file_of({"verb": "all-reduce"}), "line 0 does not have the keys"),
        (file_of(entry(verb="all-reduced")), "verb='all-reduced'"),
        (file_of(entry(transport=3)), "transport=3"),
        (file_of(entry(num_ranks=1)), "num_ranks=1"),
        (file_of(entry(num_ranks=2.5)), "num_ranks=2.5"),
        (file_of(entry(latency_s=-1.0)), "latency_s=-1.0"),
        (file_of(entry(latency_s=None)), "latency_s=None"),
        (file_of(entry(latency_s=True)), "latency_s=True"),
        (file_of(entry()).replace("0.0001", "1e999"), "latency_s=inf"),
        (file_of(entry(bytes_per_s=0)), "bytes_per_s=0"),
        (file_of(entry(bytes_per_s="fast")), "bytes_per_s='fast'"),
        (file_of(entry(error=math.nan)), "NaN is not a number"),
    ],
)
def test_a_damaged_profile_is_an_error_and_is_not_changed(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    for action in (load, check_writable, lambda path: save(HostProfile({}), path)):
        with pytest.raises(ProfileError) as caught:
            action(path)
        assert str(path) in str(caught.value)
        assert says in str(caught.value)
        assert "try     : remove the file" in str(caught.value)
    assert path.read_text() == text


def test_an_unwritable_path_is_an_error_before_and_after_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "host.json"
    for action in (check_writable, lambda path: save(HostProfile({}), path)):
        with pytest.raises(ProfileError) as caught:
            action(path)
        assert str(path) in str(caught.value)


SPEED = DeviceSpeed(2, "x86_64", "cpu", 2, 1, 1e10, 6e9, 5e-6, {"fp32": ((1e6, 2e10), (1e9, 8e10))})


def test_speeds_of_devices_are_kept_next_to_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    save(HostProfile({ALL_REDUCE: LatencyFit(1e-4, 1e9, 0.1)}), path)
    save(HostProfile({}, {2: SPEED}), path)
    found = load(path)
    assert (set(found.lines), found.devices) == ({ALL_REDUCE}, {2: SPEED})
    assert SPEED.peak_flops == {"fp32": 8e10}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 0}, "num_ranks=0 is not an integer from 1"),
        ({"launch_s": None}, "launch_s=None is not a number above 0"),
        ({"name": 3}, "name=3 is not a string"),
        ({"product_rates": {}}, "has no precision"),
        ({"product_rates": {"fp32": [[1.0]]}}, "not pairs"),
        ({"product_rates": {"fp32": [[1.0, -1.0]]}}, "not pairs"),
        ({"operator_rates": {"fp32": {"norm": [[1.0, 1.0]]}}}, "operator_rates are not those of linear"),
        ({"collectives": [["all-reduce", 1, 1e-5, 1e-9]]}, "collectives are not rows of a kind, ranks"),
        ({"calibration": {"step_s": -1.0}}, "calibration is not a number above 0"),
        ({"extra": 1}, "does not have the keys num_ranks"),
    ],
)
def test_a_damaged_speed_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "host.json"
    save(HostProfile({}, {2: SPEED}), path)
    content = json.loads(path.read_text())
    content["devices"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=f"damaged(.|\n)*{words}"):
        load(path)
