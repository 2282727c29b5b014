"""Runs on pairs begin at log 2, learn to prefer, resume exactly, and have one result for each reference."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from plait.data.documents import Pairs
from plait.errors import ConfigError
from plait.train.config import read_recipe
from plait.train.explain_recipe import cluster_from_recipe, explain_recipe
from plait.train.prepare import ResolvedRun
from support.chats import answer, user
from support.pool import Pool
from support.tuned_runs import check_resumed, recipe_of, records, run_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": [user(f"{n}?")], "chosen": [answer("yes " * (1 + n % 5))], "rejected": [answer("no")]}
        for n in range(60)
    ]
    return recipe_of(tmp_path_factory.mktemp("pairs"), "dpo", rows, lr=1e-3, more="[preference]\nbeta = 0.5")


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    return run_of(pool, recipe)


def test_a_run_on_pairs_begins_at_log_2_and_learns_to_prefer(trained: ResolvedRun) -> None:
    losses, margins = records(trained), records(trained, "reward_margin")
    assert losses[1] == math.log(2)
    assert margins[1] == 0.0
    assert losses[20] < 0.2
    assert margins[20] > 1
    assert records(trained, "reward_accuracy")[20] == 1.0
    validation, accuracy = records(trained, "validation_loss"), records(trained, "validation_reward_accuracy")
    assert validation[0] == pytest.approx(math.log(2), rel=1e-12)
    assert (accuracy[0], accuracy[20]) == (0.0, 1.0)
    assert validation[20] < 0.2
    assert records(trained, "chosen_reward")[20] - records(trained, "rejected_reward")[20] == margins[20]


def test_a_run_on_pairs_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    check_resumed(pool, recipe, trained, tmp_path / "again")


def test_explain_shards_the_reference_as_its_engine_does(recipe: Path) -> None:
    given = read_recipe(recipe, ["plan=tp=2 micro=2 precision=fp32"])
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    kept = {f"model.layers.*.{name}": "replicate" for name in (*names, "self_attn", "mlp")}
    of_model = given.model.model_copy(update={"tensor_plan": kept})
    found = []
    for each in (given, given.model_copy(update={"model": of_model})):
        memory = explain_recipe(each, cluster_from_recipe(each, None, None)).of_rank(0).memory
        assert memory.frozen >= memory.parameters
        found.append(memory.frozen)
    assert found[0] < found[1]


def test_precomputed_references_are_those_of_the_model(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    """Equal bits in the first epoch. Batches of 8 of 54 pairs repeat pairs from the seventh on."""
    run = run_of(pool, recipe, f"run.dir={tmp_path}/run", "preference.reference=precomputed")
    losses, expected = records(run), records(trained)
    assert [losses[step] for step in range(1, 7)] == [expected[step] for step in range(1, 7)]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert records(run, "validation_loss") == pytest.approx(records(trained, "validation_loss"), rel=1e-3)
    assert len(list(run.dir.path.glob("reference.*.npy"))) == 2


def test_orpo_has_no_reference_and_a_loss_of_tokens(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    run = run_of(pool, recipe, f"run.dir={tmp_path}/run", "preference.loss=orpo", "run.steps=10")
    assert records(run)[10] < records(run)[1] - 0.5


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["task=pretrain", "preference="], "need each other"),
        (["data.kind=prompt"], "trains given weights"),
        (["preference.beta=-1"], "beta is not valid"),
        (["preference.loss=bco"], "invalid value"),
        (["preference.reference=adapters_off"], "without adapters"),
        (["adapter.modules_to_save=['lm_head']", "plan=dp=1 base=nf4"], "trains as copies"),
        (["preference.reference=precomputed", "run.spike_factor=3"], "no precomputed reference"),
        (["run.probe=true"], "probe has no pairs"),
        (["data.samples=bins"], "both rows in one micro-batch"),
        (["optimizer.label_smoothing=0.1"], "term of the loss of tokens"),
    ],
)
def test_a_recipe_of_pairs_that_cannot_run_is_refused(recipe: Path, sets: list[str], words: str) -> None:
    if "task=pretrain" in sets:
        sets = [*sets, "tokenizer.path=here", "data.kind=preference", "data.samples=documents"]
    with pytest.raises(ConfigError, match=words):
        read_recipe(recipe, sets)


def test_the_task_of_pairs_has_its_defaults(recipe: Path) -> None:
    found = read_recipe(recipe, ["optimizer=", "preference="])
    assert found.optimizer.lr == 1e-6
    assert found.preference is not None
    assert (found.preference.loss, found.preference.beta) == ("sigmoid", 0.1)
    assert (found.data.kind, found.data.samples, found.model.pretrained) == ("preference", "documents", True)


def _stored(recipe: Path) -> list[float]:
    """The stored log-probabilities of each training pair's rows, summed."""
    run = ResolvedRun.open(read_recipe(recipe), 2)
    samples, _ = run.train_samples
    assert isinstance(samples, Pairs)
    values = np.load(next(run.dir.path.glob("reference.train.*.npy")))
    return [float(values[samples.span(at // 2, at % 2)].sum()) for at in range(2 * len(samples))]


def test_a_pair_that_a_batch_repeats_is_counted_once(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    """Batches of 4 of 5 pairs: those at the end of an epoch have pairs of the next one, perhaps the same."""
    rows = (recipe.parent / "rows.jsonl").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    sets = [f'data.sources=["{tmp_path}/rows.jsonl"]', f"data.dir={tmp_path}/data", "data.validation=0"]
    sets += ["run.evaluate_every=0", "run.batch=4", "run.steps=6", "preference.reference=precomputed"]
    run = run_of(pool, recipe, f"run.dir={tmp_path}/run", *sets)
    model = LlamaForCausalLM.from_pretrained(recipe.parent / "model").double()
    samples, order = run.train_samples
    assert isinstance(samples, Pairs)
    assert max(Counter(order.indices(4 * at, 4).tolist()).most_common(1)[0][1] for at in range(6)) == 2
    expected = []
    for at in range(len(samples)):
        batch = samples.batch(np.array([at]))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        found = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        expected += (found * (labels != -100)).sum(1).tolist()
    assert _stored(run.dir.path / "recipe.json") == pytest.approx(expected, rel=1e-5)


def test_a_run_on_pairs_is_scored_on_tasks(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    rows = [{"context": f"{n}?", "choices": ["yes", "no", "yes yes"], "answer": 0} for n in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = json.dumps([f"choice={tmp_path}/rows.jsonl"])
    run = run_of(pool, recipe, f"run.dir={tmp_path}/scored", "run.steps=2", f"eval.tasks={tasks}")
    assert records(run, "tasks")[2]["choice/rows"]["examples"] == 7
