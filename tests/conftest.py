"""Fixtures for every rung."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import parse_warning_filter
from hypothesis import settings

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:  # pytest puts it there in one of its import modes only
    sys.path.insert(0, TESTS)

# As the ranks have it, and before torch is imported: a second thread spins where others compute, and turns
# the milliseconds of an oracle into seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from support.covering import covering  # noqa: E402
from support.pool import Pool  # noqa: E402

settings.register_profile("plait", deadline=None)  # a shared machine pauses when it likes
settings.load_profile("plait")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the sweep the cases that are not needed to run, over the tests of a file, every pair of two
    parameters, and of a test and a parameter."""
    files = defaultdict[Path, list[pytest.Function]](list)
    for item in items:
        is_case = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if is_case and item.get_closest_marker("sweep") is None:
            files[item.path].append(item)
    for group in files.values():
        cases = [{"test": item.originalname, **_as_text(item.callspec.params)} for item in group]
        if max(map(len, cases)) > 2:
            needed = {tuple(case.items()) for case in covering(cases, seed=1)}
            for item, case in zip(group, cases, strict=True):
                if tuple(case.items()) not in needed:
                    item.add_marker(pytest.mark.sweep)


def _as_text(parameters: dict[str, Any]) -> dict[str, str]:
    """Values are compared as they are written: some cannot be hashed."""
    return {name: repr(value) for name, value in parameters.items()}


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


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Parameters and inputs are made in float64, from the same seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def restored_numerics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test, the settings of the process that `tf32` and `deterministic` change are as before."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # recorded, so that it is restored
        monkeypatch.delenv(name)
    precision, fills = (
        torch.get_float32_matmul_precision(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
