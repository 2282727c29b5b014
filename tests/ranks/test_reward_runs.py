"""Runs of reward models learn the order of pairs, resume exactly, and export what transformers loads."""

import math
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from plait.comm import connect
from plait.errors import ConfigError, ModelError
from plait.train.config import read_recipe
from plait.train.evaluate import EvaluationRequest, evaluate
from plait.train.export import export_folder
from plait.train.prepare import ResolvedRun
from support.chats import answer, user
from support.pool import Pool
from support.tuned_runs import check_plans, check_resumed, recipe_of, records, run_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": [user(f"{n}?")], "chosen": [answer("yes " * (1 + n % 5))], "rejected": [answer("no")]}
        for n in range(60)
    ]
    return recipe_of(tmp_path_factory.mktemp("pairs"), "reward", rows)


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    return run_of(pool, recipe)


def test_a_run_learns_the_order_of_pairs(trained: ResolvedRun) -> None:
    losses = records(trained)
    assert losses[1] == pytest.approx(math.log(2), abs=0.2)
    assert losses[20] < 0.1
    assert records(trained, "validation_reward_accuracy")[20] == 1.0
    rewards = [records(trained, f"{name}_reward")[20] for name in ("chosen", "rejected")]
    assert rewards[0] - rewards[1] == pytest.approx(records(trained, "reward_margin")[20])


def test_a_run_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    check_resumed(pool, recipe, trained, tmp_path / "again")


def test_plans_agree(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    """The initial score, which is not in the files, is the same on all ranks and under any plan."""
    check_plans(pool, recipe, tmp_path, "dp=2 zero=3 micro=2", "tp=2 micro=4")


def test_the_export_scores_as_the_run_does(recipe: Path, trained: ResolvedRun) -> None:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        trained.dir.export, output_loading_info=True
    )
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    encoder = AutoTokenizer.from_pretrained(trained.dir.export)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id != model.config.eos_token_id
    scores = [
        model(**encoder.apply_chat_template(chat, return_dict=True, return_tensors="pt")).logits.item()
        for chat in ([user("7?"), answer("yes yes")], [user("7?"), answer("no")])
    ]
    assert scores[0] - scores[1] > 1


def test_a_reward_model_is_not_evaluated_as_a_language_model(trained: ResolvedRun, tmp_path: Path) -> None:
    """Its files have no head, for which transformers would take random values."""
    text = tmp_path / "text.txt"
    text.write_text("yes yes no")
    for folder in (trained.dir.path, trained.dir.export):
        with pytest.raises(ModelError, match="predicts no tokens"):
            evaluate(EvaluationRequest(str(folder), str(text), "dp=1"), connect(device="cpu"))
    with pytest.raises(ModelError, match="predicts no tokens"):
        export_folder(trained.dir.export, tmp_path / "out")
    body = AutoModel.from_pretrained(trained.dir.export)
    body.save_pretrained(tmp_path / "body")
    with pytest.raises(ModelError, match="are not in its files") as caught:
        export_folder(tmp_path / "body", tmp_path / "out")
    assert "no lm_head.weight" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["preference.loss=sigmoid"], "need each other"),
        (["model.head=tokens"], "need each other"),
        (["task=sft", "model.head=reward", "data.kind=prompt"], "need each other"),
        (["preference.beta=0.5"], "beta is not valid"),
        (["sample.tokens=5"], "generates no text"),
        (["adapter.r=4"], "no adapter of a reward model"),
        (["data.kind=prompt"], "trains given weights"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(recipe: Path, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_recipe(recipe, sets)
