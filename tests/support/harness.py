"""Tasks of lm-evaluation-harness on rows in memory: its own prompts and metrics, and results of a model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from support.task_rows import ROWS

FOLDER = Path(lm_eval.__file__).parent / "tasks"
FILES = {
    "arc": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mmlu": "mmlu/default/_default_template_yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
}
_OF_THE_HUB = ("dataset_path", "dataset_name", "tag", "training_split", "validation_split", "fewshot_split")
TEXT = "The red ship sails 4 miles to harbour. The ship left the harbour because the harbour was small. "
OTHERS: dict[str, dict[str, Any]] = {
    "pages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [" harbour"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
ROWS_OF_OTHERS = {
    "pages": [{"text": TEXT}, {"text": TEXT * 4}, {"text": "ships"}],
    "answers": [
        {"question": "The red ship", "answer": " sails 4 miles to"},
        {"question": "The ship left", "answer": " the"},
        {"question": "Question: To sail 4 miles\nAnswer: The red", "answer": "word"},
    ],
}


class Rows(list[dict[str, Any]]):
    """A list with the property of a data set that the harness reads."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])


def rows_of(form: str) -> list[dict[str, Any]]:
    """Rows with numbers where the data sets have them."""
    if form in OTHERS:
        return ROWS_OF_OTHERS[form]
    rows = [dict(row) for row in ROWS[form]]
    for row in rows:
        for key in row.keys() & {"label"}:
            row[key] = int(row[key])
        if form == "mmlu" and isinstance(row["answer"], str):
            row["answer"] = "ABCD".index(row["answer"])
    return rows


def config(form: str) -> dict[str, Any]:
    """The harness's configuration of a task, with the rows of this folder."""
    rows = rows_of(form)
    if form in OTHERS:
        found = {**OTHERS[form], "task": form}
    else:
        found = {
            key: value for key, value in load_yaml(FOLDER / FILES[form]).items() if key not in _OF_THE_HUB
        }
        found["task"] = form
    if form == "hellaswag":  # its function of the data set's library, by its own function of texts
        cleaned = found.pop("process_docs").__globals__["preprocess"]
        rows = [
            {
                "query": cleaned(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
                "choices": [cleaned(ending) for ending in row["endings"]],
                "label": row["label"],
            }
            for row in rows
        ]
    if form == "gsm8k":
        found |= {"num_fewshot": 0, "generation_kwargs": {**found["generation_kwargs"], "max_gen_toks": 24}}
    found.pop("fewshot_config", None)
    return {**found, "test_split": "test", "custom_dataset": lambda **_: {"test": Rows(rows)}}


def results(lm: Any, forms: list[str]) -> tuple[dict[str, dict[str, float]], dict[str, list[Any]]] | None:
    """Metrics, and the responses to each row's requests, by task; None where the harness returns nothing."""
    logging.disable(logging.WARNING)
    found: Mapping[str, Any] | None = lm_eval.simple_evaluate(
        lm,
        tasks=[config(form) for form in forms],
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_defaults=False),
    )
    if found is None:
        return None
    metrics = {
        form: {
            ("flexible_match" if "flexible" in name else name.partition(",")[0]): value
            for name, value in found["results"][form].items()
            if isinstance(value, int | float)
        }
        for form in forms
    }
    samples = {
        form: [
            [of_request[0] for of_request in each["resps"]]  # the harness repeats the last on some ranks
            for each in sorted(found["samples"][form], key=lambda each: each["doc_id"])
        ]
        for form in forms
    }
    return metrics, samples
