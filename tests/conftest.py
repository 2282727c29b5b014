"""Fixtures for every rung."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.config import parse_warning_filter
from hypothesis import settings

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:  # pytest puts it there in one of its import modes only
    sys.path.insert(0, TESTS)

# As the ranks have it, and before torch is imported: a second thread spins where others compute, and turns
# the milliseconds of an oracle into seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.pool import Pool  # noqa: E402

settings.register_profile("plait", deadline=None)  # a shared machine pauses when it likes
settings.load_profile("plait")


@pytest.fixture(scope="session")
def workers(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Long-lived worker processes, started at first use."""
    filters = [parse_warning_filter(text, escape=False) for text in pytestconfig.getini("filterwarnings")]
    ranks = Pool(filters)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def pool(workers: Pool) -> Pool:
    """`pool.run(function, n, *args)`: a function on n ranks. A file may make its own, of `workers`."""
    return workers
