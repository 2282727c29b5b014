"""Tokens that a model mixes outside of attention are found in one run, and measured where they are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from plait.engine.loss import check_sums_tokens
from plait.errors import ModelError
from plait.models.attention import MaskRule
from plait.models.tensors import storage_key
from plait.models.tokens import Numbering, check_tokens_apart, follow_tokens, numbering_of
from support import hf_models, own_context, programs, token_probe

APART = ("llama", "gpt2", "gemma2", "opt", "phi", "cohere", "mixtral", "deepseek_v3", "gpt_oss")
MIXED = {  # what the error names
    "bloom": "BloomAttention (transformer.h.0.self_attention): baddbmm",
    "falcon": "FalconAttention (transformer.h.0.self_attention): bmm",
    "gptj": "GPTJAttention (transformer.h.0.attn): bmm",
    "gpt_neo": "GPTNeoSelfAttention (transformer.h.0.attn.attention): bmm",
    "mamba": "MambaMixer (backbone.layers.0.mixer): convolution",
    "kimi_linear": "KimiLinearDeltaAttention (model.layers.0.self_attn): convolution",
    "recurrent_gemma": "Conv1d (model.layers.0.temporal_block.conv_1d): convolution",
    "qwen3_next": "Qwen3NextGatedDeltaNet (model.layers.0.linear_attn): convolution",
}


@pytest.mark.parametrize("family", APART)
def test_tokens_apart_in_a_run_are_apart_in_numbers(family: str) -> None:
    trace = check_tokens_apart(hf_models.model_of(family))
    assert len(trace.attentions) == 2
    assert trace.mixed == []
    assert token_probe.difference(hf_models.model_of(family, on_meta=False)) < 1e-12


@pytest.mark.parametrize("family", MIXED)
def test_a_family_that_mixes_tokens_is_refused_by_name(family: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_tokens_apart(hf_models.model_of(family))
    assert MIXED[family] in str(raised.value)
    assert raised.value.hint == "a plan without cp"
    model = hf_models.model_of(family, on_meta=False)
    try:
        error = token_probe.difference(model)
    except Exception:  # a mask that a model computes with itself
        return
    assert error > 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_masked_language_model_is_apart(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model(family, num_hidden_layers=2, **sizes, **no_dropout)
    model = AutoModelForMaskedLM.from_config(config, dtype=torch.float64)
    assert check_tokens_apart(model).attentions[0].rule == MaskRule()
    assert token_probe.difference(model) < 1e-12


def test_a_trace_describes_attention() -> None:
    first, second = follow_tokens(hf_models.model_of("gpt_oss")).attentions
    assert (first.module, first.heads, first.kv_heads) == ("model.layers.0.self_attn", 4, 2)
    assert (first.head_sizes, first.has_sinks) == ((12, 12), True)
    assert (first.rule, second.rule) == (MaskRule(before=8, after=0), MaskRule(after=0))
    assert follow_tokens(hf_models.model_of("gemma2")).attentions[0].softcap == 50.0
    assert follow_tokens(hf_models.model_of("deepseek_v3")).attentions[0].head_sizes == (10, 5)


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"d_model": 48, "d_ff": 88, "num_layers": 2, "num_heads": 4, "d_kv": 12}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))
    with pytest.raises(ModelError, match="an encoder-decoder has two sequences"):
        check_tokens_apart(model)


def test_a_model_with_padded_rows_is_apart() -> None:
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    batch["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    assert check_tokens_apart(hf_models.model_of("llama"), batch).has_rows


# --- kinds of mixing


class _Around(nn.Module):
    """A Llama whose embeddings a function changes."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.model, self.mixer = hf_models.model_of("llama", on_meta=False), mixer

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        embeds = self.mixer(self.model.get_input_embeddings()(input_ids))
        return self.model(inputs_embeds=embeds, position_ids=position_ids, use_cache=False)


class _Mixer(nn.Module):
    def __init__(self, function: Callable[["_Mixer", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv1d(48, 48, 3, padding=1, groups=48, dtype=torch.float64)
        self.learned = nn.Embedding(64, 48, dtype=torch.float64)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.function(self, x_BSH)


def _windows(_: _Mixer, x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[:, 1:] = x[:, :-1]
    return result


KINDS: dict[str, tuple[Callable[[_Mixer, Tensor], Tensor], str]] = {
    "shift": (lambda _, x: torch.cat([x[:, :1], x[:, :-1]], 1), "_Mixer (mixer): slice"),
    "written shift": (_windows, "_Mixer (mixer): slice"),
    "roll": (lambda _, x: x.roll(1, 1), "_Mixer (mixer): roll"),
    "padding": (lambda _, x: nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], "constant_pad_nd"),
    "convolution": (lambda m, x: m.conv(x.mT).mT, "Conv1d (mixer.conv): convolution"),
    "pooling": (lambda _, x: x + x[:, 0:1], "_Mixer (mixer): slice"),
    "cumsum": (lambda _, x: x.cumsum(1), "_Mixer (mixer): cumsum"),
    "positions": (
        lambda m, x: x + m.learned(torch.arange(x.shape[1])),
        "_Mixer (mixer): add with a number per position that is not from the batch",
    ),
    "norm": (lambda _, x: x / x.square().mean((1, 2), keepdim=True), "_Mixer (mixer): mean"),
    "attention": (
        lambda _, x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
        "_Mixer (mixer): _scaled_dot_product_flash",
    ),
    "decision": (lambda _, x: x + 1 if x.sum() > 0 else x, "_Mixer (mixer): sum"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_mixing_is_refused_by_name(kind: str) -> None:
    function, name = KINDS[kind]
    model = _Around(_Mixer(function))
    with pytest.raises(ModelError) as raised:
        check_tokens_apart(model)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.learned(x.argmax(-1)) + x,
        lambda _, x: x + torch.zeros(x.shape, dtype=x.dtype).scatter(-1, x.topk(3).indices, 1.0),
        lambda _, x: x.flatten(0, 1).softmax(-1).view(x.shape),
        lambda _, x: x * torch.ones(x.shape[:2], dtype=x.dtype)[..., None],
        lambda _, x: (x, x.cumsum(1))[0],
    ],
    ids=["lookup", "scatter", "flat", "ones", "unused"],
)
def test_code_that_treats_tokens_apart_is_accepted(function: Callable[[_Mixer, Tensor], Tensor]) -> None:
    model = _Around(_Mixer(function))
    assert check_tokens_apart(model).mixed == []
    assert token_probe.difference(model) < 1e-12


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", Numbering()),
        ("bert", Numbering()),  # from a table in a buffer
        ("opt", Numbering(by_mask=True)),
        ("roberta", Numbering(first=2, padding_id=1)),
    ],
)
def test_positions_without_position_ids_are_found(kind: str, expected: Numbering) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = AutoConfig.for_model(
        kind, **sizes, attention_dropout=0.0, attention_probs_dropout_prob=0.0, is_decoder=True
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert numbering_of(model) == expected


class _Backwards(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], 0, -1)[None]
        return self.model(input_ids, position_ids=position_ids)


def test_other_positions_are_refused() -> None:
    with pytest.raises(ModelError, match="numbers tokens in a way of its own"):
        numbering_of(_Backwards(hf_models.model_of("llama")))


# --- modules of one's own


class _TorchAttention(own_context.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        del sees
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _Places(own_context.GPT):
    """Counts positions itself, whatever the batch says."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None) -> Tensor:
        del position_ids, attention_mask
        return super().forward(input_ids)


class _Given(own_context.GPT):
    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any = None) -> Tensor:
        return super().forward(input_ids, position_ids, attention_mask)


def test_a_module_with_the_function_for_attention_is_apart() -> None:
    for kind in (own_context.GPT, _Given):
        model = kind(2, 4, {"window": 3, "softcap": 5.0}, own_context.Attention)
        first, second = check_tokens_apart(model).attentions
        assert first.rule == second.rule == MaskRule(before=3, after=0)
        assert (first.heads, first.kv_heads, first.softcap) == (6, 2, 5.0)
        assert numbering_of(model) == Numbering()


def test_a_module_that_computes_attention_itself_is_refused_with_the_function() -> None:
    with pytest.raises(ModelError, match=r"plait\.attention") as raised:
        check_tokens_apart(own_context.GPT(2, 4, {}, _TorchAttention))
    assert "_TorchAttention (blocks.0.attention): _scaled_dot_product" in str(raised.value)
    model = own_context.gpt(kv_heads=2)
    model.blocks[1].attention = _TorchAttention(24, 4, 8, {})
    with pytest.raises(ModelError, match="mixes the tokens") as raised:
        check_tokens_apart(model)
    assert "_TorchAttention (blocks.1.attention): _scaled_dot_product" in str(raised.value)
    assert "plait.attention" in str(raised.value.hint)


def test_a_module_that_counts_positions_itself_is_refused_with_those_of_the_batch() -> None:
    with pytest.raises(ModelError, match="a number per position that is not from the batch") as raised:
        check_tokens_apart(_Places(2, 4, {}, own_context.Attention))
    assert "position_ids of the batch" in str(raised.value.hint)


LOSSES: dict[str, tuple[Any, str]] = {
    "shifts labels": (programs.summed_loss, "from two halves"),
    "a mean": (lambda o, b: (nn.functional.cross_entropy(o.mT, b["labels"]), 1), "from two halves"),
    "divides by the length": (
        lambda o, b: (own_context.summed_loss(o, b)[0] / o.shape[1], o.shape[1]),
        "from two halves",
    ),
    "counts rows": (lambda o, b: (own_context.summed_loss(o, b)[0], len(o)), "the number of targets"),
    "pairs of tokens": (lambda o, _: ((o @ o.mT).sum(), o[..., 0].numel()), "from two halves"),
    "another entry": (lambda o, b: ((o[..., 0] * b["weights"]).sum(), 1), "KeyError"),
    "a last token": (lambda o, _: (o[:, -1].sum(), len(o)), "from two halves"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_sum_over_tokens_is_refused(name: str) -> None:
    loss, said = LOSSES[name]
    trace = check_tokens_apart(own_context.gpt())
    with pytest.raises(ModelError, match="no sum over the tokens") as raised:
        check_sums_tokens(loss, trace, set())
    assert said in str(raised.value)


def test_a_small_mean_next_to_a_large_sum_is_refused() -> None:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = own_context.summed_loss(outputs, batch)
        return total + 1e-5 * outputs.logsumexp(-1).square().mean(), count

    trace = check_tokens_apart(own_context.gpt())
    with pytest.raises(ModelError, match="from two halves"):
        check_sums_tokens(loss, trace, set())


def test_a_loss_of_parameters_is_refused_also_while_they_are_zero() -> None:
    model = own_context.gpt()
    nn.init.zeros_(model.head.weight)

    def decayed(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = own_context.summed_loss(outputs, batch)
        return total + model.head.weight.square().sum(), count

    with pytest.raises(ModelError, match="reads parameters"):
        check_sums_tokens(decayed, check_tokens_apart(model), {*map(storage_key, model.parameters())})


@pytest.mark.parametrize("loss", [own_context.summed_loss, own_context.squares])
def test_a_loss_that_is_a_sum_over_tokens_is_taken(loss: Any) -> None:
    check_sums_tokens(loss, check_tokens_apart(own_context.gpt()), set())
    weights = torch.rand(programs.VOCABULARY)  # as wide as the model's outputs

    def by_class(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].flatten()
        given = nn.functional.cross_entropy(outputs.flatten(0, 1), labels, weights, reduction="sum")
        return given, weights[labels.clamp(min=0)][labels != -100].sum()

    check_sums_tokens(by_class, check_tokens_apart(own_context.gpt()), set())
    llama = check_tokens_apart(hf_models.model_of("llama"))
    check_sums_tokens(lambda outputs, batch: loss(outputs.logits, batch), llama, set())


@pytest.mark.parametrize("family", ["gptj", "falcon", "bloom"])
def test_tokens_are_numbered_also_before_attention_of_a_models_own(family: str) -> None:
    assert numbering_of(hf_models.model_of(family)).first == 0
    with torch.device("meta"):
        dropping = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    assert numbering_of(dropping).first == 0, "attention with dropout"


def test_labels_of_samples_are_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ModelError, match="has no tokens that cp could divide"):
        check_tokens_apart(own_context.gpt(), batch)
