"""`plait bench` as a user types it: its tables, files and errors; under torchrun."""

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.bench import device
from plait.cli.main import app
from plait.plan.cost_model import COLLECTIVES
from plait.plan.host_profile import OPERATORS, ProfileEntry, load
from support import small_device
from support.cli_runs import finish, start, start_torchrun
from support.pages import values_of

BENCH = ("bench", "collectives", "--sizes", "1K:64K", "--rounds", "1")
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PNG = b"\x89PNG\r\n\x1a\n"


def test_two_ranks_are_started_measured_kept_and_drawn(tmp_path: Path) -> None:
    report, picture, profile = (tmp_path / name for name in ("bench.json", "bench.png", "host.json"))
    out, _ = finish(
        start(*BENCH, "--transport", "gloo", "--json", report, "--png", picture, "--profile", profile)
    )
    found = json.loads(report.read_text())
    assert (found["transport"], found["num_ranks"], found["dtype"]) == ("gloo", 2, "float32")
    assert found["machine"].keys() == {"host", "cpu", "cores", "torch", "python"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\+00:00", found["date"])
    times = {(row["verb"], row["num_bytes"]): row for row in found["rows"]}
    sizes = [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    assert set(times) == {(verb, size) for verb in COLLECTIVES if verb != "barrier" for size in sizes} | {
        ("barrier", 0)
    }
    row = times["reduce-scatter", 1 << 16]
    assert row["algorithm_bytes_per_s"] == pytest.approx((1 << 16) / row["median_s"])
    assert row["bus_bytes_per_s"] == pytest.approx(row["algorithm_bytes_per_s"] / 2)

    kept = load(profile)
    assert set(kept.lines) == {ProfileEntry("gloo", verb, 2) for verb in COLLECTIVES}
    expected = times["barrier", 0]["median_s"]
    assert kept.time_s("barrier", 0, 2, transport="gloo") == pytest.approx(expected)
    for verb in COLLECTIVES:
        assert re.search(rf"│ {verb} ", out)
        assert kept.time_s(verb, 1 << 12, 2, transport="gloo") > 0
    assert picture.read_bytes().startswith(PNG)
    assert f"saved: {profile}" in out


@pytest.mark.parametrize(
    ("script", "largest"),
    [
        pytest.param(small_device.__file__, small_device.LARGEST_PRODUCT, id="small"),
        pytest.param("", max(device._SIZES["cpu"]), id="in full", marks=pytest.mark.sweep),
    ],
)
def test_devices_are_measured_and_the_best_plans_run_on_them(
    tmp_path: Path, script: str, largest: int
) -> None:
    profile = tmp_path / "host.json"
    words = ("bench", "device", "--ranks", "2", "--rounds", "1", "--profile", profile)
    out, _ = finish(start(*words, script=script))
    assert f"saved: {profile}, for --cluster this:2" in out
    found = load(profile).devices[2]
    assert (found.num_ranks, found.kind) == (2, "cpu")
    assert 1e8 < found.peak_flops["fp32"] < 1e14
    assert re.search(f"│ +{largest} │", out)
    assert found.operator_rates["fp32"].keys() == set(OPERATORS)
    assert {row[0] for row in found.collectives} >= {"scattered sum", "unshard", "foreign all-reduce"}

    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    here = ("--model", config, "--cluster", f"{profile}:2", "--batch-tokens", "256", "--seq", "64")
    pins = "precision=fp32 pp=1 recompute=none offload=none"
    out, _ = finish(start("plan", *here, "--pin", pins, "--measure", "2"))
    rows = re.findall(r"│ (dp=\d)[^│]*│ +([\d,.]+) │ +([\d,.]+) │ +([+-]\d+)% │", out)
    assert len(rows) == 2, out
    for _, predicted, measured, error in rows:
        said, took = (float(text.replace(",", "")) for text in (predicted, measured))
        assert said / took - 1 == pytest.approx(int(error) / 100, abs=0.1 + 0.1 * said / took)
    constants = re.search(r"2 plans determine (\d) of \d+ constants: ", out)
    assert constants is not None, out
    calibration = load(profile).devices[2].calibration
    assert len(calibration) == int(constants[1]) <= 2


def test_algorithms_are_compared_drawn_next_to_their_formulas_and_not_kept(tmp_path: Path) -> None:
    report, picture, profile = (tmp_path / name for name in ("bench.json", "bench.png", "host.json"))
    page, algorithms = tmp_path / "bench.html", "auto,ring,naive,chain:1,chain:4"
    verbs = "all-reduce,broadcast,send-receive"
    words = ("--collective", verbs, "--algorithm", algorithms, "--profile", profile, "--html", page)
    out, _ = finish(start(*BENCH, *words, "--json", report, "--png", picture))
    values = json.loads(report.read_text())
    found = {row["algorithm"] for row in values["rows"] if row["verb"] != "broadcast"}
    assert found == {"auto", "ring", "naive"}
    assert re.search("│ all-reduce, ring ", out)
    assert set(load(profile).lines) == {ProfileEntry("host", verb, 2) for verb in verbs.split(",")}
    assert picture.read_bytes().startswith(PNG)
    assert values_of(page)["figures"] == values["figures"]
    titles = [figure["title"] for figure in values["figures"]]
    assert titles[2:] == [
        "all-reduce by algorithm",
        "broadcast by algorithm",
        "broadcast of 64K along a chain of 2 ranks",
        "All-reduces of 60 M parameters",
    ]
    assert all(math.isfinite(error) for figure in values["figures"] for _, error in figure["errors"])
    assert [len(figure["errors"]) for figure in values["figures"]] == [0, 0, 2, 3, 1, 0]


def test_a_ddp_step_is_taken_apart_on_two_ranks_shown_and_drawn(tmp_path: Path) -> None:
    report, picture = tmp_path / "ddp.json", tmp_path / "ddp.png"
    words = (
        "--model",
        "tiny",
        "--sequence",
        "16",
        "--rounds",
        "1",
        "--caps",
        "one,64K",
        "--precision",
        "bf16",
    )
    out, _ = finish(start("bench", "ddp", *words, "--json", report, "--png", picture))
    found = json.loads(report.read_text())
    assert (found["model"], found["precision"], found["num_ranks"]) == ("tiny", "bf16", 2)
    assert [(row["carrier"], row["buckets"], row["cap_bytes"]) for row in found["rows"]] == [
        (carrier, *cap) for carrier in ("group", "host") for cap in (("no overlap", None), ("64K", 64 << 10))
    ]
    assert [row["num_buckets"] == 1 for row in found["rows"]] == [True, False] * 2
    for carrier in ("group", "host"):
        assert f"2 ranks, over {carrier}, ms" in out
    assert "2 ranks on 1 host; 1 round in" in out
    assert picture.read_bytes().startswith(PNG)


def test_a_family_of_plans_is_measured_here_and_predicted_beyond(tmp_path: Path) -> None:
    report, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    small = ("--model", "tiny", "--sequence", "16", "--steps", "1", "--rounds", "1")
    beyond = ("--cluster", "h100", "--beyond", "8,64")
    page = tmp_path / "scaling.html"
    words = ("--plan", "dp={n} zero=1", *small, *beyond, "--json", report, "--png", picture, "--html", page)
    out, _ = finish(start("bench", "scaling", *words))
    found = {(row["kind"], row["ranks"]): row for row in json.loads(report.read_text())["points"]}
    assert found.keys() == {*((kind, ranks) for kind in ("weak", "strong") for ranks in (1, 2))} | {
        ("weak", 8),
        ("weak", 64),
    }, "4 sequences do not divide over 8 ranks"
    for (kind, ranks), row in found.items():
        assert row["batch"] == (2 * ranks if kind == "weak" else 4)
        assert row["plan"] == f"dp={ranks} zero=1"
        one = found[kind, 1]
        for seconds, share in (("step_s", "efficiency"), ("predicted_s", "predicted_efficiency")):
            if row[seconds] is not None:
                expected = row["batch"] / one["batch"] * one[seconds] / row[seconds] / ranks
                assert row[share] == pytest.approx(expected)
    assert found["weak", 64]["step_s"] is None
    assert "predicted on h100" in out
    efficiency, throughput = values_of(page)["figures"]
    assert [efficiency, throughput] == json.loads(report.read_text())["figures"]
    drawn = {curve["name"]: dict(curve["points"]) for curve in efficiency["curves"]}
    assert drawn["weak, measured"] == {ranks: found["weak", ranks]["efficiency"] for ranks in (1, 2)}
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plan", "dp=2"], ["no number to vary", 'try     : --plan "dp={n}"']),
        (["--plan", "dp={n}", "--numbers", "1,x"], ["not a list of numbers", "--numbers 1,x"]),
        (["--plan", "dp={n}", "--beyond", "8"], ["need machines to predict", "--cluster h100"]),
        (["--plan", "dp={n} micro=3"], ["batch does not divide", "batch=3"]),
        (["--plan", "dp={n}", "--sequence", "5000"], ["longer than the model's positions"]),
        (["--plan", "zero={n}", "--numbers", "9"], ["unknown ZeRO stage"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else None,
)
def test_scaling_that_cannot_be_measured_is_an_error_before_a_rank_starts(
    tmp_path: Path, words: list[str], says: list[str]
) -> None:
    _fails_with(tmp_path, "scaling", words, says)


def test_under_torchrun_its_ranks_are_measured_and_one_of_them_prints(tmp_path: Path) -> None:
    profile = tmp_path / "host.json"
    words = ("--collective", "barrier,all-reduce", "--storage", "both", "--profile", profile)
    out, _ = finish(start_torchrun("-m", "plait", *BENCH, *words))
    assert out.count("collectives over host, 2 ranks") == 1
    assert {(what.verb, what.storage) for what in load(profile).lines} == {
        ("all-reduce", "owned"),
        ("all-reduce", "foreign"),
        ("barrier", "owned"),
    }


def test_a_mistake_under_torchrun_is_printed_once() -> None:
    process = start_torchrun("-m", "plait", *BENCH, "--no-save", "--ranks", "3")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert err.count("PlanError: torchrun has started another number of ranks") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--collective", "all-reduc"],
            ["ConfigError", "--collective", "'all-reduc'", "try     : all-reduce"],
        ),
        (["--collective", "barrier", "--collective", "shout"], ["'shout'", "one of all-gather, all-reduce"]),
        (["--sizes", "1K:1Q"], ["ConfigError", "invalid sizes", "1K:1Q", "MIN:MAX"]),
        (["--sizes", "0"], ["invalid sizes"]),
        (["--sizes", "-4"], ["invalid sizes"]),
        (["--sizes", ""], ["invalid sizes"]),
        (["--sizes", "1K:2K:3K"], ["invalid sizes"]),
        (["--sizes", "64K:1K"], ["less than the first", "try     : 1K:64K"]),
        (["--dtype", "float31"], ["--dtype", "'float31'", "float32"]),
        (["--transport", "gluu"], ["--transport", "'gluu'", "gloo"]),
        (["--transport", "nccl", "--ranks", "64"], ["NCCL needs a GPU per rank", "64 ranks"]),
        (["--storage", "rented"], ["--storage", "'rented'", "owned"]),
        (["--ranks", "1"], ["needs several ranks", "2 or more"]),
        (["--ranks", "-2"], ["-2 ranks"]),
        (["--rounds", "0"], ["at least one round"]),
        (["--budget", "0"], ["must be positive"]),
        (["--sizes", "1K,4096G"], ["too little memory", "4T on 2 ranks need 32T", "--sizes 1K:"]),
        (["--png", "{here}/none/bench.png"], ["the folder of --png does not exist", "mkdir -p {here}/none"]),
        (["--json", "{here}/none/bench.json"], ["the folder of --json does not exist"]),
        (["--png", "{here}/bench.txt"], ["unsupported image format", ".png"]),
        (["--profile", "{here}/damaged.json"], ["ProfileError", "{here}/damaged.json", "remove the file"]),
        (["--profile", "{here}/damaged.json/host.json"], ["ProfileError", "Not a directory"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else None,
)
def test_a_mistake_is_an_error_before_a_rank_starts(
    tmp_path: Path, words: list[str], says: list[str]
) -> None:
    _fails_with(tmp_path, "collectives", words, says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--transport", "gloo"], ["ConfigError", "--transport", "'gloo'"]),
        (["--caps", "one,few"], ["invalid bucket caps", "--caps one,few"]),
        (["--model", "large"], ["--model", "'large'", "medium, small, tiny"]),
        (["--precision", "bf61"], ["--precision", "try     : bf16"]),
        (["--batch", "0"], ["nothing to measure", "--batch 0"]),
        (["--sequence", "5000"], ["longer than the model's positions", "up to 4096"]),
        (["--rounds", "-1"], ["nothing to measure", "--rounds -1"]),
        (["--ranks", "1"], ["needs several ranks"]),
        (["--model", "medium", "--ranks", "9999"], ["too little memory", "--model tiny"]),
        (["--png", "{here}/ddp.txt"], ["unsupported image format"]),
        (["--json", "{here}/none/ddp.json"], ["the folder of --json does not exist"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else None,
)
def test_a_ddp_step_that_cannot_be_measured_is_an_error_before_a_rank_starts(
    tmp_path: Path, words: list[str], says: list[str]
) -> None:
    _fails_with(tmp_path, "ddp", words, says)


def _fails_with(tmp_path: Path, command: str, words: list[str], says: list[str]) -> None:
    (tmp_path / "damaged.json").write_text("{")
    has_profile = command == "collectives" and "--profile" not in words
    profile = ["--profile", str(tmp_path / "host.json")] if has_profile else []
    given = [word.replace("{here}", str(tmp_path)) for word in words]
    result = CliRunner().invoke(app, ["bench", command, *profile, *given])
    assert result.exit_code == 2, result.output
    assert len(re.findall(r"^\w+Error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert all(word.replace("{here}", str(tmp_path)) in result.stderr for word in says), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.json"]
