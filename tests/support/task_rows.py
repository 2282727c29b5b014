"""Rows of the tasks that `plait evaluate` reads, few and short, and their prompts written out."""

from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "arc": [
        {
            "id": "1",
            "question": "Where does the red ship sail?",
            "choices": {"text": ["to harbour seven", "to sea", "home"], "label": ["A", "B", "C"]},
            "answerKey": "A",
        },
        {
            "id": "2",
            "question": "How many miles?",
            "choices": {"text": ["0 miles", "many", "1 miles", "none"], "label": ["1", "2", "3", "4"]},
            "answerKey": "3",
        },
    ],
    "hellaswag": [
        {
            "activity_label": "Sailing",
            "ctx_a": "The red ship sails 0 miles to harbour seven. [title] The old  ship [step] sails.",
            "ctx_b": "the small SHIP",
            "endings": ["sails 2 miles to the harbour", "is [substeps] grey", "many, many ships", "word"],
            "label": "1",
        },
        {
            "activity_label": "Ships",
            "ctx_a": "The grey ship",
            "ctx_b": "",
            "endings": ["sails", " sails 3 miles to harbour grey ", "harbour", "a very long voyage"],
            "label": 3,
        },
    ],
    "mmlu": [
        {
            "question": " The red ship sails to ",
            "subject": "sea_travel",
            "choices": ["harbour", "sea", "some other sea", "seven"],
            "answer": 1,
        },
        {
            "question": "A very long voyage?",
            "subject": "ships",
            "choices": ["yes", "no", "with ships", "with harbours"],
            "answer": "D",
        },
    ],
    "piqa": [
        {"goal": "To sail 4 miles", "sol1": "The red ship sails", "sol2": "No harbour", "label": 0},
        {"goal": "To see the sea", "sol1": "word", "sol2": "sail to harbour seventeen", "label": "1"},
    ],
    "winogrande": [
        {
            "sentence": "The ship left the harbour because the _ was small.",
            "option1": "ship",
            "option2": "harbour",
            "answer": "2",
        },
        {"sentence": "_ sails 1 miles.", "option1": "The old ship", "option2": "Harbour", "answer": "1"},
    ],
    "lambada": [
        {"text": "The red ship sails 4 miles to harbour"},
        {"text": "The old ship sails 1 miles to harbour seventeen"},
        {"text": "No harbour"},
    ],
    "gsm8k": [
        {"question": "How many miles does the red ship sail?", "answer": "The ship sails 4 miles.\n#### 4"},
        {"question": "How many ships?", "answer": "Many.\n#### 1,217"},
        {"question": "How many?", "answer": "#### -2"},
    ],
    "choice": [
        {"context": "", "choices": ["The red ship", "ship", "The"], "answer": 0},
        {"context": "The red ship  ", "choices": ["sails 0 miles", "sea"], "answer": "sails 0 miles"},
    ],
}

# (context, continuations, index of the right one) of each row
ABOUT = "The following are multiple choice questions (with answers) about {}.\n\n"
PAIRS: dict[str, list[tuple[list[str], list[str], int]]] = {
    "arc": [
        (["Question: Where does the red ship sail?\nAnswer:"], [" to harbour seven", " to sea", " home"], 0),
        (["Question: How many miles?\nAnswer:"], [" 0 miles", " many", " 1 miles", " none"], 2),
    ],
    "hellaswag": [
        (
            ["Sailing: The red ship sails 0 miles to harbour seven.. The old ship sails. The small ship"],
            [" sails 2 miles to the harbour", " is grey", " many, many ships", " word"],
            1,
        ),
        (
            ["Ships: The grey ship"],
            [" sails", " sails 3 miles to harbour grey", " harbour", " a very long voyage"],
            3,
        ),
    ],
    "mmlu": [
        (
            [
                ABOUT.format("sea travel") + "The red ship sails to\nA. harbour\nB. sea\nC. some other sea\n"
                "D. seven\nAnswer:"
            ],
            [" A", " B", " C", " D"],
            1,
        ),
        (
            [
                ABOUT.format("ships") + "A very long voyage?\nA. yes\nB. no\nC. with ships\n"
                "D. with harbours\nAnswer:"
            ],
            [" A", " B", " C", " D"],
            3,
        ),
    ],
    "piqa": [
        (["Question: To sail 4 miles\nAnswer:"], [" The red ship sails", " No harbour"], 0),
        (["Question: To see the sea\nAnswer:"], [" word", " sail to harbour seventeen"], 1),
    ],
    "winogrande": [
        (
            [
                "The ship left the harbour because the ship",
                "The ship left the harbour because the harbour",
            ],
            [" was small."],
            1,
        ),
        (["The old ship", "Harbour"], [" sails 1 miles."], 0),
    ],
    "lambada": [
        (["The red ship sails 4 miles to"], [" harbour"], 0),
        (["The old ship sails 1 miles to harbour"], [" seventeen"], 0),
        (["No"], [" harbour"], 0),
    ],
    "gsm8k": [
        (
            ["Question: How many miles does the red ship sail?\nAnswer:"],
            [" The ship sails 4 miles.\n#### 4"],
            0,
        ),
        (["Question: How many ships?\nAnswer:"], [" Many.\n#### 1,217"], 0),
        (["Question: How many?\nAnswer:"], [" #### -2"], 0),
    ],
    "choice": [
        ([""], [" The red ship", " ship", " The"], 0),
        (["The red ship  "], [" sails 0 miles", " sea"], 0),
    ],
}


def pairs_of(form: str) -> list[tuple[list[tuple[str, str]], int]]:
    """(context, continuation) of all choices, and the index of the right one, of each row."""
    return [
        ([(context, text) for context in contexts for text in texts], answer)
        for contexts, texts, answer in PAIRS[form]
    ]
