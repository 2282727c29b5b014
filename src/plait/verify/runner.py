"""Start local ranks once and verify plans on them one after another, led by rank 0.

[Note: coordination between plans]
Plans have different numbers of ranks. Rank 0 takes part in all of them, so it leads: it writes a file per
plan, which the other ranks poll for. The ranks of the plan join a world of their own, through its own
rendezvous file, and leave it afterwards. Nothing of one plan is left for the next: no process groups, shared
memory or engine. Rank 0 alone decides whether simpler plans are tried after a mismatch.

A rank that fails exits, and its launcher ends the others. `verify` then finds out which plan was running and
which errors were recorded, and starts new ranks for the remaining plans.
"""

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plait.comm import connect, launch_local
from plait.errors import CommError, PlaitError
from plait.fileio import write_json
from plait.launchers import RENDEZVOUS_FILE
from plait.plan import Plan
from plait.verify.result import Outcome, Verdict
from plait.verify.sweep import simpler_plans
from plait.verify.worker import Case, Verifier

_POLL_S = 0.01
_STOP_CODES = {128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
_JOBS, _DONE = "jobs.json", "done"


@dataclass(frozen=True)
class WorkerOptions:
    """Options of the ranks. `find_suspects`: after a mismatch, also try simpler plans."""

    device: str = "cpu"
    transport: str = "auto"
    timeout_s: float = 600.0
    find_suspects: bool = True


def verify(cases: Sequence[Case], folder: Path, options: WorkerOptions | None = None) -> list[Verdict]:
    """Start local ranks and return the verdict of each case. `folder` is empty, for the ranks' files.

    Raises SystemExit with the shell's exit code if a signal ended the ranks.
    """
    verdicts: dict[int, Verdict] = {}
    for start in range(len(cases) + 1):  # each start yields at least one verdict, so the loop is bounded
        left = [number for number in range(len(cases)) if number not in verdicts]
        if not left:
            break
        work_dir = folder / f"start-{start}"
        work_dir.mkdir()
        jobs = {
            "options": asdict(options or WorkerOptions()),
            "jobs": {n: asdict(cases[n]) for n in left},
        }
        write_json(work_dir / _JOBS, jobs)
        num_ranks = max(cases[number].num_ranks for number in left)
        code = launch_local(num_ranks, ["verify-rank", str(work_dir)])
        files = {number: _verdict_file(work_dir, number) for number in left}
        new = {
            number: Verdict.from_values(json.loads(file.read_text(encoding="utf-8")))
            for number, file in files.items()
            if file.exists()
        }
        if code in _STOP_CODES:
            raise SystemExit(code)
        failed = next((number for number in left if number not in new), None)
        if code and failed is not None:
            new[failed] = _failure(cases[failed], work_dir, code)
        verdicts |= new
    return [verdicts[number] for number in range(len(cases))]


def serve(work_dir: Path, on_verdict: Callable[[Verdict], None] | None = None) -> None:
    """Run one rank until all cases are verified. `on_verdict` is called on rank 0."""
    rank = int(os.environ["RANK"])
    jobs: dict[str, Any] = json.loads((work_dir / _JOBS).read_text(encoding="utf-8"))
    options = WorkerOptions(**jobs["options"])
    worker = _Worker(work_dir, rank, options)
    if rank:
        worker.follow()
        return
    for number, values in jobs["jobs"].items():
        case = Case.from_values(values)
        verdict = worker.lead(case)
        # Written before simpler plans are tried, as these may fail.
        write_json(_verdict_file(work_dir, int(number)), verdict.to_values())
        if verdict.outcome is Outcome.DIFFERS and not verdict.message and options.find_suspects:
            plans = simpler_plans(Plan.parse(case.plan))
            outcomes = {part: worker.lead(replace(case, plan=str(p))).outcome for part, p in plans.items()}
            matching = tuple(part for part, outcome in outcomes.items() if outcome is Outcome.SAME)
            verdict = replace(verdict, suspects=matching)
            write_json(_verdict_file(work_dir, int(number)), verdict.to_values())
        if on_verdict is not None:
            on_verdict(verdict)
    (work_dir / _DONE).touch()


class _Worker:
    """One rank, which joins one world after another."""

    def __init__(self, work_dir: Path, rank: int, options: WorkerOptions) -> None:
        self._work_dir, self._rank, self._options = work_dir, rank, options
        self._number = 0
        self._verifier = Verifier()

    def lead(self, case: Case) -> Verdict:
        write_json(self._work_dir / f"job-{self._number}.json", asdict(case))
        verdict = self._run(case)
        assert verdict is not None, "rank 0 has no verdict"
        return verdict

    def follow(self) -> None:
        while True:
            job = self._work_dir / f"job-{self._number}.json"
            while not job.exists():
                if (self._work_dir / _DONE).exists():
                    return
                time.sleep(_POLL_S)
            self._run(Case.from_values(json.loads(job.read_text(encoding="utf-8"))))

    def _run(self, case: Case) -> Verdict | None:
        """Verify the case with its ranks. Returns the verdict on rank 0."""
        number, self._number = self._number, self._number + 1
        if self._rank >= case.num_ranks:
            return None
        os.environ["WORLD_SIZE"] = str(case.num_ranks)
        os.environ[RENDEZVOUS_FILE] = str(self._work_dir / f"rendezvous-{number}")
        files = self._work_dir / f"files-{number}-{self._rank}"
        files.mkdir()
        try:
            options = self._options
            world = connect(timeout_s=options.timeout_s, device=options.device, transport=options.transport)
            verdict = self._verifier.run(case, world, files)
        except Exception as error:
            is_ours = isinstance(error, PlaitError)
            text = error.message() if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
            kinds = {"is_plait_error": is_ours, "is_comm_error": isinstance(error, CommError)}
            write_json(self._work_dir / f"error-{self._rank}.json", {"message": text, **kinds})
            raise  # exits: closing the world would wait for the other ranks, which wait for this one
        world.close()
        gc.collect()  # an engine's hooks form reference cycles: this frees its memory
        return verdict


def _verdict_file(work_dir: Path, number: int) -> Path:
    return work_dir / f"verdict-{number}.json"


def _failure(case: Case, work_dir: Path, code: int) -> Verdict:
    """Build the verdict of ranks that have exited, from the first error that is not a lost rank."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work_dir.glob("error-*.json"))]
    errors.sort(key=lambda error: bool(error["is_comm_error"]))
    if not errors:
        return case.verdict(Outcome.DIED, message=f"a rank exited with code {code}")
    first = errors[0]
    outcome = Outcome.REFUSED if first["is_plait_error"] and not first["is_comm_error"] else Outcome.DIED
    return case.verdict(outcome, message=first["message"])
