"""Rows of conversations become tokens and their weights; mistakes in rows are answered by name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import normalizers
from torch.utils.data import DataLoader

import plait
import plait.data
from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig, check_data
from plait.data.dataset import TokenStore
from plait.data.documents import Documents
from plait.data.show import show_documents
from plait.errors import ConfigError, ContentError, DataError
from plait.train.prepare import prepare
from support.chats import CHATML, TOOL, answer, call, chats, tokenizer, trained, user
from support.cli_runs import finish, start

MADE = tokenizer()
PLAIN = {"messages": [user("two?"), answer("four")]}
# templates with one trait each that others' masks fail at
DROPS_THOUGHT = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
END_ONCE = CHATML.replace(
    "'<|im_end|>\\n' }}", "('</s>' if loop.last and m.role == 'assistant' else '\\n') }}"
)
WITH_BEGIN = "{{ bos_token }}" + CHATML
COUNTS = "{{ messages[1].content | length }}" + CHATML
UPSIDE_DOWN = CHATML.replace("in messages", "in messages[::-1]")


def texts(row: Any, template: str = CHATML, **options: Any) -> list[str]:
    made = tokenizer(template)
    (sample,) = plait.data.chat([row], made, **options)
    return trained(sample, made)


def message(row: Any, template: str | None = CHATML, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        plait.data.chat([row], tokenizer(template), **options)
    return str(caught.value)


MULTI = [user("a"), answer("<think>b</think>c"), user("d"), answer("<think>e</think>f")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["<think>b</think>c<|im_end|>", "<think>e</think>f<|im_end|>"]),
        (DROPS_THOUGHT, ["c<|im_end|>", "<think>e</think>f<|im_end|>"]),
        (END_ONCE, ["<think>b</think>c", "<think>e</think>f</s>"]),
    ],
)
def test_spans_do_not_assume_that_a_beginning_is_rendered_alike(template: str, expected: list[str]) -> None:
    assert texts({"messages": MULTI}, template) == expected


def test_a_row_whose_other_text_depends_on_the_answer_is_refused_with_the_reason() -> None:
    for template in (COUNTS, UPSIDE_DOWN):
        assert "trained tokens cannot be determined" in message({"messages": MULTI}, template)


def test_a_beginning_token_of_the_template_is_not_doubled_and_an_end_token_is_a_label() -> None:
    (sample,) = plait.data.chat([PLAIN], tokenizer(WITH_BEGIN))
    assert sample["input_ids"].count(MADE.bos_token_id) == 1
    (sample,) = plait.data.chat([PLAIN], tokenizer(END_ONCE))
    batch = plait.PaddingCollator(MADE.eos_token_id, 64)(
        [sample, sample | {"input_ids": sample["input_ids"]}]
    )
    assert (batch["labels"] == MADE.eos_token_id).sum() == 2


def test_generation_marks_of_a_template_are_what_is_trained() -> None:
    marked = "{{ m.content }}{% generation %}{{ m.content }}?{% endgeneration %}"
    user_text = "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    template = "{% for m in messages %}" + user_text + marked + "{% endif %}{% endfor %}"
    row = {"messages": [answer("b", weight=0), answer("c")]}
    assert texts(row, template) == ["c?"]
    none = "{% generation %}{% endgeneration %}" + CHATML
    assert "without a token to train on" in message(PLAIN, none)
    alone = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert "without a token to train on" in message({"messages": [answer("b")]}, alone), "nothing precedes it"


def test_generation_marks_around_other_messages_are_refused() -> None:
    marks = "{% for m in messages %}{% if m.role == 'user' or loop.last and also %}"
    marks += (
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    found = message({"messages": MULTI}, marks)
    assert "without a token to train on" in found
    assert "2 marked spans, none with text of an assistant's message" in found
    row = {"messages": [user("a"), answer("b", weight=0.5), answer("c")], "chat_template_kwargs": {"also": 1}}
    assert "weights cannot be assigned" in message(row, marks), "the first span is the user's"


def test_a_token_with_characters_of_header_and_answer_is_trained() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
    made = tokenizer(template, merges=[(":", "f")])
    (sample,) = plait.data.chat([PLAIN], made)
    assert trained(sample, made) == [":four</s>"]


def test_spaces_within_an_answer_are_trained_where_the_tokenizer_trims_its_positions() -> None:
    assert texts({"messages": [user("a"), answer("b  c\n\nd ")]}) == ["b  c\n\nd <|im_end|>"]


def test_weights_of_messages_and_the_last_answer() -> None:
    row = {
        "messages": [
            user("a"),
            answer("b", weight=0.5),
            user("c"),
            answer("d", weight=0),
            user("e"),
            answer("f"),
        ]
    }
    (sample,) = plait.data.chat([row], MADE)
    assert trained(sample, MADE) == ["b<|im_end|>", "f<|im_end|>"]
    assert sorted(set(sample["loss_weights"])) == [0.0, 0.5, 1.0]
    assert texts(row, train_on="last") == ["f<|im_end|>"]


def test_parts_of_text_and_tools_and_arguments_as_json_are_taken() -> None:
    parts = {
        "messages": [user([{"type": "text", "text": "tw"}, {"type": "text", "text": "o?"}]), answer("four")]
    }
    assert plait.data.chat([parts], MADE) == plait.data.chat([PLAIN], MADE)
    template = "{{ tools | tojson if tools }}" + CHATML.replace(
        "m.content", "(m.tool_calls[0].function.arguments | tojson if m.tool_calls else m.content)"
    )
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
        for arguments in ({"a": {}, "b": [1, "x"]}, '{"a": {}, "b": [1, "x"]}'):
            row = {"messages": [user("a"), call(arguments)], "tools": tools}
            assert texts(row, template) == ['{"a": {}, "b": [1, "x"]}<|im_end|>']
    kwargs = "{{ word }}" + CHATML
    (sample,) = plait.data.chat([PLAIN | {"chat_template_kwargs": '{"word": "hey"}'}], tokenizer(kwargs))
    assert MADE.decode(sample["input_ids"]).startswith("hey")


def test_prompts_as_text_begin_as_texts_do_and_end_with_a_trained_end() -> None:
    (sample,) = plait.data.chat([{"prompt": "2+2=", "completion": " 4"}], MADE, kind="prompt")
    assert MADE.decode(sample["input_ids"]) == "<s>2+2= 4</s>"
    assert trained(sample, MADE) == [" 4</s>"]
    row = {"prompt": [user("a"), answer("b"), user("c")], "completion": [answer("d")]}
    assert texts(row, kind="prompt") == ["d<|im_end|>"]


def test_a_prompt_of_which_a_tokenizer_leaves_nothing_is_a_bad_row() -> None:
    made = tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(DataError, match="row 0"):
        plait.data.chat([{"prompt": "", "completion": " "}], made, kind="prompt")


def test_a_role_or_key_is_known_only_as_a_word_of_the_template() -> None:
    template = "{# maintained for trained models; names: critic #}" + CHATML
    for name in ("train", "ai"):
        assert "an unknown key" in message({"messages": [user("a"), answer("b") | {name: False}]}, template)
        row = {"messages": [{"role": name, "content": "a"}, answer("b")]}
        assert "an unknown role" in message(row, template)
    assert texts({"messages": [{"role": "critic", "content": "a"}, answer("b")]}, template) == ["b<|im_end|>"]


def test_an_answer_before_any_message_needs_the_generation_prompt_as_its_header() -> None:
    """`<think>` is in the prompt, and not in the turn: nothing before the answer tells where it begins."""
    template = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    assert template != CHATML
    assert texts({"messages": [user("a"), answer("b")]}, template) == ["b<|im_end|>"]
    assert "its header differs" in message({"messages": [answer("b"), user("a")]}, template)


MISTAKES = {
    "an unknown role": ({"messages": [{"role": "human", "content": "a"}, answer("b")]}, '"role": "user"'),
    "a message without a role": ({"messages": [{"from": "human", "value": "a"}]}, "role and content"),
    "without 'messages'": ({"conversations": []}, "user, assistant and content"),
    "an empty answer": ({"messages": [user("a"), answer(" ")]}, '"weight": 0'),
    "without a token to train on": ({"messages": [user("a")]}, "no such row"),
    "content is not text": ({"messages": [user(3), answer("b")]}, '"content"'),
    "with image": ({"messages": [user([{"type": "image", "url": "x"}]), answer("b")]}, "rows of text"),
    "with images": (PLAIN | {"images": ["x"]}, "rows of text"),
    "an unknown key": ({"messages": [user("a"), answer("b", wieght=0)]}, "weight, or no such key"),
    "invalid tools": (PLAIN | {"tools": "[{"}, "without 'tools'"),
    "with tools that the chat template": (PLAIN | {"tools": [TOOL]}, "no 'tools'"),
    "with chat_template_kwargs that the": (PLAIN | {"chat_template_kwargs": {"thinkin": 1}}, "no such name"),
    "an invalid tool call": ({"messages": [user("a"), call("{")]}, "arguments"),
    "a weight for a user": ({"messages": [user("a") | {"weight": 1}, answer("b")]}, "no weight there"),
    "an invalid weight": ({"messages": [user("a"), answer("b", weight=-1)]}, '"weight": 0'),
    "invalid chat_template_kwargs": (
        PLAIN | {"chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
    ),
    "is not a list": ({"messages": "a"}, '{"messages"'),
    "not an object": ("a", '{"messages"'),
    "unpaired surrogate": ({"messages": [user("a"), answer("\ud800")]}, "leave it out"),
}


@pytest.mark.parametrize("problem", MISTAKES)
def test_a_mistake_in_a_row_is_named_with_its_place_and_remedy(problem: str) -> None:
    row, hint = MISTAKES[problem]
    found = message(row)
    assert problem in found
    assert "row 0" in found
    assert hint in found.partition("try     :")[2]
    assert plait.data.chat([row, PLAIN], MADE, errors="skip") == plait.data.chat([PLAIN], MADE)


def test_a_row_of_another_kind_names_its_kind() -> None:
    assert 'data.kind = "prompt"' in message({"prompt": "a", "completion": "b"})
    assert 'data.kind = "chat"' in message(PLAIN, kind="prompt")


def test_a_template_that_is_missing_or_refuses_or_leaves_out_a_message_is_named() -> None:
    assert "tokenizer.chat_template = FILE.jinja" in message(PLAIN, None)
    assert "not a Jinja template" in message(PLAIN, "{% for %}")
    assert "users only" in message(PLAIN, "{{ raise_exception('users only') if messages[1:] }}" + CHATML)
    drops = CHATML.replace(
        "{{ '<|im_start|>' + m.role", "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role"
    )
    assert "system message that the chat template leaves out" in message(chats()["system"], drops)
    drops = CHATML.replace("in messages", "in messages if m.role != 'tool'")
    row = {"messages": [user("a"), answer("b"), {"role": "tool", "content": "c"}, answer("d")]}
    assert "tool message that the chat template leaves out" in message(row, drops)
    with pytest.raises(DataError, match="fast tokenizer"):
        plait.data.chat([PLAIN], object())  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    MADE.save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path


def built(folder: Path, name: str, lines: list[str], **changes: Any) -> TokenStore:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines))
    options: dict[str, Any] = {"kind": "chat", "samples": "documents", "validation": 0.2} | changes
    data = DataConfig(dir=folder / name, sources=[str(path)], sequence=64, **options)
    return build(data, TokenizerConfig(path=folder / "tokenizer"), progress=False)


def rows(number: int) -> list[dict[str, Any]]:
    weights = (1, 0.5, 0.25)
    return [
        {"messages": [user("a" * n), answer(f"answer {n}", weight=weights[n % 3])]} for n in range(number)
    ]


def test_a_directory_has_the_tokens_and_weights_of_each_row(folder: Path) -> None:
    store = built(folder, "chats", [json.dumps(row) for row in rows(40)])
    found = []
    for stream in (store.train, store.validation):
        starts = stream.starts_of_documents(0)
        for first, stop in zip(starts, [*starts[1:], stream.num_tokens], strict=True):
            ids, weights = stream.read(first, stop - first), stream.weights(int(first), int(stop - first))
            assert weights is not None
            found.append((ids.tolist(), np.round(weights, 6).tolist()))
    samples = plait.data.chat(rows(40), MADE)
    expected = [
        (s["input_ids"], s.get("loss_weights", [float(label != -100) for label in s["labels"]]))
        for s in samples
    ]
    assert sorted(found) == sorted(expected)
    assert len(store.validation.starts_of_documents(0)) > 1


def test_the_split_and_digest_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    lines = [json.dumps(row) for row in rows(40)]
    one, two = (built(folder, f"w{workers}", lines, build_workers=workers) for workers in (0, 2))
    assert one.digest == two.digest


def test_bad_rows_are_listed_or_skipped_and_counted(folder: Path) -> None:
    lines = [json.dumps(PLAIN), json.dumps({"messages": [user("a")]}), "{", json.dumps(rows(2)[1])]
    with pytest.raises(ContentError) as caught:
        built(folder, "bad", lines)
    assert "line 2: " in str(caught.value)
    assert "line 3: " in str(caught.value)
    assert "2 rows are not chat" in str(caught.value)
    store = built(folder, "skipped", lines, errors="skip", validation=0)
    assert store.index.sources[0].skipped_rows == 2
    assert store.index.sources[0].documents == 2


def test_samples_whose_trained_tokens_are_truncated_are_counted_and_not_all_samples(folder: Path) -> None:
    long = {"messages": [user("a" * 99), answer("b")]}
    store = built(folder, "chats", [json.dumps(row) for row in (PLAIN, long, rows(8)[7])], validation=0)
    end, collator = store.index.end_of_document, plait.PaddingCollator(0, max_length=48)
    assert Documents(store.train, end, collator).facts.endswith(" tokens (1 without a trained token left)")
    assert Documents(store.train, end, collator, split=True).facts == "3, of which 1 split"
    with pytest.raises(DataError, match="no sample of the training data has a trained token"):
        Documents(store.train, end, plait.PaddingCollator(0, max_length=9))


def test_a_damaged_file_of_weights_is_found(folder: Path) -> None:
    lines = [json.dumps(PLAIN)]
    built(folder, "chats", lines, validation=0)
    path = folder / "chats" / "part-00000.train.weights.bin"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(DataError, match=r"part-00000\.train\.weights\.bin is damaged"):
        built(folder, "chats", lines, validation=0)


def test_another_template_or_option_is_another_recipe(folder: Path) -> None:
    lines = [json.dumps(PLAIN)]
    built(folder, "chats", lines, validation=0)
    with pytest.raises(DataError, match="train_on"):
        built(folder, "chats", lines, validation=0, train_on="last")
    (folder / "tokenizer" / "chat_template.jinja").write_text(WITH_BEGIN)
    with pytest.raises(DataError, match="another tokenizer"):
        built(folder, "chats", lines, validation=0)


def test_windows_and_files_without_rows_and_new_tokenizers_are_refused(folder: Path) -> None:
    data = DataConfig(dir=folder / "t", sources=[__file__], sequence=8, kind="chat", samples="documents")
    with pytest.raises(DataError, match="has no rows"):
        build(data, TokenizerConfig(path=folder / "tokenizer"), progress=False)
    with pytest.raises(DataError, match="needs the tokenizer of the model"):
        build(data, TokenizerConfig(vocab_size=300), progress=False)
    for samples in ("windows", "packed"):
        with pytest.raises(ConfigError, match="would train on all tokens of chats"):
            check_data(data.model_copy(update={"samples": samples}))
    for change in ({"train_on": "last"}, {"train_empty_thinking": True}):
        with pytest.raises(ConfigError, match="no effect on text"):
            check_data(data.model_copy(update={"kind": "text", **change}))


def test_samples_are_shown_with_their_trained_text(folder: Path) -> None:
    row = {"messages": [user("a"), answer("b", weight=0.5), user("c"), answer("[d]\x1b[2J")]}
    store = built(folder, "chats", [json.dumps(row)], validation=0)

    def shown(**options: Any) -> str:
        file = io.StringIO()
        show_documents(store, Console(file=file, **options))
        return file.getvalue()

    assert "«0.5: b<|im_end|>»" in shown()
    assert "«[d]\\x1b[2J<|im_end|>»" in shown()
    assert "\nc<|im_end|>" in shown()
    assert "\x1b" not in shown()
    assert "\x1b[1;32m«[d]" in shown(force_terminal=True, color_system="standard")
    with pytest.raises(ConfigError, match="no such row"):
        show_documents(store, Console(), first=1)


RECIPE = """
plan = "dp=1"
run = {{ dir = "{folder}/run", steps = 2, batch = 2, evaluate_every = 0, log_every = 1 }}
optimizer = {{ lr = 1e-3 }}
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[data]
dir = "{folder}/data"
sources = ["{folder}/chats.jsonl"]
kind = "chat"
samples = "bins"
sequence = 64
workers = 0
[tokenizer]
path = "{folder}/tokenizer"
"""


def test_runs_show_samples_first_and_refuse_tokens_that_would_lose_their_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row | {"id": 1}) for row in [PLAIN] * 9))
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder))
    out, _ = finish(start("data", "show", recipe, "--row", 2, "--num", 2))
    assert [line.split()[2] for line in out.splitlines() if line.startswith("training row")] == ["2:", "3:"]
    assert out.count("«four<|im_end|>»") == 2
    assert "\x1b" not in out
    run = prepare(recipe)
    assert capsys.readouterr().err.count("«four<|im_end|>»") == 3
    labels = run.train_samples[0].batch(np.arange(1))["labels"]
    assert 0 < (labels != -100).sum() < labels.numel() / 2
    with pytest.raises(ConfigError, match="would train on all tokens of chats"):
        prepare(run.dir.path, sets=["data.samples=windows"], resume=True)
    with pytest.raises(DataError, match="were built with other kind"):
        prepare(recipe, sets=["data.kind=text", "data.samples=windows", f"run.dir={folder / 'run-2'}"])


def test_samples_train_in_a_loop_and_in_the_trainer_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes))
    samples = plait.data.chat([PLAIN] * 4, MADE)
    collate = plait.PaddingCollator(0)
    (batch,) = DataLoader(samples, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    assert torch.isfinite(model(**batch).loss)
    settings = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    trainer = Trainer(model, settings, train_dataset=samples, data_collator=collate)  # type: ignore[arg-type]
    assert trainer.train().training_loss > 0
