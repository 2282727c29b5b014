"""Trainings that several files compare with."""

from typing import Any

import pytest
from torch import Tensor

from support import trainings
from support.pool import Pool


@pytest.fixture(scope="session")
def start(pool: Pool) -> dict[str, Tensor]:
    """The weights that all short trainings begin with."""
    return pool.run(trainings.first_weights, 1, "dp=1")[0]


@pytest.fixture(scope="session")
def wide(pool: Pool) -> Any:
    """A short training all in fp32, by one process."""
    return pool.run(trainings.trained, 1, "dp=1 micro=2")[0]
