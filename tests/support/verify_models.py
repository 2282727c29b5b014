"""Models for `plait verify` (`support.verify_models:pair`), and mutations that each drop one kind of message
of one block."""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from plait.verify.tiny_config import shrink_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # for ranks started by `plait verify`

from plait.comm import connect
from plait.models import causal_lm_on_meta
from plait.verify import Case, ModelSource, ModelSpec, Verdict
from plait.verify.worker import Verifier
from support import pipeline_models, programs

MUTED_BLOCK = 1
MUTED_LAYER = f"model.layers.{MUTED_BLOCK}."
LLAMA = ModelSource(config=shrink_config({"model_type": "llama"}, 3))
TIED_LLAMA = ModelSource(config=shrink_config({"model_type": "llama", "tie_word_embeddings": True}, 4))


def verify_on_ranks(
    source: ModelSource, plan: str, mutation: str = "", dtype: str = "float64", samples: int = 8
) -> Verdict | None:
    """Verify on every rank of the plan; rank 0 returns the verdict."""
    job = Case(source, f"{plan} precision={_PRECISION[dtype]}", dtype, 3, samples, 12, 0)
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
    build = functools.partial(pipeline_models.pair, layers=2, on_meta=False)
    return ModelSpec(build, _tokens, programs.summed_loss)


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


MUTATIONS: dict[str, Callable[[], Any]] = {
    "replicas": no_sum_over_replicas,
    "parameters": no_gather_of_parameters,
    "parts": no_sum_of_partial_gradients,
    "one column": one_column_adds_too_much,
    "tied": no_sum_of_tied_weights,
}
