"""What tensor parallelism keeps for backward: foretold, measured, and as formulas count it."""

import pytest

import families
import plait
import programs
from pool import Pool

PLANS = ["tp=2", "tp=2 sp=true", "tp=2x2", "tp=2 sp=true recompute=selective"]


def _kept(family: str, plan: str) -> tuple[int | None, int | None]:
    """Foretold before, and measured in, the first step."""
    engine = plait.parallelize(families.model_of(family, exact=False), f"{plan} precision=fp32", seed=3)
    foretold = engine.predicted_memory((programs.SEQUENCES, programs.LENGTH)).activations
    engine.step(programs.batches(1)[0])
    return foretold, engine.memory().activations


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "falcon"])
def test_what_a_grid_keeps_is_foretold_to_the_byte(pool: Pool, family: str, plan: str) -> None:
    for foretold, measured in pool.run(_kept, 4 if "x2" in plan else 2, family, plan):
        assert foretold is not None
        assert foretold == measured
