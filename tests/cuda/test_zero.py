"""ZeRO 0 to 3 on CUDA ranks: the CPU ranks' numbers, ordered streams, few host syncs."""

import pytest

from support.cuda_checks import Case, check
from support.pool import Pool

CASES = [
    Case(2, "dp=2 zero=0 micro=2 precision=bf16", syncs=16),
    Case(2, "dp=2 zero=1 micro=2 precision=bf16", syncs=16),
    Case(2, "dp=2 zero=2 micro=2 precision=bf16", syncs=16),
    Case(2, "dp=2 zero=3 micro=2 precision=bf16", syncs=20, kept_bytes=147456),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_are_ordered_and_results_are_those_of_the_cpu(pool: Pool, case: Case) -> None:
    check(pool, case)
