"""Callbacks of a run on two ranks: when they are called, and what they may ask for."""

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.train.callbacks import load_callbacks
from support.cli_runs import finish, last_step, start, write_recipe

CALLBACK = """
import torch
from plait.comm import all_reduce
from plait.train.callbacks import Callback

class Notes(Callback):
    def __init__(self):
        with open("made.txt", "a") as file:
            file.write("x")
    def note(self, run, *words):
        with open(f"notes-{run.rank}.txt", "a") as file:
            print(run.step, *words, file=file)
    def on_start(self, run):
        self.note(run, "start", run.folder.name)
    def on_step(self, run, metrics):
        total = torch.ones(1)
        all_reduce(total, run.engine.data_group)  # ranks may communicate
        self.note(run, "step", metrics.step, f"{metrics.loss:.6f}", int(total))
        if run.rank == 1 and run.step == 3:
            run.save()
        if run.rank == 1 and run.step == 5:
            run.stop()
    def on_evaluate(self, run, loss):
        self.note(run, "evaluate", f"{loss:.6f}")
    def on_save(self, run, step):
        exists = (run.folder / "checkpoints" / f"step-{step:08d}").is_dir()
        self.note(run, "save", step, exists)
    def on_end(self, run):
        self.note(run, "end", (run.folder / "export").is_dir())

class Plain:
    pass

class Failing(Callback):
    def __init__(self):
        raise FileNotFoundError("no file")

class Broken(Callback):
    def on_step(self, run, metrics):
        return metrics.los
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notes_of_a_run.py").write_text(CALLBACK)
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


def train(*words: object) -> list[str]:
    sets = ["run.steps=8", "run.evaluate_every=4", "run.checkpoint_every=6", "run.report_to=[]"]
    return ["train", *map(str, words), *[word for each in sets for word in ("--set", each)]]


def test_every_rank_receives_all_events_in_order_and_may_ask_to_save_and_to_stop(
    recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    callbacks = "run.callbacks=['notes_of_a_run:Notes']"
    finish(start(*train(recipe, "--set", f"run.dir={run}", "--set", callbacks)))
    assert last_step(run) == 5, "stopped"
    finish(start("train", run, "--resume"))
    assert last_step(run) == 8
    assert Path("made.txt").read_text() == "xx" * 2, "on each rank of each start, and nowhere else"
    of_rank_0, of_rank_1 = (Path(f"notes-{rank}.txt").read_text().splitlines() for rank in range(2))
    assert of_rank_0 == of_rank_1
    words = [line.split() for line in of_rank_0]
    assert all(word[-1] == "2" for word in words if word[1] == "step")
    assert [" ".join(w[:2] + ([] if w[1] in ("step", "evaluate") else w[2:])) for w in words] == [
        "0 start run", "0 evaluate", "1 step", "2 step", "3 step", "3 save 3 True", "4 step", "4 evaluate",
        "5 step", "5 save 5 True", "5 end False",
        "5 start run", "6 step", "6 save 6 True", "7 step", "8 step", "8 evaluate",
        "8 save 8 True", "8 end True",
    ]  # fmt: skip
    assert not (run / "tensorboard").exists(), "report_to is empty"


def test_an_error_in_a_callback_ends_the_run_and_names_its_line(recipe: Path, tmp_path: Path) -> None:
    callbacks = "run.callbacks=['notes_of_a_run:Broken']"
    process = start(*train(recipe, "--set", f"run.dir={tmp_path / 'run'}", "--set", callbacks))
    _, err = finish(process, 2)
    assert err.count("a callback has failed in on_step") == 1
    assert "notes_of_a_run.py:40" in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing_module:Notes", "missing_module"),
        ("notes_of_a_run:Missing", "Missing"),
        ("notes_of_a_run:Plain", "not derived from plait's class"),
        ("notes_of_a_run:Failing", "no file"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(recipe: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_callbacks([name])
    assert words in caught.value.message()
