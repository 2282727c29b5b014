"""Models for `plait verify` (`support.verify_models:pair`), and mutations that each drop one kind of message
of one block."""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from plait.verify.tiny_config import shrink_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # for ranks started by `plait verify`
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from other_kinds import KINDS as KINDS
from plait.comm import connect
from plait.engine.engine import Engine
from plait.engine.totals import EvalResult
from plait.models import causal_lm_on_meta
from plait.verify import Case, ModelSource, ModelSpec, Verdict
from plait.verify.model_spec import random_tokens
from plait.verify.worker import Dropped, Verifier
from support import pipeline_models, programs

TOOLS = Path(__file__).parents[2] / "tools"
MUTED_BLOCK = 1
MUTED_LAYER = f"model.layers.{MUTED_BLOCK}."
LLAMA = ModelSource(config=shrink_config({"model_type": "llama"}, 3))
TIED_LLAMA = ModelSource(config=shrink_config({"model_type": "llama", "tie_word_embeddings": True}, 4))


def verify_on_ranks(
    source: ModelSource,
    plan: str,
    mutation: str = "",
    dtype: str = "float64",
    samples: int = 8,
    *,
    packed: bool = False,
) -> Verdict | None:
    """Verify on every rank of the plan; rank 0 returns the verdict."""
    job = Case(source, f"{plan} precision={_PRECISION[dtype]}", dtype, 3, samples, 12, 0, packed=packed)
    with MUTATIONS[mutation]() if mutation else nullcontext(), tempfile.TemporaryDirectory() as folder:
        return Verifier().run(job, connect(), Path(folder))


def verify_twice(source: ModelSource, plan: str) -> None:
    """Verify twice with one verifier, which caches results of the first time."""
    job, verifier = Case(source, f"{plan} precision=fp64", "float64", 1, 4, 8, 0), Verifier()
    for _ in range(2):
        verifier.run(job, connect(), Path())


_PRECISION = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"}


# --- models of a user's own


def pair() -> ModelSpec:
    """Plain module on meta; its blocks pass two tensors."""
    return ModelSpec(functools.partial(pipeline_models.pair, layers=4), _tokens, programs.summed_loss)


def with_values() -> ModelSpec:
    return ModelSpec(_seeded, _tokens, programs.summed_loss)


def of_every_build_another() -> ModelSpec:
    def build() -> nn.Module:
        torch.seed()
        return pipeline_models.pair(layers=2, on_meta=False)

    return ModelSpec(build, _tokens, programs.summed_loss)


class _RandomFeatures(nn.Module):
    """Random weights and a random buffer, which its code does not seed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(8, 8))
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, input: Tensor) -> Tensor:
        return self.blocks(torch.sin(input @ self.directions))


def random_features() -> ModelSpec:
    return replace(of_numbers(), model=_RandomFeatures)


def nested_batch() -> ModelSpec:
    return replace(of_numbers(), batch=lambda _, samples: {"input": {"x": torch.ones(samples, 8)}})


def llama() -> nn.Module:
    """A bare model, from which the inputs are inferred. Its dropout has to be disabled."""
    return causal_lm_on_meta({**LLAMA.config, "attention_dropout": 0.5})


def of_numbers() -> ModelSpec:
    """Inputs are float32 numbers instead of tokens."""

    def batch(step: int, samples: int) -> dict[str, Tensor]:
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(step))
        return {"input": x, "labels": x.relu()}

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (outputs - batch["labels"]).square().sum(), outputs.numel()

    return ModelSpec(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), batch, loss)


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.flatten(1)


def batch_norm() -> ModelSpec:
    return ModelSpec(_ConvNet, _images, _squares)


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left, self.right = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x.flatten(1)), self.right(x.flatten(1).flip(1))


def contrastive() -> ModelSpec:
    """The loss compares each sample with all others."""

    def loss(outputs: tuple[Tensor, Tensor], _: Any) -> tuple[Tensor, int]:
        left, right = outputs
        return F.cross_entropy(left @ right.T, torch.arange(len(left)), reduction="sum"), len(left)

    return ModelSpec(_Pairs, _images, loss)


def _images(step: int, samples: int) -> dict[str, Tensor]:
    x = torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"x": x, "labels": x.flatten(1).roll(1, 1)}


def _squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch["labels"]).square().sum(), outputs.numel()


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DISTILBERT = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "d_model": 32,
    **{
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    },
    "decoder_start_token_id": 2,
}


def of_task(name: str, **sizes: Any) -> nn.Module:
    model: Any = getattr(transformers, name)
    torch.manual_seed(4)
    return model(model.config_class(**{**_SIZES, **sizes}))


# Masked and sequence-to-sequence language models
bert = functools.partial(of_task, "BertForMaskedLM")
roberta = functools.partial(of_task, "RobertaForMaskedLM")
modernbert = functools.partial(of_task, "ModernBertForMaskedLM", reference_compile=False)
distilbert = functools.partial(of_task, "DistilBertForMaskedLM", **_DISTILBERT)
t5 = functools.partial(of_task, "T5ForConditionalGeneration", **T5)
switch = functools.partial(
    of_task,
    "SwitchTransformersForConditionalGeneration",
    **T5,
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1),
    num_experts=4,
    expert_capacity=3,
)
bart = functools.partial(of_task, "BartForConditionalGeneration", **_BART)
marian = functools.partial(of_task, "MarianMTModel", **_BART)


def mbart() -> ModelSpec:
    """Its decoder's first token is the last label, so each sample needs a label."""

    def batch(step: int, samples: int) -> dict[str, Tensor]:
        tokens = random_tokens(64, 0, step, samples, 8)
        tokens["labels"][:, 0] = tokens["input_ids"][:, 0]
        return tokens

    return ModelSpec(functools.partial(of_task, "MBartForConditionalGeneration", **_BART), batch)


def other_kind(name: str) -> ModelSource:
    """A model of the table of other kinds in docs/architectures.md."""
    return ModelSource(build=f"other_kinds:{name}", folder=str(TOOLS))


def no_model() -> int:
    return 3


def failing() -> nn.Module:
    raise ValueError("of its own")


def dying_in_pipelines() -> nn.Module:
    """One rank of four exits."""
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("3", "4"):
        sys.exit(7)
    return llama()


def muted_between_columns() -> nn.Module:
    _apply_on_ranks(no_sum_of_partial_gradients())
    return causal_lm_on_meta(LLAMA.config)


def muted_between_replicas() -> nn.Module:
    _apply_on_ranks(no_sum_over_replicas())
    return causal_lm_on_meta(LLAMA.config)


def muted_between_stages() -> nn.Module:
    _apply_on_ranks(no_sum_of_tied_weights())
    return causal_lm_on_meta(TIED_LLAMA.config)


def _apply_on_ranks(mutation: Any) -> None:
    """Apply a mutation until the process ends, on ranks only."""
    if "RANK" in os.environ:
        _MUTATIONS_OF_RANK.enter_context(mutation)


_MUTATIONS_OF_RANK = ExitStack()


def _seeded() -> nn.Module:
    torch.manual_seed(4)
    return pipeline_models.pair(layers=4, on_meta=False)


def _tokens(step: int, samples: int) -> dict[str, Tensor]:
    return programs.batches(step + 1, sequences=samples, length=8)[step]


# --- muted operations


@contextmanager
def _muted(module: str, name: str, is_muted: Callable[[str], bool]) -> Iterator[None]:
    """Replace a module's operation by one that does not communicate for labels that `is_muted` selects."""
    owner, replacement = sys.modules[module], programs.MUTED.get(name, lambda tensor, *_, **__: tensor)
    real = getattr(owner, name)

    def call(*args: Any, label: str = "", **kwargs: Any) -> Any:
        return (replacement if is_muted(label) else real)(*args, label=label, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


def _in_the_block(label: str) -> bool:
    return MUTED_LAYER in f"{label}."


def no_sum_over_replicas() -> Any:
    return _muted("plait.parallel.zero.reduce_ops", "start_scattered_sum", _in_the_block)


def no_sum_over_any_replicas() -> Any:
    return _muted("plait.parallel.zero.reduce_ops", "start_scattered_sum", lambda _: True)


def no_gather_of_parameters() -> Any:
    return _muted("plait.parallel.zero.unshard", "start_all_gather", _in_the_block)


def no_sum_of_partial_gradients() -> Any:
    """Drop the sum of gradients of which each column has a partial sum."""
    return _muted("plait.parallel.zero.grad_reduce", "all_reduce", _in_the_block)


def no_sum_of_tied_weights() -> Any:
    return _muted(
        "plait.parallel.zero.sharded_model", "all_reduce", lambda label: label.startswith("gradients of")
    )


@contextmanager
def one_column_adds_too_much() -> Iterator[None]:
    """Double the second column's gradients of the block."""
    owner: Any = sys.modules["plait.parallel.zero.reduce_ops"]
    real = owner.start_scattered_sum

    def call(whole: Tensor, *args: Any, label: str = "", **kwargs: Any) -> Any:
        if _in_the_block(label) and connect().rank % 2:
            whole *= 2
        return real(whole, *args, label=label, **kwargs)

    with mock.patch.object(owner, "start_scattered_sum", call):
        yield


def recomputation_that_changes_buffers() -> Any:
    owner: Any = sys.modules["plait.parallel.activation_checkpoint"]
    return mock.patch.object(owner, "_put_back", return_value=nullcontext())


def evaluation_that_is_doubled() -> Any:
    real = Engine.evaluate

    def call(engine: Engine, batch: Any) -> EvalResult:
        result = real(engine, batch)
        return EvalResult(2 * result.loss_sum, result.num_tokens)

    return mock.patch.object(Engine, "evaluate", call)


def no_exchange_of_islands() -> Any:
    owner: Any = sys.modules["plait.parallel.local_steps"]
    return mock.patch.object(owner.OuterOptimizer, "is_due", return_value=False)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "recomputation": recomputation_that_changes_buffers,
    "evaluation": evaluation_that_is_doubled,
    "replicas": no_sum_over_replicas,
    "all replicas": no_sum_over_any_replicas,
    "parameters": no_gather_of_parameters,
    "parts": no_sum_of_partial_gradients,
    "one column": one_column_adds_too_much,
    "tied": no_sum_of_tied_weights,
    "exchange": no_exchange_of_islands,
    "dropless": functools.partial(mock.patch.object, Dropped, "install"),
}
