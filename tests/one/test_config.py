"""Recipes: their keys and values, and the errors for what is not allowed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from plait.data.tokenizer import read_tokenizer
from plait.errors import ConfigError, ModelError, PlaitError
from plait.models import read_config
from plait.plan import Plan
from plait.plan.loss_scaling import LossScaling
from plait.train.config import Recipe, differences, read_recipe
from plait.train.optimizer import check_optimizer_args, lr_lambda, optimizer_class
from plait.train.sections import OPTIMIZERS, BatchRampConfig, ScheduleConfig
from plait.verify.model_spec import parse_source

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
plan = "dp=2 micro=2"
[run]
dir = "runs/x"
steps = 100
batch = 8
[model.config]
model_type = "llama"
hidden_size = 32
[data]
dir = "data/x"
sources = ["*.txt"]
sequence = 64
[tokenizer]
vocab_size = 512
[optimizer]
lr = 1e-3
args = { betas = [0.9, 0.95] }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def message(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return caught.value.message()


def read_and_check(path: Path, sets: list[str]) -> Recipe:
    """Also checks what only torch knows of the optimizer."""
    recipe = read_recipe(path, sets)
    check_optimizer_args(recipe.optimizer)
    return recipe


def test_a_recipe_has_the_values_of_its_file_and_defaults_for_the_rest(recipe: Path) -> None:
    found = read_recipe(recipe)
    assert Plan.parse(found.plan) == Plan(dp=2, micro=2)
    assert (found.run.steps, found.run.log_every, found.run.dir) == (100, 10, Path("runs/x"))
    assert optimizer_class(found.optimizer) is torch.optim.AdamW
    assert found.optimizer.torch_args() == {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95]}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_that_we_ship_are_valid(path: Path) -> None:
    found = read_recipe(path)
    Plan.parse(found.plan).check_batch(found.run.batch)


def test_fine_tuning_starts_from_weights_and_trains_on_rows_of_documents(recipe: Path) -> None:
    sets = ["task=sft", "model.config=", "model.path=here", "tokenizer.vocab_size="]
    found = read_recipe(recipe, sets)
    assert (found.data.kind, found.data.samples, found.model.pretrained) == ("chat", "bins", True)
    assert found.tokenizer.path == Path("here")
    found = read_recipe(recipe, [*sets, "data.kind=prompt", "data.samples=documents", "tokenizer.path=other"])
    assert (found.data.kind, found.data.samples) == ("prompt", "documents")
    assert found.tokenizer.path == Path("other")
    for wrong, hint in (
        ("model.path=", "--set model.path=FOLDER"),
        ("model.pretrained=false", "--set task=pretrain"),
        ("data.kind=text", "--set task=pretrain"),
    ):
        text = message(lambda wrong=wrong: read_recipe(recipe, [*sets, wrong]))  # type: ignore[misc]
        assert "fine-tuning trains given weights on conversations" in text
        assert hint in text


def test_a_saved_recipe_reads_back_as_itself(recipe: Path, tmp_path: Path) -> None:
    found = read_recipe(recipe)
    saved = tmp_path / "recipe.json"
    saved.write_text(json.dumps(found.model_dump(mode="json")))
    assert read_recipe(saved) == found
    assert differences(read_recipe(saved), found) == []
    other = read_recipe(saved, ["run.dir=elsewhere", "model.config.hidden_size=64", "optimizer.lr=0.1"])
    assert sorted(differences(other, found)) == ["model.config.hidden_size", "optimizer.lr"]


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("run.steps=7", lambda r: r.run.steps, 7),
        ("run.dir=/a b/c", lambda r: r.run.dir, Path("/a b/c")),
        ('run.dir="q"', lambda r: r.run.dir, Path("q")),
        ("optimizer.lr=1", lambda r: r.optimizer.lr, 1.0),
        ('data.sources=["a", "b"]', lambda r: r.data.sources, ["a", "b"]),
        ("data.verify=false", lambda r: r.data.verify, False),
        ("schedule.name=linear", lambda r: r.schedule.name, "linear"),
        ("model.config.tie_word_embeddings=true", lambda r: r.model.config["tie_word_embeddings"], True),
        ("plan=dp=4", lambda r: r.plan, "dp=4"),
    ],
)
def test_set_puts_a_value_over_the_recipes(
    recipe: Path, assignment: str, key: Callable[[Recipe], Any], value: object
) -> None:
    assert key(read_recipe(recipe, [assignment])) == value


def test_a_set_without_a_value_takes_the_key_out(recipe: Path) -> None:
    plain = read_recipe(recipe)
    full = read_recipe(recipe, ["optimizer.clip_norm=1.0", "loss_scale.interval=7", "sample.prompt=a"])
    saved = recipe.with_name("saved.json")
    saved.write_text(json.dumps(full.model_dump(mode="json")))
    assert (
        read_recipe(saved, ["optimizer.clip_norm=", "loss_scale= ", "sample.prompt=", "run.save_s="]) == plain
    )
    assert "has no run.steps" in message(lambda: read_recipe(recipe, ["run.steps="]))
    assert read_recipe(recipe, ['sample.prompt=""']).sample.prompt == ""


def test_a_loss_scale_has_the_settings_of_its_section(recipe: Path) -> None:
    assert read_recipe(recipe).loss_scale.scaling() == LossScaling()
    found = read_recipe(recipe, ["loss_scale.initial=1024", "loss_scale.hysteresis=2"])
    assert found.loss_scale.scaling() == LossScaling(initial=1024.0, hysteresis=2)
    assert "initial=1024.0" in message(lambda: read_recipe(recipe, ["loss_scale.initial=1000"]))
    assert "loss_scale.interval" in message(lambda: read_recipe(recipe, ["loss_scale.intervall=3"]))


def test_a_group_of_parameters_has_a_pattern_and_options(recipe: Path) -> None:
    found = read_recipe(recipe, ['optimizer.groups=[{match="*.bias", weight_decay=0.5}]']).optimizer.groups
    assert [(group.match, group.options()) for group in found] == [("*.bias", {"weight_decay": 0.5})]
    for group, words in (
        ('match="*", lrr=1.0', "try     : optimizer.groups.0.lr"),
        ("lr=1.0", "no optimizer.groups.0.match"),
        ('match="*", lr=-1.0', "greater than or equal to 0"),
        ('match="*"', "lr, weight_decay or name"),
        ('match="*", name="Muom"', "try     : Muon"),
        ('match="*", lr=1.0, args={eps=1.0}', "arguments for no optimizer"),
    ):
        assert words in message(lambda group=group: read_recipe(recipe, [f"optimizer.groups=[{{{group}}}]"]))


def test_a_batch_ramp_reaches_the_full_batch_in_whole_increments(recipe: Path) -> None:
    ramp = ["batch_ramp.start=2", "batch_ramp.step=3", "batch_ramp.tokens=1000"]
    assert read_recipe(recipe, ramp).batch_ramp == BatchRampConfig(start=2, step=3, tokens=1000)
    assert read_recipe(recipe).batch_ramp is None
    for assignment, words in (
        ("batch_ramp.step=4", "run.batch = 6"),
        ("batch_ramp.start=8", "run.batch = 11"),
        ("batch_ramp.start=11", "run.batch = 14"),
        ("batch_ramp.tokens=0", "greater than or equal to 1"),
        ("batch_ramp.token=5", "try     : batch_ramp.tokens"),
    ):
        assert words in message(lambda assignment=assignment: read_recipe(recipe, [*ramp, assignment]))


def test_gradients_are_clipped_in_one_way(recipe: Path) -> None:
    found = read_recipe(recipe, ["optimizer.clip_value=0.5"])
    assert (found.optimizer.clip_norm, found.optimizer.clip_value) == (None, 0.5)
    both = ["optimizer.clip_norm=1.0", "optimizer.clip_value=0.5"]
    assert "--set optimizer.clip_norm=" in message(lambda: read_recipe(recipe, both))
    assert read_recipe(recipe, [*both, "optimizer.clip_norm="]) == found


def test_the_plan_on_the_command_line_goes_over_the_recipes(recipe: Path) -> None:
    assert read_recipe(recipe, plan="dp=1 precision=bf16").plan == "dp=1 precision=bf16"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("run.stpes", "run.steps"),
        ("run.checkpoint_evry", "run.checkpoint_every"),
        ("optimizer.learning_rate", "one of"),
        ("optimizer.clipnorm", "optimizer.clip_norm"),
        ("data.seqence", "data.sequence"),
        ("tokenizer.vocabsize", "tokenizer.vocab_size"),
        ("shedule", "schedule"),
        ("steps", "run.steps"),
        ("stpes", "run.steps"),
        ("lr", "optimizer.lr"),
        ("optimizer.args.beta", "betas"),
    ],
)
def test_a_misspelt_key_is_an_error_with_the_nearest_one(recipe: Path, key: str, nearest: str) -> None:
    said = message(lambda: read_and_check(recipe, [f"{key}=3"]))
    assert repr(key.split(".")[-1]) in said.splitlines()[0]
    assert nearest in said.splitlines()[-1]
    assert str(recipe) in said or "args" in key or "." not in key


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("run.steps=many", "run.steps = 'many'"),
        ("run.steps=0", "greater than or equal to 1"),
        ("run.steps=1.5", "run.steps = 1.5"),
        ('run.steps="100"', "run.steps = '100'"),
        ("run.batch=true", "run.batch = True"),
        ("run.dir=3", "run.dir = 3"),
        ("optimizer.lr=-1", "greater than 0"),
        ("optimizer.lr=inf", "finite"),
        ("optimizer.clip_norm=inf", "finite"),
        ("optimizer.clip_value=0", "greater than 0"),
        ("loss_scale.interval=1.5", "loss_scale.interval = 1.5"),
        ("run.offload_dir=3", "run.offload_dir = 3"),
        ("optimizer.weight_decay=nan", "finite"),
        ("run.timeout_s=inf", "run.timeout_s"),
        ("run.timeout_s=1e9", "less than or equal to 2592000"),
        ("run.save_s=0", "greater than 0"),
        ("data.validation=nan", "data.validation"),
        ("schedule.name=cosin", "'cosine'"),
        ("data.sequence=1", "data.sequence = 1"),
        ("run=3", "run = 3"),
        ("tokenizer.path=some", "exactly one of path"),
        ("run.device=tpu", "run.device = 'tpu'"),
        ('run.dir="a\\u0000b"', "without NUL"),
        (f"data.dir={'a' * 256}", "255 in each name"),
        ('data.sources=["a\\u0000b"]', "without NUL"),
        (f"run.steps={'9' * 5000}", "run.steps"),
        (f"run.steps=0x{'f' * 5000}", "run.steps"),
        ("run.batch=9223372036854775807", "less than or equal to"),
        ("data.workers=100000", "less than or equal to 1024"),
        (f"model.config={'{a=' * 10_000}", "model.config"),
        (f"model.config={'{a=' * 70}1{'}' * 70}", "model.config"),
        (f"{'a.' * 10_000}b=1", "--set needs key=value"),
    ],
    ids=lambda text: text[:24],
)
def test_an_invalid_value_is_an_error_with_its_key(recipe: Path, assignment: str, words: str) -> None:
    assert words in message(lambda: read_recipe(recipe, [assignment]))


@pytest.mark.parametrize("assignment", ["run.steps", "=3", ".a=3", "run..steps=3"])
def test_a_set_without_key_and_value_is_an_error_with_an_example(recipe: Path, assignment: str) -> None:
    assert "--set run.steps=100" in message(lambda: read_recipe(recipe, [assignment]))


def test_a_key_below_a_value_is_refused(recipe: Path) -> None:
    assert "is a value" in message(lambda: read_recipe(recipe, ["run.steps.more=3"]))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"', "[" * 100_000, '{"plan": ' + "9" * 5000 + "}"])
def test_a_saved_recipe_that_is_not_one_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.json").write_text(text)
    for sets, plan in (((), None), (("run.steps=3",), None), ((), "dp=2")):
        assert "the recipe is not" in message(lambda: read_recipe(tmp_path / "recipe.json", sets, plan))  # noqa: B023


def test_a_recipe_that_is_no_toml_or_not_there_is_named(tmp_path: Path) -> None:
    assert "does not exist" in message(lambda: read_recipe(tmp_path / "none.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\nsteps = 3")
    assert f"{bad}: " in message(lambda: read_recipe(bad))
    bad.write_bytes(b"\xff\xfe")
    assert "cannot read" in message(lambda: read_recipe(bad))
    (tmp_path / "empty.toml").write_text("")
    assert "has no plan" in message(lambda: read_recipe(tmp_path / "empty.toml"))


def test_a_model_is_a_configuration_or_a_path(recipe: Path) -> None:
    assert "one of the two" in message(lambda: read_recipe(recipe, ["model.path=somewhere"]))
    assert "need a path" in message(lambda: read_recipe(recipe, ["model.pretrained=true"]))


def test_only_optimizers_that_update_each_parameter_by_itself_are_taken(recipe: Path) -> None:
    for name in OPTIMIZERS:
        read_and_check(recipe, [f"optimizer.name={name}", "optimizer.args={}"])
    for name in ("Rprop", "Muon", "LBFGS", "SparseAdam", "Adan"):
        assert f"optimizer.name = '{name}'" in message(
            lambda name=name: read_and_check(recipe, [f"optimizer.name={name}"])
        )
        assert "optimizer.groups" in message(lambda: read_recipe(recipe, ["optimizer.name=Muon"]))
    for arguments in ("fused=false, capturable=true", "differentiable=true"):  # made without a word
        said = message(lambda text=arguments: read_and_check(recipe, [f"optimizer.args={{{text}}}"]))
        assert arguments.split("=")[-2].split()[-1] in said
    assert "Invalid" in message(lambda: read_and_check(recipe, ["optimizer.args={betas=[3.0, 0.9]}"]))
    assert "[optimizer] itself" in message(lambda: read_and_check(recipe, ["optimizer.args={lr=1.0}"]))


def test_a_schedule_longer_than_the_run_is_an_error(recipe: Path) -> None:
    assert "longer than the run" in message(lambda: read_recipe(recipe, ["schedule.warmup=101"]))


def test_a_key_without_effect_on_the_schedule_is_an_error(recipe: Path) -> None:
    for key in ("min_lr_ratio=0.1", "cycles=2", "power=2.0", "timescale=5", "decay=10", "decay_type=linear"):
        said = message(lambda key=key: read_recipe(recipe, ["schedule.name=constant", f"schedule.{key}"]))
        assert f"schedule.{key.partition('=')[0]} has no effect" in said


def test_the_last_phase_of_warmup_stable_decay_has_a_length_and_a_form(recipe: Path) -> None:
    name = "schedule.name=warmup_stable_decay"
    assert "--set schedule.decay=20" in message(lambda: read_recipe(recipe, [name]))
    said = message(lambda: read_recipe(recipe, [name, "schedule.decay=10"]))
    assert "schedule.decay_type=cosine" in said  # the form that recipes without this key had
    read_recipe(recipe, [name, "schedule.decay=10", "schedule.decay_type=1-sqrt"])


STABLE = {"name": "warmup_stable_decay", "decay": 20}


@pytest.mark.parametrize(
    ("keys", "theirs", "specific"),
    [
        ({"name": "constant"}, "constant_with_warmup", {}),
        ({"name": "linear"}, "linear", {}),
        ({"name": "linear", "min_lr_ratio": 0.1}, "polynomial", {"lr_end": 0.05}),
        ({"name": "cosine"}, "cosine", {}),
        ({"name": "cosine", "min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"name": "cosine_with_restarts", "cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"name": "polynomial", "power": 2.0}, "polynomial", {"power": 2.0, "lr_end": 0.0}),
        (
            {"name": "polynomial", "power": 0.5, "min_lr_ratio": 0.2},
            "polynomial",
            {"power": 0.5, "lr_end": 0.1},
        ),
        ({"name": "inverse_sqrt"}, "inverse_sqrt", {}),
        ({"name": "inverse_sqrt", "timescale": 30}, "inverse_sqrt", {"timescale": 30}),
        *[
            (
                {**STABLE, "decay_type": form, "min_lr_ratio": floor},
                "warmup_stable_decay",
                {"num_decay_steps": 20, "decay_type": form, "min_lr_ratio": floor},
            )
            for form, floor in (("linear", 0.0), ("cosine", 0.1), ("1-sqrt", 0.1))
        ],
    ],
)
def test_the_learning_rate_is_that_of_transformers_at_any_step_in_any_order(
    keys: dict[str, Any], theirs: str, specific: dict[str, Any]
) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = get_scheduler(theirs, optimizer, 10, 100, specific)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    if theirs == "warmup_stable_decay":  # transformers' warmup starts at the minimum, ours always at 0
        expected[:10] = [0.05 * step for step in range(10)]
    factor = lr_lambda(ScheduleConfig.model_validate({"warmup": 10, **keys}), 100)
    ours = [0.5 * factor(step) for step in reversed(range(100))][::-1]
    assert ours == (pytest.approx(expected, rel=1e-14, abs=0) if "min_lr_ratio" in keys else expected)


def test_a_configuration_of_deepspeed_is_named_with_the_page_that_translates_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}')
    with pytest.raises(ConfigError, match="a configuration of DeepSpeed is not a recipe") as caught:
        read_recipe(tmp_path / "ds.json")
    assert "docs/moving.md" in str(caught.value.hint)


def test_a_name_of_a_hub_is_answered_with_the_command_that_downloads_it() -> None:
    name = "Qwen/Qwen3-0.6B"
    for read, argument in ((read_config, Path(name)), (read_tokenizer, Path(name))):
        with pytest.raises(PlaitError) as caught:
            read(argument)
        assert f"hf download {name} --local-dir {name}" in str(caught.value.hint)
    with pytest.raises(ModelError) as wrong:
        parse_source(name, layers=1)
    assert "hf download" in str(wrong.value.hint)
