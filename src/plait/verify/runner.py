"""Local ranks that verify one plan after another: started once, told by the first of them what comes next.

[Note: how ranks agree on what comes next]
Plans have different numbers of ranks. The first rank takes part in all of them, so it leads: it writes a
file for each plan, which the others wait for, and those that the plan has join a world of their own, through
a file of its own, and leave it afterwards. Nothing of one plan is left for the next: groups,
shared memory, or an engine. The first rank alone decides whether simpler plans follow on one that differs.

A rank that fails ends, and its launcher ends the others. Whoever started them finds which plan was under way
and what was said, and starts new ranks for those that are left.
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
from plait.comm.world import RENDEZVOUS_FILE
from plait.errors import CommError, PlaitError
from plait.fileio import write_json
from plait.plan import Plan
from plait.verify.result import Outcome, Verdict
from plait.verify.sweep import simpler_plans
from plait.verify.worker import Case, Verifier

_POLL_S = 0.01
_ASKED_TO_END = {128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
_JOBS, _OVER = "jobs.json", "over"


@dataclass(frozen=True)
class WorkerOptions:
    """What ranks are, and what is done with a plan that differs: `blame`, simpler ones are tried too."""

    device: str = "cpu"
    transport: str = "auto"
    timeout_s: float = 600.0
    blame: bool = True


def verify(jobs: Sequence[Case], folder: Path, how: WorkerOptions | None = None) -> list[Verdict]:
    """The verdict of each job, on local ranks that this starts; `folder` is an empty one to meet in.

    Raises SystemExit with the shell's code where a signal ended the ranks.
    """
    found: dict[int, Verdict] = {}
    for start in range(len(jobs) + 1):  # each start reaches a verdict at least, or we would start for ever
        left = [number for number in range(len(jobs)) if number not in found]
        if not left:
            break
        room = folder / f"start-{start}"
        room.mkdir()
        told = {"how": asdict(how or WorkerOptions()), "jobs": {n: jobs[n].to_values() for n in left}}
        write_json(room / _JOBS, told)
        most = max(jobs[number].num_ranks for number in left)
        code = launch_local(most, ["verify-rank", str(room)])
        fresh = {number: _read(room, number) for number in left if _verdict(room, number).exists()}
        if code in _ASKED_TO_END:
            raise SystemExit(code)
        at = next((number for number in left if number not in fresh), None)
        if code and at is not None:
            fresh[at] = _of_the_dead(jobs[at], room, code)
        found |= fresh
    return [found[number] for number in range(len(jobs))]


def serve(room: Path, say: Callable[[Verdict], None] | None = None) -> None:
    """One rank, until there is nothing left to verify."""
    rank = int(os.environ["RANK"])
    told: dict[str, Any] = json.loads((room / _JOBS).read_text(encoding="utf-8"))
    how = WorkerOptions(**told["how"])
    work = _Work(room, rank, how)
    if rank:
        work.follow()
        return
    for number, values in told["jobs"].items():
        job = Case.from_values(values)
        verdict = work.lead(job)
        # Before simpler plans are tried: what becomes of those is no verdict of this one.
        write_json(_verdict(room, int(number)), verdict.to_values())
        if verdict.outcome is Outcome.DIFFERS and how.blame:
            parts = simpler_plans(Plan.parse(job.plan))
            right = [part for part, plan in parts.items() if work.is_same(replace(job, plan=str(plan)))]
            verdict = replace(verdict, suspects=tuple(right))
            write_json(_verdict(room, int(number)), verdict.to_values())
        if say is not None:
            say(verdict)
    (room / _OVER).touch()


class _Work:
    """Of one rank: worlds one after the other."""

    def __init__(self, room: Path, rank: int, how: WorkerOptions) -> None:
        self._room, self._rank, self._how = room, rank, how
        self._number = 0
        self._verifier = Verifier()

    def lead(self, job: Case) -> Verdict:
        write_json(self._room / f"job-{self._number}.json", job.to_values())
        verdict = self._run(job)
        assert verdict is not None, "the first rank is told no verdict"
        return verdict

    def is_same(self, job: Case) -> bool:
        return self.lead(job).outcome is Outcome.SAME

    def follow(self) -> None:
        while True:
            told = self._room / f"job-{self._number}.json"
            while not told.exists():
                if (self._room / _OVER).exists():
                    return
                time.sleep(_POLL_S)
            self._run(Case.from_values(json.loads(told.read_text(encoding="utf-8"))))

    def _run(self, job: Case) -> Verdict | None:
        """The verdict, on the first rank."""
        number, self._number = self._number, self._number + 1
        if self._rank >= job.num_ranks:
            return None
        os.environ["WORLD_SIZE"] = str(job.num_ranks)
        os.environ[RENDEZVOUS_FILE] = str(self._room / f"meet-{number}")
        files = self._room / f"files-{number}-{self._rank}"
        files.mkdir()
        try:
            how = self._how
            world = connect(timeout_s=how.timeout_s, device=how.device, transport=how.transport)
            verdict = self._verifier.run(job, world, files)
        except Exception as error:
            is_letter = isinstance(error, PlaitError)
            said = error.message() if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
            values = {"said": said, "is_letter": is_letter, "is_echo": isinstance(error, CommError)}
            write_json(self._room / f"letter-{self._rank}.json", values)
            raise  # a rank that fails ends; closing the world would wait for the others, who wait for it
        world.close()
        gc.collect()  # an engine is a circle of hooks: its memory goes with it
        return verdict


def _verdict(room: Path, number: int) -> Path:
    return room / f"verdict-{number}.json"


def _read(room: Path, number: int) -> Verdict:
    return Verdict.from_values(json.loads(_verdict(room, number).read_text(encoding="utf-8")))


def _of_the_dead(job: Case, room: Path, code: int) -> Verdict:
    """What is to be said of ranks that have ended: the letter of the first that had one of its own."""
    letters = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(room.glob("letter-*.json"))]
    letters.sort(key=lambda found: bool(found["is_echo"]))
    if not letters:
        return job.verdict(Outcome.DIED, message=f"a rank ended with code {code}")
    first = letters[0]
    outcome = Outcome.REFUSED if first["is_letter"] and not first["is_echo"] else Outcome.DIED
    return job.verdict(outcome, message=first["said"])
