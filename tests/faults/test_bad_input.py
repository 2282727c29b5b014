"""A user's mistakes at the command line: one error, exit code 2, no traceback, no files left.

These are found before a rank starts, so the command runs in this process; one test shows that it is the
same as a process. What only the ranks can find is in test_train.py.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.main import app
from plait.comm import connect
from plait.train.saved_recipe import SavedRecipe
from support.cli_runs import PLAIT, STEPS, finish, start, write_recipe

Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_world() -> None:
    """As in a process that starts: the world of a test before is gone."""
    connect().close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe, its text, its tokens, and a finished run."""
    here = tmp_path_factory.mktemp("mistakes")
    finish(start("train", write_recipe(here), "--plan", "dp=1", "--set", "sample.tokens=0"))
    return here


@pytest.fixture
def here(built: Path, tmp_path: Path) -> Path:
    """A copy of its run and tokens that a test may damage; of the same text."""
    recipe = (built / "recipe.toml").read_text()
    saved = SavedRecipe.read(built / "run" / "recipe.json")
    values = json.dumps(saved.values)
    for name in ("data", "run"):
        shutil.copytree(built / name, tmp_path / name)
        recipe = recipe.replace(f"{built}/{name}", f"{tmp_path}/{name}")
        values = values.replace(f"{built}/{name}", f"{tmp_path}/{name}")
    (tmp_path / "recipe.toml").write_text(recipe)
    replace(saved, values=json.loads(values)).write(tmp_path / "run" / "recipe.json")
    return tmp_path


def everything(here: Path) -> dict[str, bytes]:
    files = (path for path in here.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(here)): path.read_bytes() for path in files}


def message(*words: object) -> str:
    """Standard error of `plait words...`, which must end with code 2 and without a traceback."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert len(re.findall(r"^\w+Error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
    return result.stderr


AT_ALL = ("data.validation=0", "run.evaluate_every=0", "run.batch=1")  # with however little text


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


MIXTRAL = (
    'model.config={model_type="mixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=1, '
    "num_attention_heads=2, num_key_value_heads=2, num_local_experts=2}"
)
GPT_OSS = MIXTRAL.replace("mixtral", "gpt_oss").replace("}", ", head_dim=16, num_experts_per_tok=1}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (sets("run.stpes=3"), ["ConfigError", "'stpes'", "try     : run.steps"]),
        (["--plan", "pd=2"], ["PlanError", "'pd'", "dp"]),
        (["--ranks", "3"], ["PlanError", "3 ranks", "dp=3"]),
        (["--plan", "dp=100000", *sets("run.batch=100000")], ["ConfigError", "more ranks than this host"]),
        (sets("run.batch=6"), ["PlanError", "does not divide", "run.batch=8"]),
        (sets("optimizer.name=Adan"), ["ConfigError", "optimizer.name"]),
        (sets("run.device=cuda"), ["ConfigError", "GPUs"]),
        (sets("run.keep_best=true", "run.evaluate_every=0"), ["ConfigError", "evaluation is off"]),
        (
            ["--plan", "dp=auto tp=2", "--ranks", "3"],
            ["PlanError", "dp=auto tp=2 on 3 ranks", "2 or 4 ranks"],
        ),
        (["--plan", "dp=auto", "--ranks", "3"], ["PlanError", "run.batch=16", "dp=3"]),
        (["--plan", "dp=2 zero=4"], ["PlanError", "unknown ZeRO stage", "zero=4"]),
        (["--plan", "dp=4 zero=1 shard=3"], ["PlanError", "shard does not divide dp", "shard=2"]),
        (["--plan", "dp=2 offload=disk"], ["ConfigError", "no run.offload_dir", "--set run.offload_dir="]),
        (
            ["--plan", "dp=2 offload=disk", *sets("run.offload_dir={here}/fast")],
            ["ConfigError", "No such file", "mkdir -p {here}/fast"],
        ),
        (
            ["--plan", "dp=2 offload=disk", *sets("run.offload_dir={here}/recipe.toml")],
            ["ConfigError", "Not a directory"],
        ),
        (sets("loss_scale.initial=1024"), ["ConfigError", "fp16", "--set loss_scale="]),
        (["--plan", "precision=fp16", *sets("loss_scale.growth=3")], ["ConfigError", "growth=4.0"]),
        (sets("optimizer.clip_value=1"), ["ConfigError", "one of the two"]),
        (sets("model.config.hiden_size=8"), ["ModelError", "'hiden_size'", "model.config.hidden_size"]),
        (sets("model.config.model_type=lama"), ["ModelError", "lama"]),
        (sets("model.config.hidden_size=large"), ["ModelError", "hidden_size"]),
        (
            ["--plan", "tp=4"],
            ["PlanError", "heads of model.layers.0.self_attn over 4 columns", "heads=2", "tp=1x2"],
        ),
        (
            [
                "--plan",
                "tp=301x1",
                *sets("model.config.hidden_size=300", "model.config.num_attention_heads=3"),
            ],
            ["PlanError", "into 301 shards", "300"],
        ),
        (
            ["--plan", "tp=2", *sets('model.tensor_plan={"model.layers.*.mlp.upp_proj"="colwise"}')],
            [
                "ModelError",
                "matches nothing",
                "model.layers.*.mlp.upp_proj",
                "try     : model.layers.*.mlp.up_proj",
            ],
        ),
        (
            sets('model.tensor_plan={"model.layers.*.mlp.up_proj"="colwize"}'),
            ["ModelError", "unknown style for model.layers.0.mlp.up_proj", "colwize", "try     : colwise"],
        ),
        (
            ["--plan", "tp=2 sp=true", *sets('model.config={model_type="rwkv", hidden_size=32}')],
            ["ModelError", "may need all tokens", "tp=1x2 without sp"],
        ),
        (["--plan", "tp=2 sp=true", *sets(GPT_OSS)], ["ModelError", "layers.0.mlp", "tp=1x2 without sp"]),
        (["--plan", "tp=2x2", *sets(MIXTRAL)], ["ModelError", "layers.0.mlp.experts", "try     : tp=1x4"]),
        (sets("model.config.vocab_size=100"), ["DataError", "vocabulary", "vocab_size=100"]),
        (sets("data.sequence=65"), ["DataError", "longer than the model allows", "65"]),
        (sets("sample.prompt=" + "ship " * 64), ["RunError", "no space", "max_position_embeddings=64"]),
        (sets("tokenizer.vocab_size=320"), ["DataError", "another tokenizer"]),
        (sets('data.sources=["{here}/none/*.txt"]', "data.dir={here}/new"), ["DataError", "none"]),
        (sets('data.sources=["{here}/empty.txt"]', "data.dir={here}/new"), ["DataError", "empty"]),
        (sets('data.sources=["{here}/binary.txt"]', "data.dir={here}/new"), ["ContentError", "binary.txt"]),
        (sets("data.validation=0.001", "data.dir={here}/new"), ["DataError", "validation"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else None,
)
def test_a_mistake_is_an_error_and_leaves_no_files(here: Path, words: list[str], says: list[str]) -> None:
    (here / "empty.txt").touch()
    (here / "binary.txt").write_bytes(b"\xff\xfe\x00" * 100)
    before = everything(here)
    words = [word.replace("{here}", str(here)) for word in words]
    said = message("train", here / "recipe.toml", *sets(f"run.dir={here}/other"), *words)
    assert all(word.replace("{here}", str(here)) in said for word in says), said
    left = {name: content for name, content in everything(here).items() if not name.startswith("new/")}
    assert left == before
    assert not (here / "other").exists()
    assert not list(here.glob("*tmp*"))


def first(pattern: str) -> Callable[[Path], Path]:
    return lambda here: sorted(here.glob(pattern))[0]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"), [(cut_short, "is truncated"), (flip_a_bit, "is damaged"), (Path.unlink, "missing")]
)
def test_a_damaged_token_file_is_named(here: Path, damage: Damage, says: str) -> None:
    tokens = max((here / "data").glob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    damage(tokens)
    said = message("train", here / "recipe.toml", *sets(f"run.dir={here}/other"))
    assert "DataError" in said
    assert tokens.name in said
    assert says in said
    assert not (here / "other").exists()


def test_a_run_directory_that_exists_is_not_touched(here: Path) -> None:
    before = everything(here)
    said = message("train", here / "recipe.toml")
    assert "RunError: the run directory already exists" in said
    assert "--resume" in said
    assert "RunError" in message("train", here / "run"), "a run is not a recipe"
    assert everything(here) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{here}/recipe.toml", *sets("run.dir={here}/none")], ["RunError", "does not exist"]),
        (["{here}/data"], ["RunError", "not a run directory"]),
        (
            ["{here}/run", *sets("model.config.hidden_size=64")],
            ["CheckpointError", "another model", "hidden_size"],
        ),
        (
            ["{here}/run", *sets('data.sources=["{here}/*.toml"]', "data.dir={here}/new", *AT_ALL)],
            ["another data"],
        ),
        (["{here}/run", *sets("run.batch=8")], ["CheckpointError", "another order of samples", "batch"]),
        (["{here}/run", *sets("optimizer.name=SGD")], ["CheckpointError", "another optimizer", "'AdamW'"]),
    ],
    ids=["missing", "no run", "another model", "other data", "other samples", "another optimizer"],
)
def test_a_run_that_cannot_be_resumed_is_an_error(here: Path, words: list[str], says: list[str]) -> None:
    before = everything(here)
    said = message("train", *(word.format(here=here) for word in words), "--resume", "--plan", "dp=1")
    assert all(word in said for word in says), said
    assert {k: v for k, v in everything(here).items() if not k.startswith("new/")} == before


def test_a_recipe_edited_since_the_run_began_is_not_resumed_by_accident(here: Path) -> None:
    recipe = here / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("lr = 1e-3", "lr = 2e-3"))
    said = message("train", recipe, "--resume", "--plan", "dp=1", "--set", "sample.tokens=0")
    assert "optimizer.lr differ" in said
    assert f"plait train {here / 'run'} --resume" in said


def test_a_run_without_a_whole_checkpoint_is_an_error_that_names_them_all(here: Path) -> None:
    newest, before = (here / "run" / "checkpoints" / f"step-{step:08d}" for step in (STEPS, 18))
    flip_a_bit(newest / "manifest.json")
    (before / "rank-00000.0.safetensors").unlink()
    said = message("train", here / "run", "--resume")
    assert "CheckpointError: all checkpoints of the run are damaged" in said
    assert f"{newest}/manifest.json: its content does not have the hash" in said
    assert f"{before}/rank-00000.0.safetensors: missing" in said


def test_an_invalid_checkpoint_to_go_back_to_is_named(here: Path) -> None:
    checkpoints = here / "run" / "checkpoints"
    words = ("train", here / "run", "--resume", "--from")
    flip_a_bit(checkpoints / "step-00000018" / "rank-00000.0.safetensors")
    before = everything(here)
    assert "does not have the checksum" in message(*words, checkpoints / "step-00000018"), "read wholly"
    assert "not a checkpoint" in message(*words, checkpoints / "step-00000019")
    shutil.copytree(checkpoints / f"step-{STEPS:08d}", here / f"step-{STEPS:08d}")
    said = message(*words, here / f"step-{STEPS:08d}")
    assert "a run can rewind only to its own checkpoints" in said
    assert "without --resume" in said
    shutil.rmtree(here / f"step-{STEPS:08d}")
    new = ("train", here / "recipe.toml", *sets(f"run.dir={here}/other"), "--plan", "dp=1", "--from")
    assert "does not have the checksum" in message(*new, checkpoints / "step-00000018")
    assert "another order of samples" in message(
        *new, checkpoints / f"step-{STEPS:08d}", *sets("run.batch=8")
    )
    assert everything(here) == before
    assert not list(here.glob("other*"))


def test_a_run_saved_half_is_resumed_from_the_last_whole_checkpoint(here: Path) -> None:
    checkpoints = here / "run" / "checkpoints"
    (checkpoints / f"step-{STEPS:08d}").rename(checkpoints / f"step-{STEPS:08d}.tmp-0a1b2c3d")
    out, _ = finish(start("train", here / "run", "--resume"))
    assert "resumed after step 18" in out
    found = sorted(path.name for path in checkpoints.glob("step-*"))
    assert found == ["step-00000018", f"step-{STEPS:08d}"]


def test_export_and_generate_refuse_missing_runs_and_existing_files(here: Path) -> None:
    assert "RunError: the directory is not that" in message("generate", here / "data", "--prompt", "a")
    assert "RunError" in message("export", here / "none", here / "out")
    assert "RunError: the export's directory exists" in message("export", here / "run", here / "data")
    shutil.rmtree(here / "run" / "checkpoints")
    assert "no checkpoint yet" in message("export", here / "run", here / "out")
    assert not (here / "out").exists()


def test_data_build_reports_its_output_and_its_errors(here: Path) -> None:
    result = CliRunner().invoke(app, ["data", "build", str(here / "recipe.toml")])
    assert result.exit_code == 0
    assert "training tokens" in result.stdout
    assert "ConfigError" in message("data", "build", here / "none.toml")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_taken_port_is_named(here: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_says = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (torchrun_says | {"MASTER_PORT": taken_port}).items():
        monkeypatch.setenv(name, str(value))
    said = message("train", here / "recipe.toml", *sets(f"run.dir={here}/other"))
    assert "CommError" in said
    assert str(taken_port) in said
    assert not (here / "other").exists()


def test_another_number_of_ranks_than_torchruns_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = message("train", here / "recipe.toml", "--ranks", "3", *sets(f"run.dir={here}/other"))
    assert "PlanError" in said
    assert "--ranks 3, WORLD_SIZE=2" in said
    assert not (here / "other").exists()


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", ""])
def test_a_rank_that_is_not_a_number_is_named(
    here: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": number, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("plait.cli.multirank._RANK_0_SHOWS_S", 0.0)
    assert "RANK is not a number" in message("train", here / "recipe.toml", *sets(f"run.dir={here}/other"))


def test_errors_are_the_same_in_a_process_of_their_own(here: Path) -> None:
    out, err = finish(start("train", here / "recipe.toml", "--ranks", "3"), 2)
    assert out == ""
    assert err == message("train", here / "recipe.toml", "--ranks", "3")


def test_debug_adds_the_traceback(here: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(here / "recipe.toml"), "--ranks", "3", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().splitlines()[-4].startswith("PlanError")


# Root reads files without read permission, but for these two capabilities.
AS_ANYONE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


@pytest.fixture(scope="module")
def as_anyone() -> tuple[str, ...]:
    """The words that start plait as a user who may not do everything."""
    as_root = os.geteuid() == 0
    if as_root and (not shutil.which(AS_ANYONE[0]) or subprocess.run([*AS_ANYONE, "true"]).returncode):
        pytest.skip("root may do everything, and cannot give that up here")
    return (*AS_ANYONE, *PLAIT) if as_root else PLAIT


def test_a_folder_to_offload_to_that_cannot_be_written_is_named(
    here: Path, as_anyone: tuple[str, ...]
) -> None:
    (here / "fast").mkdir(mode=0o555)
    words = ["--plan", "dp=2 offload=disk", *sets(f"run.offload_dir={here}/fast", f"run.dir={here}/other")]
    _, err = finish(start("train", here / "recipe.toml", *words, entry=as_anyone), code=2)
    assert err.count("ConfigError") == 1
    assert f"{here}/fast: Permission denied" in err
    assert not (here / "other").exists()


def test_an_unreadable_corpus_is_named(here: Path, as_anyone: tuple[str, ...]) -> None:
    secret = here / "secret.txt"
    secret.write_text("not readable")
    secret.chmod(0)
    words = sets(f'data.sources=["{secret}"]', f"data.dir={here}/new", f"run.dir={here}/other")
    _, err = finish(start("train", here / "recipe.toml", *words, entry=as_anyone), code=2)
    assert f"DataError: cannot read {secret}" in err
    assert "Permission denied" in err
    assert not (here / "other").exists()
