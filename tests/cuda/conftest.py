"""Ranks with a CUDA device each: real ones where there are, otherwise simulated ones.

Tests of this folder use `pool` like those of tests/ranks. See tests/support/virtual_cuda/README.md.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _pytest.config import parse_warning_filter

from support.pool import Pool
from support.virtual_cuda.build import BuildError, library

FIRST_IMPORT = "support.virtual_cuda.load"


class DevicePool(Pool):
    """A pool on this machine's devices: tests that need more of them than there are skip."""

    def run(self, fn: Callable[..., Any], n: int, /, *args: Any, **kwargs: Any) -> list[Any]:
        if n > torch.cuda.device_count():
            pytest.skip(f"{n} CUDA devices needed, {torch.cuda.device_count()} found")
        return super().run(fn, n, *args, **kwargs)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Workers that are not those of the other rungs: the simulated device is loaded before torch."""
    filters = [parse_warning_filter(text, escape=False) for text in pytestconfig.getini("filterwarnings")]
    if torch.cuda.is_available():
        ranks: Pool = DevicePool(filters)
    else:
        try:
            library()
        except BuildError as error:
            pytest.skip(f"no CUDA device, and none can be simulated: {error}")
        ranks = Pool(filters, FIRST_IMPORT)
    yield ranks
    ranks.close()
