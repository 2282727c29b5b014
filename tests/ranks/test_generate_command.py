"""`plait generate` and `plait chat`: texts of a folder's model, under any plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from plait.comm import connect
from plait.data.tokenizer import save_tokenizer, train_tokenizer
from plait.errors import DataError, ModelError
from plait.train.generate import GenerationRequest, Writer, chat, generate
from support.pool import Pool

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS: list[dict[str, Any]] = [
    {"prompt": "the ships"},
    {"messages": [{"role": "user", "content": "a harbour"}], "id": 7},
    {"prompt": "of the sea, and the harbour"},
    {"prompt": ""},
    {"prompt": "ünï ✓"},
]
SAMPLING = {"max_new_tokens": 9, "temperature": 0.7, "seed": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter(["the ships of the harbour, and the sea. ünï ✓ \n"] * 9), 300, None)
    tokenizer.chat_template = TEMPLATE
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.3, **sizes)).save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def texts(folder: str, plan: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    request = GenerationRequest(folder, plan, **{"prompts": f"{folder}/prompts.jsonl", **options})
    return list(generate(request, connect()))


@pytest.mark.parametrize(
    ("plan", "batch"), [("dp=1", 2), ("dp=2", 1), ("dp=3 zero=3", 1), ("tp=2", 3), ("pp=2 dp=2", 8)]
)
def test_texts_depend_on_neither_plan_nor_batch(pool: Pool, folder: Path, plan: str, batch: int) -> None:
    expected = texts(str(folder), "dp=1", {"sampling": SAMPLING})
    assert [row.items() <= found.items() for row, found in zip(ROWS, expected, strict=True)] == [True] * 5
    assert expected[0]["text"].startswith("the ships")
    ranks = {"dp=1": 1, "dp=3 zero=3": 3, "pp=2 dp=2": 4}.get(plan, 2)
    for found in pool.run(texts, ranks, str(folder), plan, {"sampling": SAMPLING, "batch": batch}):
        assert found == expected


def talked(folder: str, plan: str, said: list[str]) -> list[str]:
    """The parts of the answers, on rank 0."""
    world, lines, shown = connect(), iter(said), list[str]()
    request = GenerationRequest(folder, plan, prompt="a system", sampling={"max_new_tokens": 8})
    chat(request, world, lambda: next(lines, None), shown.append)
    return shown


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_chat_goes_on_in_turns(pool: Pool, folder: Path, plan: str) -> None:
    shown, other = pool.run(talked, 2, str(folder), plan, ["the sea", "and the ships"])
    assert other == []
    assert shown.count("") == 2
    first = shown.index("")
    assert first > 1  # parts, as they come
    answers = ["".join(shown[:first]), "".join(shown[first:])]
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "a system"}]
    for said, answer in zip(["the sea", "and the ships"], answers, strict=True):
        messages.append({"role": "user", "content": said})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        ends = {"eos_token_id": [2, tokenizer.eos_token_id], "pad_token_id": 0}
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, **ends
        )
        expected = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer == expected
        messages.append({"role": "assistant", "content": expected})


def test_turns_of_a_chat_have_draws_of_their_own(folder: Path) -> None:
    (folder / "constant").mkdir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% if messages %}the sea{% endif %}"  # the same prompt in each turn
    save_tokenizer(tokenizer, folder / "constant")
    shown = list[str]()
    sampling = {"max_new_tokens": 8, "temperature": 1.0}
    lines = iter(["a", "b", None])
    request = GenerationRequest(str(folder), "dp=1", tokenizer=str(folder / "constant"), sampling=sampling)
    chat(request, connect(), lambda: next(lines), shown.append)
    first = shown.index("")
    assert "".join(shown[:first]) != "".join(shown[first:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "has no prompt"),
        (b"{}", "has no prompt"),
        (b'{"messages": [{"role": "user"}]}', "a message without content"),
        (b'{"messages": [{"role": "human", "content": "a"}]}', "an unknown role"),
        (b'{"prompt": "a"}\n{"prompt": "b', "not JSON"),
        (b'\xff{"prompt": "a"}', "not UTF-8"),
        (b"", "no prompts|empty"),
        (b'{"prompt": "a"}\n{"prompt": "' + b"sea " * 2100 + b'"}', "no space for new tokens"),
    ],
)
def test_lines_that_are_no_prompts_are_errors(
    folder: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    request = GenerationRequest(str(folder), "dp=1", prompts=str(tmp_path / "prompts.jsonl"), batch=1)
    with pytest.raises(DataError, match=message) as caught:
        next(generate(request, connect()))  # before the first text
    assert ("line 2" in str(caught.value)) == (b"\n" in content)


def test_tools_and_options_of_a_row_reach_the_template(folder: Path, tmp_path: Path) -> None:
    (folder / "tools").mkdir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ style }} {{ tools | tojson }} {{ messages[0].content }}"
    save_tokenizer(tokenizer, folder / "tools")
    tools = [{"type": "function", "function": {"name": "sea", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "ships"}]
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": {"style": "short"}}
    request = GenerationRequest(str(folder), "dp=1", tokenizer=str(folder / "tools"))
    ids = Writer.of(request, connect()).ids(row)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, style="short")
    assert "short" in text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_may_have_any_character_that_json_allows(folder: Path, tmp_path: Path) -> None:
    row = {"prompt": "a\u2028b"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    (found,) = texts(str(folder), "dp=1", {"prompts": str(tmp_path / "prompts.jsonl")})
    assert found["prompt"] == row["prompt"]


def test_a_reward_model_writes_no_text(folder: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=True, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="predicts no tokens"):
        texts(str(tmp_path), "dp=1", {"tokenizer": str(folder)})
