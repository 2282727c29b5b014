"""Compare derived tensor plans with the ones that families of transformers have: bytes that a rank sends.

    python tools/compare_tensor_plans.py [type ...]

For each causal language model with a plan, at its default widths and with two layers if that can be built,
under `tp=2`: bytes sent in a step's layers, and parameters held, under its own plan and under the one that is
derived when the own one is put aside. Needs ten minutes for all types, and no memory: models are on meta.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.engine.spec import Arguments
from plait.errors import PlaitError
from plait.estimate.explain import explain
from plait.models import causal_lm_on_meta
from plait.models.sharding.families import family_plan
from plait.models.sharding.styles import shipped_plan
from plait.plan.events import ring_bytes
from plait.verify import parse_source
from plait.verify.tiny_config import sizes_of_type

LAYERS, TOKENS = 2, 64


def main() -> None:
    warnings.simplefilter("ignore")  # raised by the families themselves
    table = Table("model type", "own MB", "derived MB", "ratio", "own parameters", "derived parameters")
    more, compared = [], 0
    for kind in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model = _model(kind)
        if model is None or not (family_plan(model, 2) or shipped_plan(model)):
            continue
        try:
            own_bytes, own_parameters = _sent(model)
            with _plans_put_aside():
                derived_bytes, derived_parameters = _sent(model)
        except PlaitError as error:
            table.add_row(kind, error.fact)
            continue
        compared += 1
        more += [kind] * (derived_bytes > own_bytes)
        sizes = (f"{own_bytes / 1e6:.2f}", f"{derived_bytes / 1e6:.2f}", f"{derived_bytes / own_bytes:.2f}")
        table.add_row(kind, *sizes, f"{own_parameters:,}", f"{derived_parameters:,}")
    console = Console()
    console.print(table)
    console.print(f"{compared - len(more)} of {compared} derived plans send no more; more: {', '.join(more)}")


def _model(kind: str) -> nn.Module | None:
    """Build a model of the type on meta, as wide as its configuration allows."""
    few: dict[str, Any] = {"model_type": kind, "num_hidden_layers": LAYERS}
    small = sizes_of_type(kind, LAYERS)
    lists = {key: value for key, value in small.items() if isinstance(value, list | tuple) or "layers" in key}
    for config in (few, few | lists, few | small, None):
        try:
            return causal_lm_on_meta(config or parse_source(kind, layers=LAYERS).config)
        except PlaitError:
            continue
    return None


@contextmanager
def _plans_put_aside() -> Iterator[None]:
    with (
        patch("plait.models.sharding.plan.family_plan", lambda *_: {}),
        patch("plait.models.sharding.styles.shipped_plan", lambda *_: {}),
    ):
        yield


def _sent(model: nn.Module) -> tuple[int, int]:
    """Return the bytes that a rank sends in layers, and the parameters that it holds."""
    ids = torch.arange(TOKENS)[None] % 61 + 3
    found = explain(Arguments(model, "tp=2"), {"input_ids": ids, "labels": ids})
    first = found.rank_classes[0]
    return ring_bytes(first.traffic["layers"], found.grid), first.parameters


if __name__ == "__main__":
    main()
