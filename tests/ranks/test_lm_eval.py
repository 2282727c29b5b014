"""lm-evaluation-harness on an engine: under any plan, the numbers of its own class for Hugging Face; and
`plait evaluate --task` has the scores of its tasks. `make test` runs this with the package lm_eval in
PYTHONPATH; else it is skipped."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import plait
from plait.comm import connect
from plait.train.evaluate import EvaluationRequest, evaluate
from support.plain_evaluation import trained_folder
from support.pool import Pool

pytest.importorskip("lm_eval")
harness = pytest.importorskip("support.harness")

SEEN = [
    "The red ship sails 4 miles to harbour",
    "Question: To sail 4 miles\nAnswer: The red ship sails",
    "The ship left the harbour because the harbour was small.",
    "Question: How many ships?\nAnswer: Many.\n#### 1,217",
    "Question: How many?\nAnswer: 1 and -2. Question: many",
]
CONTEXT = 48
METRICS = {"acc", "acc_norm", "perplexity", "exact_match", "flexible_match"}
FORMS = ["arc", "mmlu", "lambada", "pages", "answers", "gsm8k"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    trained_folder(folder, SEEN, [*SEEN, harness.TEXT], CONTEXT)
    for form in harness.FILES:
        rows = harness.rows_of(form)
        (folder / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The results of the harness's own class, of every task."""
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=CONTEXT)
    return harness.results(lm, [*harness.FILES, *harness.OTHERS])


def by_engine(folder: str, plan: str) -> Any:
    from plait.compat.lm_eval import LM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = plait.parallelize(model, plan, optimizer=torch.optim.SGD)
    return harness.results(LM(engine, AutoTokenizer.from_pretrained(folder), batch_size=3), FORMS)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=3", "tp=2", "pp=2 micro=2", "dp=2 tp=2"])
def test_the_harness_on_an_engine_has_the_numbers_of_its_own_class(
    pool: Pool, folder: Path, expected: Any, plan: str
) -> None:
    ranks = math.prod(int(word.partition("=")[2]) for word in plan.split() if word[:2] in ("dp", "tp", "pp"))
    first, *_ = pool.run(by_engine, ranks, str(folder), plan)
    for form in FORMS:
        assert exponents(first[0][form]) == pytest.approx(exponents(expected[0][form]), rel=1e-6)
        for own, of_harness in zip(first[1][form], expected[1][form], strict=True):
            assert_same(own, of_harness)


def exponents(values: dict[str, float]) -> dict[str, float]:
    """Return scores, and of perplexities the logarithm, a mean of log-probabilities."""
    return {name: math.log(value) if "perplexity" in name else value for name, value in values.items()}


def assert_same(own: list[Any], of_harness: list[Any]) -> None:
    """Texts, or log-probabilities and whether they are of greedy decoding."""
    for one, other in zip(own, of_harness, strict=True):
        assert one == (other if isinstance(other, str) else pytest.approx(other, rel=1e-6, abs=1e-6))


def by_command(folder: str, forms: list[str]) -> Any:
    tasks = [f"{form}={folder}/{form}.jsonl" for form in forms]
    request = EvaluationRequest(folder, None, "dp=1", tasks=tasks)
    return evaluate(request, connect()).to_values()["tasks"]


def test_tasks_have_the_scores_of_the_harness(pool: Pool, folder: Path, expected: Any) -> None:
    of_answers = expected[0]["gsm8k"]
    assert 0 < of_answers["exact_match"] <= of_answers["flexible_match"] < 1, "some are right, not all"
    forms = [form for form in harness.FILES if form != "mmlu"]  # whose description is in files of subjects
    [found] = pool.run(by_command, 1, str(folder), forms)
    for form in forms:
        names = expected[0][form].keys() & METRICS
        own, of_harness = found[f"{form}/{form}"], expected[0][form]
        assert exponents({name: own[name] for name in names}) == pytest.approx(
            exponents({name: of_harness[name] for name in names}), rel=1e-6
        )


def _drawn(folder: str, plan: str) -> dict[str, Any]:
    """Texts of eight equal requests that sample, of greedy ones, and scores without a context."""
    from lm_eval.api.instance import Instance  # noqa: PLC0415

    from plait.compat.lm_eval import LM  # noqa: PLC0415

    engine = plait.parallelize(AutoModelForCausalLM.from_pretrained(folder), plan, optimizer=torch.optim.SGD)
    lm = LM(engine, AutoTokenizer.from_pretrained(folder), batch_size=3)

    def texts(**options: Any) -> list[str]:
        given = {"until": ["\n"], "max_gen_toks": 12, **options}
        return lm.generate_until(
            [Instance("generate_until", {}, ("The ship", given), number) for number in range(8)]
        )

    pairs = [("", " harbour"), ("  ", "harbour")]
    of_pairs = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    return {"drawn": texts(do_sample=True, temperature=2.0), "greedy": texts(), "scores": of_pairs}


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_equal_requests_are_drawn_independently(pool: Pool, folder: Path, plan: str) -> None:
    answers = pool.run(_drawn, int(plan[-1]), str(folder), plan)
    drawn = [text for answer in answers for text in answer["drawn"]]
    assert len({*drawn}) > len(drawn) * 3 // 4
    assert len({text for answer in answers for text in answer["greedy"]}) == 1


def test_a_context_of_spaces_is_scored_as_an_empty_one(pool: Pool, folder: Path) -> None:
    from support.plain_evaluation import plain_task_scores  # noqa: PLC0415

    [answer] = pool.run(_drawn, 1, str(folder), "dp=1")
    for score, context, continuation in zip(
        answer["scores"], ("", ""), (" harbour", "  harbour"), strict=True
    ):
        _, [(log_prob, _)] = plain_task_scores(folder, [([(context, continuation)], 0)], CONTEXT)
        assert score[0] == pytest.approx(log_prob, rel=1e-5)
