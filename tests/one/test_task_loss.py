"""The default loss of a Hugging Face model is the sum of what the model's own loss is the mean of."""

from collections.abc import Callable, Mapping
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from plait.engine.loss import choose_loss
from plait.errors import ModelError
from plait.models import check_attends_backwards, forward_inputs
from plait.verify.tiny_config import SIZES

VOCABULARY = 64
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 3,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48, "decoder_start_token_id": 0}
_DISTILBERT = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_PROPHETNET = {
    "num_hidden_layers": None,  # its configuration does not take it
    "use_cache": False,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "decoder_start_token_id": 0,
}
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "mbart": _BART,
    "marian": {**_BART, "decoder_start_token_id": 0},
    "m2m_100": _BART,
    "t5": _T5,
    "distilbert": _DISTILBERT,
    "prophetnet": _PROPHETNET,
}


def small_model(name: str, model_type: str, **options: Any) -> Any:
    sizes = {**_SMALL, **_OTHER_SIZES.get(model_type, {}), **options}
    torch.manual_seed(0)
    given = {key: size for key, size in sizes.items() if size is not None}
    config = transformers.AutoConfig.for_model(model_type, **given)
    return getattr(transformers, name)(config).eval()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=generator)
    labels = torch.randint(3, VOCABULARY, (3, 12), generator=generator)
    labels[0, :5] = labels[1, 8:] = -100
    return {"input_ids": ids, "labels": labels}


def assert_own_loss(model: Any, batch: Mapping[str, Tensor]) -> None:
    summed, count = choose_loss(model, None)(model(**forward_inputs(model, batch)), batch)
    assert (summed / count).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("LlamaForCausalLM", "llama"),
        ("GPT2LMHeadModel", "gpt2"),
        ("BartForCausalLM", "bart"),  # aligned, as documented: the caller shifts
        ("BertForMaskedLM", "bert"),
        ("RobertaForMaskedLM", "roberta"),
        ("ModernBertForMaskedLM", "modernbert"),
        ("DistilBertForMaskedLM", "distilbert"),
        ("XLMWithLMHeadModel", "xlm"),
        ("T5ForConditionalGeneration", "t5"),
        ("BartForConditionalGeneration", "bart"),
        ("MBartForConditionalGeneration", "mbart"),
        ("MarianMTModel", "marian"),
        ("M2M100ForConditionalGeneration", "m2m_100"),  # only its forward shifts
    ],
)
def test_default_loss_of_a_language_model_is_its_own(name: str, model_type: str) -> None:
    assert_own_loss(small_model(name, model_type), tokens())


@pytest.mark.parametrize(
    "options", [{}, {"ngram": 3, "eps": 0.1}, {"ngram": 1}, {"disable_ngram_loss": True}]
)
@pytest.mark.parametrize("name", ["ProphetNetForCausalLM", "ProphetNetForConditionalGeneration"])
def test_default_loss_over_ngrams_is_the_models_own(name: str, options: dict[str, Any]) -> None:
    assert_own_loss(small_model(name, "prophetnet", **options), tokens())


def test_positions_of_an_image_before_the_tokens_have_no_labels() -> None:
    vision = {**_SMALL, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    model = small_model("GitForCausalLM", "git", vision_config=vision)
    generator = torch.Generator().manual_seed(2)
    assert_own_loss(model, {**tokens(), "pixel_values": torch.randn(3, 3, 16, 16, generator=generator)})


def test_a_decoder_with_inputs_of_its_own_keeps_them() -> None:
    model, batch = small_model("T5ForConditionalGeneration", "t5"), tokens()
    assert_own_loss(model, {**batch, "decoder_input_ids": batch["input_ids"].flip(1)})


def test_labels_of_a_decoder_may_have_another_length_than_its_encoders_inputs() -> None:
    model, batch = small_model("BartForConditionalGeneration", "bart"), tokens()
    assert_own_loss(model, {**batch, "input_ids": batch["input_ids"][:, :7]})


_CLASSES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "single_label_classification": lambda: {"labels": torch.tensor([0, 2, 1])},
    "multi_label_classification": lambda: {"labels": torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1]])},
    "regression": lambda: {"labels": torch.tensor([[1.0, 0.5, 1], [0, 0.3, 1], [1, 1, 1]])},
}


@pytest.mark.parametrize("problem", [*_CLASSES, None])
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_default_loss_of_sequence_classification_is_the_models_own(family: str, problem: str | None) -> None:
    model = small_model(f"{family}ForSequenceClassification", family.lower(), problem_type=problem)
    labels = _CLASSES[problem or "single_label_classification"]()
    assert_own_loss(model, {"input_ids": tokens()["input_ids"], **labels})


def test_one_class_is_a_regression() -> None:
    model = small_model("BertForSequenceClassification", "bert")
    model.config.num_labels, model.classifier = 1, nn.Linear(32, 1)
    model.num_labels = 1
    assert_own_loss(model, {"input_ids": tokens()["input_ids"], "labels": torch.tensor([0.5, 1.5, -1.0])})


def test_default_losses_of_tokens_and_of_answers_are_the_models_own() -> None:
    batch = tokens()
    batch["labels"] = batch["labels"].clamp(max=2)
    assert_own_loss(small_model("BertForTokenClassification", "bert"), batch)
    answers = {"start_positions": torch.tensor([1, 50, 4]), "end_positions": torch.tensor([3, 50, 11])}
    model = small_model("BertForQuestionAnswering", "bert", num_labels=2)
    assert_own_loss(model, {"input_ids": batch["input_ids"], **answers})


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
@pytest.mark.parametrize(
    ("name", "model_type", "task"),
    [
        ("LlamaForCausalLM", "llama", "CAUSAL_LM"),
        ("T5ForConditionalGeneration", "t5", "SEQ_2_SEQ_LM"),
        ("BertForSequenceClassification", "bert", "SEQ_CLS"),
    ],
)
def test_a_model_in_the_wrapper_of_peft_keeps_its_loss(name: str, model_type: str, task: str) -> None:
    model = small_model(name, model_type)
    lora = peft.LoraConfig(
        r=2, task_type=task, target_modules=["q_proj" if model_type == "llama" else "query"]
    )
    if model_type == "t5":
        lora.target_modules = {"q", "v"}
    batch = tokens() if "LM" in task else {**tokens(), "labels": torch.tensor([0, 2, 1])}
    assert_own_loss(peft.get_peft_model(model, lora).eval(), batch)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("BertForNextSentencePrediction", "bert"), ("BertForPreTraining", "bert"), ("LlamaModel", "llama")],
)
def test_any_other_models_loss_is_asked_for(name: str, model_type: str) -> None:
    with pytest.raises(ModelError, match=f"no default loss\n.*{name}"):
        choose_loss(small_model(name, model_type), None)


def test_a_loss_function_that_the_user_has_set_is_asked_for() -> None:
    model = small_model("LlamaForCausalLM", "llama")
    model.loss_function = lambda *_args, **_kwargs: torch.zeros(())
    with pytest.raises(ModelError, match="no default loss"):
        choose_loss(model, None)


def test_labels_of_another_shape_than_the_logits_are_an_error() -> None:
    model, batch = small_model("LlamaForCausalLM", "llama"), tokens()
    outputs = model(input_ids=batch["input_ids"])
    with pytest.raises(ModelError, match=r"do not fit the model's outputs\n.*\(3, 11\)\n.*\(3, 12\)"):
        choose_loss(model, None)(outputs, {"labels": batch["labels"][:, :11]})


_FEEDS_INPUTS_TO_ITS_DECODER = "FSMTForConditionalGeneration"  # if it is given none: not the labels
_FAMILIES = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": 130,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": 40,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": 14,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": 90,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": 75,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": 60,
}


@pytest.mark.sweep
@pytest.mark.parametrize("table", _FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_default_losses_of_all_families_are_their_own(table: str) -> None:
    """For families that can be built small: at least as many as given."""
    wrong, num_equal = [], 0
    for model_type, names in getattr(modeling_auto, table).items():
        for name in [names] if isinstance(names, str) else names:
            model = _try_to_build(name, model_type)
            if model is None or name == _FEEDS_INPUTS_TO_ITS_DECODER:
                continue
            try:
                summed, count = choose_loss(model, None)(
                    model(**forward_inputs(model, b := _batch(table))), b
                )
                own = model(**b, use_cache=False).loss
            except ModelError:
                continue  # asked for by name
            except Exception:  # the model needs other inputs
                continue
            is_equal = (summed / count).item() == pytest.approx(own.item(), rel=1e-5)
            wrong += [] if is_equal else [f"{name}: {summed / count} instead of {own}"]
            num_equal += is_equal
    assert not wrong
    assert num_equal >= _FAMILIES[table]


def _batch(table: str) -> dict[str, Tensor]:
    batch = tokens()
    if "SEQUENCE_CLASS" in table:
        return {**batch, "labels": torch.tensor([0, 1, 1])}
    if "TOKEN_CLASS" in table:
        return {**batch, "labels": batch["labels"].clamp(max=1)}
    if "ANSWERING" in table:
        ends = {"start_positions": torch.tensor([1, 2, 4]), "end_positions": torch.tensor([3, 9, 11])}
        return {"input_ids": batch["input_ids"], **ends}
    return batch


def _try_to_build(name: str, model_type: str) -> Any:
    for sizes in (SIZES, {**SIZES, "num_key_value_heads": 4}):
        try:
            values = {**sizes, **_SMALL, **_BART, **_T5, **_OTHER_SIZES.get(model_type, {}), "num_labels": 2}
            config = transformers.AutoConfig.for_model(model_type, **values)
            with torch.device("meta"):
                if sum(p.numel() for p in getattr(transformers, name)(config).parameters()) > 1e7:
                    continue
            torch.manual_seed(0)
            return getattr(transformers, name)(config).eval()
        except Exception:  # these sizes do not fit the family
            continue
    return None


def test_an_encoder_as_a_causal_language_model_is_an_error() -> None:
    with pytest.raises(ModelError, match="attends to the tokens that it is to predict"):
        check_attends_backwards(small_model("BertLMHeadModel", "bert"))
    check_attends_backwards(small_model("BertLMHeadModel", "bert", is_decoder=True))
    check_attends_backwards(small_model("LlamaForCausalLM", "llama"))
