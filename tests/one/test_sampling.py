"""The choice of tokens: limits as transformers has them, draws by the seed, stops, and errors."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import logits_process as plain

import plait
from plait.data.tokenizer import train_tokenizer
from plait.engine.sampling import TokenChooser, limited
from plait.errors import ConfigError, ModelError
from support import generation, hf_models

ROWS, VOCABULARY = 5, 37


def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_limits_leave_the_distribution_of_transformers(options: dict[str, Any]) -> None:
    warpers = {
        "temperature": plain.TemperatureLogitsWarper,
        "top_k": plain.TopKLogitsWarper,
        "top_p": plain.TopPLogitsWarper,
        "min_p": plain.MinPLogitsWarper,
    }
    processors = LogitsProcessorList(
        [warper(options[key]) for key, warper in warpers.items() if key in options]
    )
    expected = processors(torch.zeros(ROWS, 1, dtype=torch.long), logits())
    actual = limited(logits(), plait.Sampling(**options))
    torch.testing.assert_close(actual.softmax(-1), expected.softmax(-1))
    assert torch.equal(actual.isinf(), expected.isinf())


def test_draws_have_the_probabilities() -> None:
    sampling, count = plait.Sampling(temperature=1.0, top_k=6), 4000
    row = logits()[:1].expand(count, -1)
    chosen = TokenChooser(sampling, range(count)).choose(row, [[0]] * count)
    counts = Counter(chosen[:, 0].long().tolist())
    expected = limited(row[:1], sampling).softmax(-1)[0]
    assert len(counts) == 6
    for token, number in counts.items():
        assert number / count == pytest.approx(float(expected[token]), abs=0.03)
    torch.testing.assert_close(
        chosen[:, 1].float(), row.log_softmax(-1).gather(1, chosen[:, :1].long())[:, 0]
    )


def test_a_penalty_is_that_of_transformers() -> None:
    seen = [[0, 3, 3, 9]] * ROWS
    processor = plain.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor(seen), logits()).argmax(-1)
    chosen = TokenChooser(plait.Sampling(repetition_penalty=1.7), range(ROWS)).choose(logits(), seen)
    assert chosen[:, 0].long().tolist() == expected.tolist()


def test_a_draw_depends_on_the_seed_and_the_index_alone() -> None:
    both = TokenChooser(plait.Sampling(temperature=2.0, seed=1), [0, 1])
    second = TokenChooser(plait.Sampling(temperature=2.0, seed=1), [1])
    other = TokenChooser(plait.Sampling(temperature=2.0, seed=2), [1])
    row = logits()[:1]
    of_both = [both.choose(row.expand(2, -1), [[0], [0]])[1, 0].item() for _ in range(12)]
    assert of_both == [second.choose(row, [[0]])[0, 0].item() for _ in range(12)]
    assert of_both != [other.choose(row, [[0]])[0, 0].item() for _ in range(12)]


@pytest.mark.parametrize(
    "options",
    [
        *({"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}),
        *({"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}, {"repetition_penalty": 0.0}),
        *({"stop_strings": "word"}, {"stop_strings": [""]}, {"stop_tokens": [-1]}, {"seed": -1}),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is not valid for sampling"):
        plait.Sampling(**options)


def test_a_row_ends_with_a_stop_string_or_before_a_stop_token() -> None:
    engine = generation.engine_of("llama", "dp=1 precision=fp64")
    tokenizer = train_tokenizer(iter(["the ships of the harbour, and the sea"] * 9), 300, None)
    (free,) = engine.generate(generation.PROMPTS[:1], plait.Sampling(max_new_tokens=9, stop_tokens=()))
    assert (len(free.ids), free.finish) == (9, "length")
    text = tokenizer.decode(free.ids[3:5])
    options: dict[str, Any] = {"max_new_tokens": 9, "stop_tokens": (), "stop_strings": (text,)}
    (by_text,) = engine.generate(generation.PROMPTS[:1], plait.Sampling(**options), tokenizer=tokenizer)
    assert by_text.finish == "stop"
    assert by_text.ids == free.ids[: len(by_text.ids)]
    assert text in tokenizer.decode(by_text.ids)
    assert text not in tokenizer.decode(by_text.ids[:-1])
    by_token = engine.generate(
        generation.PROMPTS, plait.Sampling(max_new_tokens=9, stop_tokens=free.ids[4:5])
    )[0]
    assert (by_token.ids, by_token.finish) == (free.ids[: free.ids.index(free.ids[4])], "stop")
    with pytest.raises(ConfigError, match="need a tokenizer"):
        engine.generate(generation.PROMPTS[:1], plait.Sampling(**options))


def test_a_row_ends_at_the_last_position_of_the_model() -> None:
    engine = generation.engine_of("gpt2", "dp=1")
    found = engine.generate([[1] * 62, [2, 3]], plait.Sampling(max_new_tokens=9, stop_tokens=()))
    assert [(len(each.ids), each.finish) for each in found] == [(2, "length"), (9, "length")]
    for prompt in ([1] * 64, [], [61], [-1], "text"):
        with pytest.raises(ConfigError, match="the model cannot continue a prompt"):
            engine.generate([prompt])  # type: ignore[list-item]  # a text is a mistake on purpose


def test_padding_on_the_left_changes_no_row() -> None:
    engine = generation.engine_of("llama", "dp=1 precision=fp64")
    together = generation.texts(engine, generation.PROMPTS, generation.GREEDY)
    for prompt, (ids, finish, log_probs) in zip(generation.PROMPTS, together, strict=True):
        ((own_ids, own_finish, own_log_probs),) = generation.texts(engine, [prompt], generation.GREEDY)
        assert (own_ids, own_finish) == (ids, finish)
        assert own_log_probs == pytest.approx(log_probs, rel=1e-9)


def test_log_probabilities_are_those_of_the_model() -> None:
    engine = generation.engine_of("llama", "dp=1 precision=fp64")
    options = {
        "max_new_tokens": 6,
        "stop_tokens": (),
        "temperature": 1.5,
        "top_k": 9,
        "repetition_penalty": 1.2,
    }
    ((ids, _, log_probs),) = generation.texts(engine, generation.PROMPTS[:1], options)
    row = torch.tensor([generation.PROMPTS[0] + ids])
    expected, _ = engine.log_probs({"input_ids": row, "labels": row})
    torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected[0, -6:].double())


def model_without_left_to_right(kind: str) -> nn.Module:
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "encoder":
        return BertForMaskedLM(BertConfig(**sizes, intermediate_size=16))
    if kind == "encoder-decoder":
        return T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        )
    if kind == "states in modules":
        return hf_models.model_of("recurrent_gemma", on_meta=False, exact=False)
    return nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 61))


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "own", "states in modules"])
def test_models_that_do_not_generate_are_refused_by_name(kind: str) -> None:
    model = model_without_left_to_right(kind)
    engine = plait.parallelize(model, "dp=1", loss=lambda outputs, _: (outputs.sum(), 1))
    problem = "has no cache" if kind == "states in modules" else "does not generate text"
    with pytest.raises(ModelError, match=problem) as error:
        engine.generate([[1, 2]])
    assert type(model).__name__ in str(error.value)
