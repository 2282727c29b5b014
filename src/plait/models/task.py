"""The task of a Hugging Face model, and the entries of its batches: what its forward takes, its labels, and
what only the loss reads.

[Note: entries of a batch]
Entries that forward names are its arguments. The others, and the labels, are for the loss: sample weights,
a teacher's logits. An entry that the loss does not read either is a mistake (a misspelled mask, or an entry
that only transformers' own loss would read), which a forward with `**kwargs` would ignore silently. So a
model of transformers receives only the keywords that it names or declares (`Unpack[TransformersKwargs]`), and
the entries that a loss reads are recorded in its first call with these keys. Any other forward with
`**kwargs` receives every entry but the labels.
"""

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from plait.errors import ModelError, nearest
from plait.models.blocks import Chain
from plait.models.transformers_types import is_pretrained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Read by transformers' own loss, which is not called: a step divides by its own number of targets.
_OF_MODELS_LOSS = ("num_items_in_batch",)
ROUTING = "routing"  # an entry of batches for mixtures: models/routing.py
# Entries of a batch with tokens in dim 1.
OF_TOKENS = {"input_ids", "inputs_embeds", "labels", "attention_mask", "position_ids", "token_type_ids"}
LOSS_WEIGHTS = "loss_weights"  # an entry of batches: a weight for each label, of losses of tokens
REFERENCE = "reference_log_probs"  # an entry of pairs: the log-probability of each label by another model
MARGIN = "margin"  # an entry of pairs for a reward model: for each row, and the chosen row's is used
TEACHER_IDS, TEACHER = "teacher_ids", "teacher_log_probs"  # of a teacher's likeliest tokens, (B, S, K)
OF_TOKENS |= {ROUTING, LOSS_WEIGHTS, REFERENCE, TEACHER_IDS, TEACHER}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ROUTER_LOSS = "_plait_router_loss"  # an attribute of models whose auxiliary loss the engine adds
IGNORED_LABEL = -100  # not a target, as in torch.nn.functional.cross_entropy and transformers


class Task(Enum):
    """A task whose loss is a sum over targets.

    CAUSAL_LM   each position predicts the label of the next one
    IMAGE_LM    the same, with positions of an image before the first label's, which predict nothing
    NGRAM_LM    each position predicts its own label, and other logits the labels of its n-gram
    ALIGNED_LM  each position predicts its own label: masked and encoder-decoder language models
    The others are classifications, of a sequence, its tokens, or the start and end of an answer in it.
    """

    CAUSAL_LM = "causal language model"
    IMAGE_LM = "causal language model that puts images before the tokens"
    NGRAM_LM = "language model of n-grams"
    ALIGNED_LM = "masked or sequence-to-sequence language model"
    SEQUENCE_CLASSIFICATION = "sequence classification"
    TOKEN_CLASSIFICATION = "token classification"
    QUESTION_ANSWERING = "question answering"


_WEIGHTED = (Task.CAUSAL_LM, Task.ALIGNED_LM, Task.TOKEN_CLASSIFICATION)
_LABELS, _ANSWER = ("labels",), ("start_positions", "end_positions")

# By the model's `loss_type`, which transformers derives from the name of its class.
_TASKS = {
    "ForMaskedLM": Task.ALIGNED_LM,
    "ForSequenceClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForImageClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForVideoClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForAudioClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": Task.QUESTION_ANSWERING,
}

# Families whose own loss does not shift the labels, as in the decoders of encoder-decoder families.
_ALIGNED_DECODERS = ("cpmant", "trocr", "whisper", "xlnet")
_OF_FAMILIES = {"git": Task.IMAGE_LM, "prophetnet": Task.NGRAM_LM}


def task_of(model: nn.Module) -> Task | None:
    """The task of a model, which may be in PEFT's wrapper. None if it has no known task: such a model can be
    trained with `loss=`.
    """
    base = pretrained_base(model)
    if base is None or hasattr(base, "_loss_function"):  # set by the user
        return None
    loss_type = getattr(base, "loss_type", None)
    if loss_type in _TASKS:
        return _TASKS[loss_type]
    name, family = type(base).__name__, base.config.model_type
    return _language_modeling(name, family, loss_type, is_encoder_decoder=_is_encoder_decoder(base))


def pretrained_base(model: nn.Module) -> "PreTrainedModel | None":
    """The model of transformers: this one, or the one in PEFT's wrapper. None for other modules."""
    unwrap = getattr(model, "get_base_model", None)
    base = model if unwrap is None else unwrap()
    return base if is_pretrained_model(base) else None


def forward_names(model: nn.Module) -> frozenset[str] | None:
    """The entries that forward takes; None: all but the labels."""
    return _arguments(model)[0]


def cast_entries(batch: Mapping[str, Tensor], names: Collection[str] | None) -> set[str]:
    """The entries that a step casts to the dtype of the parameters. `names`: those that forward takes."""
    return {
        key
        for key, value in batch.items()
        if value.is_floating_point()
        and key not in ("labels", LOSS_WEIGHTS, REFERENCE, MARGIN, TEACHER)
        and (names is None or key in names)
    }


def takes_keyword(model: nn.Module, name: str) -> bool:
    """Return whether forward can be called with this keyword: it names it, or has `**kwargs`."""
    names, _, has_kwargs = _arguments(model)
    return has_kwargs or names is None or name in names


def needs_entry(model: nn.Module, name: str) -> bool:
    """Return whether forward has an argument of this name without a default."""
    return name in _arguments(model)[1]


def check_present(model: nn.Module, inputs: Collection[str], batch: Collection[str]) -> None:
    """Raise ModelError unless forward's arguments without defaults are among the inputs from the batch."""
    missing = [name for name in _arguments(model)[1] if name not in inputs]
    if missing:
        raise ModelError(
            "forward needs an argument that the batch does not have",
            given=f"{type(model).__name__} and a batch with {', '.join(batch)}",
            expected=", ".join(missing),
            hint="a batch with forward's arguments by name; labels are for the loss alone",
        )


def label_keys(model: nn.Module) -> tuple[str, ...]:
    """The entries of a batch that only the loss receives."""
    task = task_of(model)
    if task is Task.QUESTION_ANSWERING:
        return _ANSWER
    return (*_LABELS, LOSS_WEIGHTS, REFERENCE, TEACHER_IDS, TEACHER) if task in _WEIGHTED else _LABELS


def forward_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of the model's forward: the entries that it takes except the labels, and
    those of `without_cache` for a model of transformers. See [Note: entries of a batch].

    The decoder of an encoder-decoder receives the labels shifted to the right, as by the model itself,
    unless the batch has its inputs. Raises ModelError if an argument is missing.
    """
    labels, names = label_keys(model), forward_names(model)
    inputs: dict[str, Any] = {
        key: value for key, value in batch.items() if key not in labels and (names is None or key in names)
    }
    base = pretrained_base(model)
    if base is None:
        check_present(model, inputs, batch)
        return inputs
    inputs = without_cache(base) | inputs  # generation has one
    inputs |= {"output_router_logits": False} if hasattr(base, ROUTER_LOSS) else {}
    has_decoder = _is_encoder_decoder(base) and task_of(model) in (Task.ALIGNED_LM, Task.NGRAM_LM)
    if (
        has_decoder
        and "labels" in batch
        and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}
    ):
        inputs["decoder_input_ids"] = _shifted_right(base, batch)
    return inputs


def without_cache(base: nn.Module) -> dict[str, Any]:
    """Return `use_cache=False` if the forward of a model of transformers takes it: not an autoencoder's."""
    return {"use_cache": False} if takes_keyword(base, "use_cache") else {}


def _shifted_right(base: "PreTrainedModel", batch: Mapping[str, Tensor]) -> Tensor:
    """The decoder's inputs, from the labels: by the model's method, or the function of its module, as the
    model's own forward calls it."""
    method: Any = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if method is not None:
        return method(labels=batch["labels"])
    shift: Any = getattr(sys.modules[type(base).__module__], "shift_tokens_right", None)
    if shift is None:
        raise ModelError(
            "the model cannot derive its decoder's inputs from the labels",
            given=f"{type(base).__name__} and a batch with {', '.join(batch)}",
            expected="decoder_input_ids",
            hint="add decoder_input_ids to the batch: the labels, shifted right",
        )
    _, *parameters = inspect.signature(shift).parameters
    return shift(batch["labels"], *(getattr(base.config, name) for name in parameters))


def check_attends_backwards(model: "PreTrainedModel") -> None:
    """Raise ModelError for an encoder that is built as a causal language model: it attends to the tokens that
    it predicts."""
    from transformers.models.auto import modeling_auto

    family = model.config.model_type
    is_encoder = family in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_encoder and not getattr(model.config, "is_decoder", False):
        raise ModelError(
            "the model attends to the tokens that it is to predict",
            given=f"model_type={family} without is_decoder",
            expected="a causal language model",
            hint="is_decoder = true in the model's configuration",
        )


@functools.lru_cache
def _language_modeling(
    name: str, family: str, loss_type: str | None, *, is_encoder_decoder: bool
) -> Task | None:
    """The task of a language model, by its family or by transformers' tables: some class names do not contain
    the task, and those of decoders do not show whether the loss shifts the labels."""
    from transformers.models.auto import modeling_auto

    encoder_decoders = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if family in _OF_FAMILIES:
        return _OF_FAMILIES[family]
    if is_encoder_decoder:
        is_known = loss_type == "ForConditionalGeneration" or name in encoder_decoders.values()
        return Task.ALIGNED_LM if is_known else None
    if name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return Task.ALIGNED_LM
    is_causal = loss_type in ("ForCausalLM", "ForConditionalGeneration")
    if not is_causal and name not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    is_decoder = loss_type == "ForCausalLM" and family in encoder_decoders
    return Task.ALIGNED_LM if is_decoder or family in _ALIGNED_DECODERS else Task.CAUSAL_LM


def _is_encoder_decoder(base: "PreTrainedModel") -> bool:
    return bool(getattr(base.config, "is_encoder_decoder", False))


class RecordedBatch(dict[str, Tensor]):
    """A micro-batch that records which entries are read."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> Any:
        self.read.update(dict.keys(self))
        return dict.keys(self)

    def values(self) -> Any:
        self.keys()
        return dict.values(self)

    def items(self) -> Any:
        self.keys()
        return dict.items(self)

    def check_used(self, model: nn.Module) -> None:
        """Raise ModelError for an entry that neither forward takes nor the loss has read."""
        names = forward_names(model)
        if names is None:
            return
        unused = [key for key in dict.keys(self) if key not in {*names, *label_keys(model), *self.read}]
        if unused:
            raise ModelError(
                "the batch has an entry that neither the model nor the loss uses",
                given=f"{unused[0]}; {type(model).__name__}.forward takes {', '.join(sorted(names))}",
                expected="forward's arguments by name, and what the loss reads from the batch",
                hint=nearest(unused[0], names) or f"a batch without {unused[0]}",
            )


# The names that forward takes (None: any), those of them without a default, and whether it has `**kwargs`.
_Arguments = tuple[frozenset[str] | None, tuple[str, ...], bool]


def _arguments(model: nn.Module) -> _Arguments:
    while isinstance(model, Chain):
        model = next(model.children())
    kind = type(model)
    if kind not in _ARGUMENTS:  # the class's forward: the instance's may be ours, with other names
        _ARGUMENTS[kind] = _arguments_of(kind.forward)
    return _ARGUMENTS[kind]


# Weak: a class keeps the globals of its module alive, and an engine may be among them.
_ARGUMENTS: WeakKeyDictionary[type[nn.Module], _Arguments] = WeakKeyDictionary()


def _arguments_of(forward: Callable[..., Any]) -> _Arguments:
    if forward is nn.Module.forward:
        return None, (), True
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in _NAMED]
    names = {parameter.name for parameter in named}
    required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    has_kwargs = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            has_kwargs = True
            declared = [vars(kind).get("__annotations__") for kind in typing.get_args(parameter.annotation)]
            if not declared or None in declared:
                return None, required, has_kwargs
            names = names.union(*declared)
    return frozenset(names - {*_OF_MODELS_LOSS}), required, has_kwargs
