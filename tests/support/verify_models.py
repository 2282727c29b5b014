"""Models for `plait verify` (`support.verify_models:pair`), and mutations that each drop one kind of
message of one block."""

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

sys.path.insert(0, str(Path(__file__).parents[1]))  # for ranks that `plait verify` starts

from plait.comm import connect
from plait.models import causal_lm_on_meta
from plait.verify import Case, ModelSource, ModelSpec, Verdict
from plait.verify.tiny_config import shrink_config
from plait.verify.worker import Verifier
from support import pipeline_models, programs

DEAF_BLOCK = 1
DEAF_LAYER = f"model.layers.{DEAF_BLOCK}."
LLAMA = ModelSource(config=shrink_config({"model_type": "llama"}, 3))
TIED_LLAMA = ModelSource(config=shrink_config({"model_type": "llama", "tie_word_embeddings": True}, 4))


def verify_on_ranks(
    source: ModelSource, plan: str, mutation: str = "", dtype: str = "float64", samples: int = 8
) -> Verdict | None:
    """On every rank of the plan; the verdict is the first one's."""
    job = Case(source, f"{plan} precision={_PRECISION[dtype]}", dtype, 3, samples, 12, 0)
    with MUTATIONS[mutation]() if mutation else nullcontext(), tempfile.TemporaryDirectory() as folder:
        return Verifier().run(job, connect(), Path(folder))


def verify_twice(source: ModelSource, plan: str) -> None:
    """By one verifier, which keeps what it knows of the first time."""
    job, verifier = Case(source, f"{plan} precision=fp64", "float64", 1, 4, 8, 0), Verifier()
    for _ in range(2):
        verifier.run(job, connect(), Path())


_PRECISION = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"}


# --- models of a user's own


def pair() -> ModelSpec:
    """A plain module, on meta, whose blocks pass two tensors."""
    return ModelSpec(functools.partial(pipeline_models.pair, layers=4), _tokens, programs.summed_loss)


def with_values() -> ModelSpec:
    return ModelSpec(_seeded, _tokens, programs.summed_loss)


def of_every_build_another() -> ModelSpec:
    build = functools.partial(pipeline_models.pair, layers=2, on_meta=False)
    return ModelSpec(build, _tokens, programs.summed_loss)


def llama() -> nn.Module:
    """A model alone, which says itself what it takes. Its dropout has to be turned off."""
    return causal_lm_on_meta({**LLAMA.config, "attention_dropout": 0.5})


def of_numbers() -> ModelSpec:
    """What it is given are numbers in float32."""

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
    """One rank of four ends."""
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("3", "4"):
        sys.exit(7)
    return llama()


def deaf_between_columns() -> nn.Module:
    _put_in_place(no_sum_of_parts())
    return causal_lm_on_meta(LLAMA.config)


def deaf_between_replicas() -> nn.Module:
    _put_in_place(no_sum_over_replicas())
    return causal_lm_on_meta(LLAMA.config)


def deaf_between_stages() -> nn.Module:
    _put_in_place(no_sum_of_tied_weights())
    return causal_lm_on_meta(TIED_LLAMA.config)


def _put_in_place(mutation: Any) -> None:
    """For good, on ranks."""
    if "RANK" in os.environ:
        _STANDING.enter_context(mutation)


_STANDING = ExitStack()


def _seeded() -> nn.Module:
    torch.manual_seed(4)
    return pipeline_models.pair(layers=4, on_meta=False)


def _tokens(step: int, samples: int) -> dict[str, Tensor]:
    return programs.batches(step + 1, sequences=samples, length=8)[step]


# --- ranks that do not hear each other


@contextmanager
def _deaf(module: str, verb: str, is_deaf: Callable[[str], bool]) -> Iterator[None]:
    """Inside, a module's `verb` says and hears nothing where the label of what it is about tells it to."""
    owner, instead = sys.modules[module], programs.DEAF.get(verb, lambda tensor, *_, **__: tensor)
    real = getattr(owner, verb)

    def call(*args: Any, label: str = "", **kwargs: Any) -> Any:
        return (instead if is_deaf(label) else real)(*args, label=label, **kwargs)

    with mock.patch.object(owner, verb, call):
        yield


def _in_the_block(label: str) -> bool:
    return DEAF_LAYER in f"{label}."


def no_sum_over_replicas() -> Any:
    return _deaf("plait.parallel.zero.reduce_ops", "start_scattered_sum", _in_the_block)


def no_gather_of_parameters() -> Any:
    return _deaf("plait.parallel.zero.unshard", "start_all_gather", _in_the_block)


def no_sum_of_parts() -> Any:
    """Of gradients of which columns see a part each."""
    return _deaf("plait.parallel.zero.groups", "all_reduce", _in_the_block)


def no_sum_of_tied_weights() -> Any:
    return _deaf(
        "plait.parallel.zero.sharded_model", "all_reduce", lambda label: label.startswith("gradients of")
    )


@contextmanager
def one_column_adds_too_much() -> Iterator[None]:
    """What the second of two columns has of the block's gradients is twice what it should be."""
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
    "parts": no_sum_of_parts,
    "one column": one_column_adds_too_much,
    "tied": no_sum_of_tied_weights,
}
