"""`plait evaluate` as users run it: on a run, a checkpoint and an export; its report and its errors."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from support.cli_runs import finish, start, start_torchrun, write_recipe
from support.plain_evaluation import assert_same_scores, plain_scores


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("evaluate")
    sets = ["run.steps=4", "run.evaluate_every=0", "model.config.attention_dropout=0.0"]
    options = [word for assignment in sets for word in ("--set", assignment)]
    finish(start("train", write_recipe(here), "--plan", "dp=2 zero=3", *options))
    return here / "run"


def test_a_run_its_checkpoint_and_its_export_have_the_scores_of_plain_transformers(run: Path) -> None:
    """On two ranks, on the ranks of torchrun and on one; documents are longer than the context."""
    data = f"{run.parent}/text/0[0-3].txt"
    texts = [path.read_text() for path in sorted(run.parent.glob("text/0[0-3].txt"))]
    expected = plain_scores(run / "export", texts, context=64, stride=40)
    assert expected["tokens"] > 64 * len(texts)
    under_torchrun = partial(start_torchrun, "-m", "plait")
    for model, starts, words in (
        (run, start, ["--ranks", "2", "--plan", "tp=2"]),
        (run / "checkpoints" / "step-00000004", under_torchrun, ["--plan", "dp=2 zero=3 micro=2"]),
        (run / "export", start, []),
    ):
        output = run.parent / "scores.json"
        options = ["--stride", 40, "--json", output, *words]
        out, _ = finish(starts("evaluate", model, data, *options))
        assert_same_scores(json.loads(output.read_text()), expected)
        assert f"{expected['perplexity']:,.2f}" in out
        assert "last words" in out


def test_a_model_or_option_that_cannot_be_evaluated_is_an_error(run: Path, tmp_path: Path) -> None:
    data = run.parent / "text" / "00.txt"
    alone = shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    for words, message in (
        ((tmp_path / "none", data), "the model does not exist"),
        ((alone, data), "--tokenizer"),
        ((run, tmp_path / "none.txt"), "is missing"),
        ((run, data, "--plan", "pp=5"), "blocks"),
        ((run, data, "--ranks", "3", "--plan", "tp=2"), "--ranks 2"),
        ((run, data, "--context", "65"), "2 to 64 tokens"),
    ):
        _, err = finish(start("evaluate", *words), 2)
        assert message in err, err
    finish(start("evaluate", alone, data, "--tokenizer", run / "tokenizer"))
