"""`plait plan`: a plan for a cluster from a configuration, prices and comparisons."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.main import app
from plait.errors import ConfigError
from plait.fileio import parse_json
from plait.plan import Plan
from plait.plan.host_profile import DeviceSpeed, HostProfile, save
from plait.planner import ModelShape, Software, Workload, cluster, estimate_step

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
}
WORK = ("--cluster", "dgx-h100:1", "--batch-tokens", "512K", "--seq", "4096")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_a_config_and_a_cluster_give_ranked_plans(config: str) -> None:
    code, text = run(
        "--model", config, *WORK, "--tokens", "1T", "--top", "3", "--pin", "recompute=none", "--json", "-"
    )
    assert code == 0, text
    plans = json.loads(text)["plans"]
    assert len(plans) == 3
    assert [each["step_s"] for each in plans] == sorted(each["step_s"] for each in plans)
    assert all(Plan.parse(each["plan"]).num_ranks == 8 for each in plans)
    assert plans[0]["device_hours"] == pytest.approx(plans[0]["days"] * 24 * 8)
    code, text = run("--model", config, *WORK, "--plan", plans[0]["plan"], "--json", "-")
    assert json.loads(text)["step_s"] == plans[0]["step_s"]


def test_tables_show_parts_and_differences(config: str) -> None:
    code, text = run("--model", config, *WORK, "--plan", "dp=8 zero=1 precision=bf16")
    assert code == 0, text
    assert "compute" in text
    code, text = run("--model", config, *WORK, "--compare", "dp=8 precision=bf16", "tp=8 precision=bf16")
    assert code == 0, text
    assert "tensor communication" in text


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ((), "`plait plan` needs --model, --cluster and --batch-tokens"),
        (("--model", "CONFIG", *WORK[:2], "--batch-tokens", "5000", "--seq", "4096"), "full sequences"),
        (("--model", "CONFIG", "--cluster", "dgx-h1000", *WORK[2:]), "unknown cluster"),
        (("--model", "missing.json", *WORK), "no such model"),
        (("--model", "CONFIG", *WORK, "--deadline", "soon"), "not a duration"),
        (("--model", "CONFIG", *WORK, "--pin", "tp=3"), "pinned values"),
        (("--model", "CONFIG", *WORK, "--plan", "dp=16"), "do not multiply"),
    ],
)
def test_mistakes_are_errors_of_the_command(config: str, arguments: tuple[str, ...], fact: str) -> None:
    code, text = run(*(config if each == "CONFIG" else each for each in arguments))
    assert code == 2
    assert fact in text


def test_a_plan_that_the_planner_picks_is_explained(config: str) -> None:
    _, text = run("--model", config, *WORK, "--top", "1", "--pin", "pp=2", "--json", "-")
    plan = json.loads(text)["plans"][0]["plan"]
    arguments = ["explain", "--model", config, "--plan", plan, "--batch", "128", "--sequence", "4096"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_measured_plans_correct_later_predictions(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"fp32": ((1e6, 2e10), (1e9, 1e11))}
    speed = DeviceSpeed(2, "x86_64", "cpu", 2, 1, 1e12, 6e9, 5e-6, rates)
    host = save(HostProfile({}, {2: speed}), tmp_path / "host.json")
    work = ("--model", config, "--cluster", f"{host}:2", "--batch-tokens", "16K", "--seq", "4096")

    def predicted_s(plan: str = "dp=2 precision=fp32") -> float:
        code, text = run(*work, "--plan", plan, "--json", "-")
        assert code == 0, text
        seconds: float = json.loads(text)["step_s"]
        return seconds

    before_s = predicted_s()
    monkeypatch.setattr(
        "plait.bench.plans.step_seconds", lambda _, plan, **__: 1.5 * predicted_s(f"{plan} precision=fp32")
    )
    code, text = run(*work, "--pin", "precision=fp32 recompute=none", "--measure", "3")
    assert code == 0, text
    found = re.search(r"3 plans determine (\d+) of (\d+) constants: \w+ \S+ -> ", text)
    assert found is not None, text
    assert 1 <= int(found[1]) <= 3 < int(found[2])
    assert f"saved: {host}" in text.replace("\n", "")
    assert predicted_s() == pytest.approx(1.5 * before_s, rel=0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=32 hiden=4096 heads=32 vocab=100", ("given   : hiden=4096", "try     : hidden")),
        ("layers=² hidden=64 heads=4 vocab=100", ("no usable layers",)),
        ("layers=99999999 hidden=64 heads=4 vocab=100", ("out of range", "try     : layers=4096")),
        ("layers=4 hidden=64 heads=4 vocab=99999999999999999999", ("no usable vocab",)),
        ("meta-llama/Llama-9-8B", ("no such model", "llama-3-8b", "hf download meta-llama/Llama-9-8B")),
        ("nowhere/config.json", ("no such model", "a config.json")),
        ("LIST", ("not a JSON object", "given   : ['a', 1]")),
        ("RATIO", ("no usable expansion_ratio", "given   : 'x'")),
        ("SMALL", ("do not divide", "try     : head_dim=1")),
    ],
)
def test_a_model_that_cannot_be_read_is_an_error_that_says_what_can(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    contents = {
        "LIST": ["a", 1],
        "RATIO": {**sizes, "expansion_ratio": "x"},
        "SMALL": {**sizes, "hidden": 8, "heads": 16},
    }
    if text in contents:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(contents[text]))
        text = str(path)
    code, output = run("--model", text, *WORK)
    assert code == 2
    for word in (*words, "try     :"):
        assert word in output


def test_names_of_models_and_paths_with_an_equals_sign_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for model in (str(folder), "llama-3-8b", "meta-llama/Meta-Llama-3-8B"):
        code, text = run("--model", model, *WORK, "--plan", "tp=8 zero=0")
        assert code == 0, text


def test_a_long_text_of_sizes_is_not_looked_up_as_a_path() -> None:
    sizes = "layers=32 hidden=4096 heads=32 vocab=32000"
    assert ModelShape.named(f"{sizes}{' ' * 300}gated=true").layers == 32
    with pytest.raises(ConfigError, match="no such model"):
        ModelShape.named("x" * 300)


MODELS = {
    "gpt-3-175b": 174.6,
    "llama-3-8b": 8.03,
    "llama-3-405b": 405.9,
    "mixtral-8x7b": 46.7,
    "qwen3-8b": 8.19,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_sizes(name: str) -> None:
    assert ModelShape.named(name).num_params / 1e9 == pytest.approx(MODELS[name], rel=0.002)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--plan", "dp=8 ep=8"), "the model has no experts that ep divides"),
        (("--pin", "ep=2"), "the model has no experts that ep divides"),
        (("--pin", "cp=3 tp=8"), "no plan of 8 devices has the pinned values"),
    ],
)
def test_parallelism_that_is_missing_is_named(config: str, words: tuple[str, str], fact: str) -> None:
    code, text = run("--model", config, *WORK, *words)
    assert code == 2
    assert fact in text
    assert "try     : " in text
    assert "ep=" not in text.split("try     : ")[1], "no value of ep divides what the model lacks"


def test_a_plan_has_the_searched_numbers_and_its_two_memories_are_named(config: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    code, text = run("--model", config, *WORK, "--pin", "tp=2", "--top", "1", "--json", str(out))
    assert code == 0, text
    [found] = json.loads(out.read_text())["plans"]
    assert "simplest within 3%" in text, "the table is printed too"
    plan = found["plan"].replace(" precision=bf16", "")
    code, text = run("--model", config, *WORK, "--plan", plan, "--json", str(out))
    assert code == 0, text
    assert json.loads(out.read_text())["step_s"] == found["step_s"]
    assert "upper end on the fullest rank" in " ".join(text.split())
    assert "memory, middle estimate on the fullest rank" in text


def test_an_answer_says_what_the_planner_does_not_know(config: str) -> None:
    work = ("--cluster", "dgx-a100:8", "--batch-tokens", "1M", "--seq", "32768", "--top", "1")
    code, text = run("--model", "mixtral-8x7b", *work, "--pin", "tp=16 pp=1 zero=3 recompute=full")
    assert code == 0, text
    for words in ("12,879,925,248", "spread evenly", "fitted", "(tp across hosts)"):
        assert words in " ".join(text.split())
    code, text = run("--model", config, *WORK, "--pin", "tp=2 pp=1")
    assert not any(words in text for words in ("fitted", "across"))


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        ("dp=32 cp=2 ep=8 zero=3", ""),  # ep takes the ranks of cp first: eight neighbours
        ("dp=16 cp=4 ep=2 zero=3", ""),
        ("dp=32 tp=2 ep=8 zero=3", "(ep across hosts)"),
        ("dp=4 cp=16 ep=8 zero=3", "(cp across hosts)"),
    ],
)
def test_a_group_across_hosts_is_named(plan: str, where: str) -> None:
    work = ("--cluster", "dgx-h100:8", "--batch-tokens", "2M", "--seq", "4096")
    code, text = run("--model", "mixtral-8x7b", *work, "--plan", plan)
    assert code == 0, text
    assert (where in text) if where else ("across" not in text)


def test_no_time_is_lost_to_columns_that_a_plan_does_not_have() -> None:
    plan, work = Plan.parse("dp=32 cp=2 ep=8 zero=3 precision=bf16"), Workload(sequence=4096, batch=512)
    found = estimate_step(ModelShape.named("mixtral-8x7b"), plan, cluster("dgx-h100:8"), work)
    assert found.parts["tensor communication"] == 0.0
    assert sum(found.parts.values()) == pytest.approx(found.step_s)


ADAPTED = ("--model", "llama-3-70b", "--cluster", "dgx-h100:1", "--batch-tokens", "256K", "--seq", "4096")


def test_an_adapter_over_a_quantized_base_fits_where_full_training_does_not(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    options = ("--adapter", "r=16", "--pin", "base=nf4 pp=1 sp=false", "--top", "1", "--json", str(path))
    code, text = run(*ADAPTED, *options)
    assert code == 0, text
    best = parse_json(path.read_text())["plans"][0]
    assert "base=nf4" in best["plan"]
    code, text = run(*ADAPTED, "--adapter", "r=16", "--plan", best["plan"])
    assert code == 0, text
    full = run(*ADAPTED, "--pin", "pp=1 offload=none")
    assert full[0] == 2
    assert "fits into the memory" in full[1]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--adapter", "r=16 target_modules=q_proj"), "not the rank of an adapter"),
        (("--adapter", "r=0"), "not the rank of an adapter"),
        (("--pin", "base=nf4"), "base is for frozen weights"),
        (("--adapter", "r=16", "--pin", "tp=2x4"), "adapters need a tp grid of one row"),
        (("--adapter", "r=16", "--plan", "dp=1 tp=8 base=nf4"), ""),
        (("--adapter", "r=16", "--measure", "1"), "cannot be measured"),
        (("--model", "mixtral-8x7b", "--adapter", "r=16"), "adapters of a mixture of experts are not priced"),
    ],
)
def test_unknown_options_of_adapters_are_refused_by_name(options: tuple[str, ...], fact: str) -> None:
    code, text = run(*ADAPTED, *options)
    assert code == (2 if fact else 0), text
    assert fact in text


def test_states_in_8_bits_take_less_memory_and_longer() -> None:
    plan, work = Plan.parse("dp=8 precision=bf16"), Workload(sequence=4096, batch=64)
    model, node = ModelShape.named("llama-3-8b"), cluster("dgx-h100:1")
    wide, coded = (
        estimate_step(model, plan, node, work, Software(optimizer=name)) for name in ("AdamW", "AdamW8bit")
    )
    assert 0.25 < coded.memory.optimizer / wide.memory.optimizer < 0.26
    assert coded.parts["optimizer"] > wide.parts["optimizer"]


def test_a_recipe_is_refused_with_the_command_that_knows_its_frozen_weights() -> None:
    with pytest.raises(ConfigError, match="is not JSON") as error:
        ModelShape.named("recipes/lora.toml")
    assert "plait explain" in str(error.value)
