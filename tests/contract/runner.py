"""Controller: run cases on a pool of ranks, one after the other; hangs and crashes do not end it."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.expected import RACES
from contract.ranks import Outcome, Variant, list_cases, run_case
from support.pool import Pool, RankError, RankTimeout

LIMIT_S = 90.0  # per case; torch's slowest takes a third of it
TRIES = 3  # for a case that has a race itself
WARNINGS = [("ignore", "", Warning, "", 0)]  # many cases warn; cases about warnings record them


@dataclass(frozen=True)
class Result:
    """Result of a case with a class. `status`: passed, skipped, failed or hung."""

    name: str
    status: str
    text: str  # reason of a skip, or the ranks' tracebacks
    ran_on: str
    num_built: int
    elapsed_s: float


class Runner:
    """Runs cases on `world_size` long-lived ranks; one that dies or hangs is replaced."""

    def __init__(self, world_size: int, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.world_size = world_size
        self._folder = folder
        self._limit_s = limit_s
        self._num_run = 0
        self._pool = Pool(WARNINGS)

    def names(self, word: str = "") -> list[str]:
        """Names of the cases that contain `word`."""
        # On all ranks: torch's module is imported once, and remembers the number of ranks.
        names = self._pool.run(list_cases, self.world_size)[0]
        return [name for name in names if word.lower() in name.lower()]

    def run(self, name: str, variant: Variant) -> Result:
        """Run a case with the class of `variant`."""
        for _ in range(TRIES if name in RACES else 1):
            result = self._run_once(name, variant)
            if result.status != "failed":
                break
        return result

    def _run_once(self, name: str, variant: Variant) -> Result:
        self._num_run += 1
        folder = self._folder / f"case-{self._num_run}"
        begin_s = time.monotonic()
        try:
            outcomes = self._pool.run(
                run_case, self.world_size, name, variant, folder, timeout_s=self._limit_s
            )
        except RankError as error:
            status = "hung" if isinstance(error, RankTimeout) else "failed"
            return Result(name, status, str(error), "", 0, time.monotonic() - begin_s)
        return _combine_outcomes(name, outcomes)

    def close(self) -> None:
        self._pool.close()


@contextmanager
def start_runner(world_size: int, limit_s: float = LIMIT_S) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="plait-contract-") as folder:
        runner = Runner(world_size, Path(folder), limit_s)
        try:
            yield runner
        finally:
            runner.close()


def run_all(
    runner: Runner, names: Sequence[str], variant: Variant, report: Callable[[Result], None] | None = None
) -> list[Result]:
    """Run the cases one after the other. `report` is called with each result."""
    results = []
    for name in names:
        results.append(runner.run(name, variant))
        if report is not None:
            report(results[-1])
    return results


def _combine_outcomes(name: str, outcomes: Sequence[Outcome]) -> Result:
    first = outcomes[0]
    elapsed_s = max(outcome.elapsed_s for outcome in outcomes)
    if any(outcome.status != first.status for outcome in outcomes):
        text = "; ".join(f"rank {rank} {it.status} {it.reason}" for rank, it in enumerate(outcomes))
        return Result(name, "failed", f"ranks disagree: {text}", first.ran_on, first.num_built, elapsed_s)
    return Result(name, first.status, first.reason, first.ran_on, first.num_built, elapsed_s)
