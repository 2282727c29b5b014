"""Short trainings of a small model, and distances between their results."""

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from support import programs

STEPS = 6


def engine_of(plan: str, build: Any = programs.rough_llama, **options: Any) -> plait.Engine:
    defaults = {"optimizer_args": programs.ADAMW, "clip_norm": programs.CLIP, "loss": programs.summed_loss}
    return plait.parallelize(build(), plan, seed=3, **defaults | options)


def train(engine: plait.Engine, first: int = 0, last: int = STEPS) -> Any:
    batches = programs.batches(last)[first:]
    return [engine.step(programs.share_of(batch, engine)) for batch in batches]


def trained(plan: str, options: dict[str, Any] | None = None, steps: int = STEPS) -> Any:
    """Results, weights and state."""
    engine = engine_of(plan, **options or {})
    return train(engine, last=steps), engine.full_parameters(), engine.state()


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in state.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Distance of two trainings' weights, relative to the second one's distance from the start."""
    apart = sum((ours[key] - theirs[key]).double().square().sum() for key in theirs)
    come = sum((theirs[key] - start[key]).double().square().sum() for key in theirs)
    return float((apart / come).sqrt())


def first_weights(plan: str) -> dict[str, Tensor]:
    return engine_of(plan).full_parameters()


def assert_near(found: Any, wide: Any, start: dict[str, Tensor], *, weights: float, losses: float) -> None:
    """Check weights and losses. Bounds are two to three times the measured distances."""
    assert 0 < distance(found[1], wide[1], start) < weights
    for mine, theirs in zip(found[0], wide[0], strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(theirs.loss, rel=losses)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=losses)
