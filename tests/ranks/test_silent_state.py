"""Errors that no exception tells of, in what ranks hold and decide: each of them happened elsewhere.

The whole list, with the test of each entry, is in docs/silent_errors.md.
"""

from typing import Any

import pytest
import torch
from torch import nn

import hard_models
import programs
from plait.errors import ModelError
from pool import Pool

# --- parameters that nobody would reduce or update


class _Late(nn.Module):
    """A layer with a correction that trains, as adapters wrap one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def _comes_late(plan: str, how: str) -> tuple[str, bool]:
    """What a step says of a parameter that came after parallelize; whether it goes on when that is frozen."""
    task = programs.Task(hard_models.uneven)
    engine: Any = programs.engine_of(task, plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    block = next(
        block for block in engine.model.blocks if not block.up.weight.is_meta
    )  # of this rank's stage
    if how == "wrapped":
        block.up = _Late(block.up)
    else:
        block.late = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError) as found:
        engine.step(batch)
    for parameter in (block.up.scale,) if how == "wrapped" else (block.late,):
        parameter.requires_grad_(False)
    return str(found.value), engine.step(batch).skipped


@pytest.mark.parametrize("how", ["wrapped", "added"])
@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2 zero=3", 2), ("pp=2", 2)])
def test_a_parameter_without_a_layout_is_refused(pool: Pool, plan: str, ranks: int, how: str) -> None:
    """Megatron-LM#7452: how a parameter is cut was a flag that somebody had to set."""
    for letter, skipped in pool.run(_comes_late, ranks, f"{plan} precision=fp64", how):
        assert letter.startswith("a parameter came after parallelize")
        assert "up.scale" in letter or ".late" in letter
        assert not skipped
