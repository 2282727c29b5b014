"""A rank that fails while its sums are under way ends: the thread that waits for peers does not hold it."""

from pathlib import Path

from support.cli_runs import two_ranks

PROGRAM = """
import sys, time, torch
from plait.comm import AlgorithmReduce, connect
group = connect().group
sums = AlgorithmReduce("ring", group)
if group.rank == 1:
    started = [sums.start_sum(torch.ones(1_000_000), scatter=True) for _ in range(3)]
    time.sleep(0.5)
    raise ValueError("of its own")
sys.stdin.read()
for _ in sums.start_sum(torch.ones(1_000_000), scatter=True, label="a unit").into(torch.empty(500_000)):
    pass
"""


def test_a_rank_that_fails_does_not_wait_for_the_sums_that_it_has_started(tmp_path: Path) -> None:
    with two_ranks(PROGRAM, tmp_path / "meet") as ranks:
        _, printed = ranks[1].communicate(timeout=60)  # while rank 0 takes part in nothing
        assert ranks[1].returncode == 1
        assert "ValueError: of its own" in printed
        assert "terminate" not in printed
        _, stderr = ranks[0].communicate("", timeout=60)
        assert "of a unit failed: rank 1 is gone" in stderr
