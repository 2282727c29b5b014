"""A run that Weights & Biases shows, offline. `make test` runs this with its package in PYTHONPATH."""

import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from plait.errors import ConfigError, RunError
from plait.train.boards import check_boards
from plait.train.metrics import Metrics
from plait.train.run_dir import RunDir
from plait.train.saved_recipe import SavedRecipe


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"MODE": "offline", "ERROR_REPORTING": "false", "PROJECT": "tests"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    SavedRecipe({"plan": "dp=2 zero=1"}, {}).write(run.recipe)
    yield run
    wandb.teardown()  # its service has read the variables once


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_and_its_resumption_are_one_run_offline(run: RunDir) -> None:
    for first, last in ((0, 4), (2, 6)):
        with Metrics(run, Console(file=io.StringIO()), first, 6, 2, ["wandb"]) as metrics:
            for step in range(first + 1, last + 1):
                metrics.validation(step, 10.0 - step)
    # Its service writes what it has buffered after `finish` has returned, at the latest now.
    pytest.importorskip("wandb").teardown()
    name = run.wandb.read_text()
    files = sorted(run.path.glob(f"wandb/offline-run-*/run-{name}.wandb"))
    assert len(files) == 2, "of the same id"
    for file in files:
        content = file.read_bytes()
        assert not [words for words in (b"validation/loss", b"dp=2 zero=1", b"first") if words not in content]
    assert not run.tensorboard.exists()


def test_a_run_that_may_not_log_in_is_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(run.path))
    with (
        pytest.raises(RunError, match="cannot start") as caught,
        Metrics(run, Console(file=io.StringIO()), 0, 6, 2, ["wandb"]),
    ):
        pass
    assert "WANDB_MODE=offline" in caught.value.message()


def test_a_missing_package_is_refused_before_the_run() -> None:
    with mock.patch.dict("sys.modules", {"wandb": None}), pytest.raises(ConfigError, match="not installed"):
        check_boards(["tensorboard", "wandb"])
    check_boards(["tensorboard"])
