"""The schedules that plait knows by name. Each is a function of a rank and the pipeline's numbers.

A rank has several stages in a loop: stage s is on rank s % ranks, and a rank's c-th stage, or chunk, is
c * ranks + rank.

[Note: groups]

In a loop, a micro-batch comes back to its rank for the next chunk when `ranks` forwards' time has gone by: a
group of fewer leaves the rank waiting, chunk by chunk. A last group of what is left over would be slower than
1F1B for some numbers, and deadlock for others. So where micro-batches are no multiple of the ranks, there are
fewer groups and they are larger. The price is memory: with groups of G, a rank holds
min(2(ranks - 1 - rank) + (chunks - 1) G + 1, chunks x micro-batches). The larger groups come first, as what
is in flight from the start has to last through all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from plait.errors import ScheduleError, unknown_key_hint
from plait.plan.schedule.action import Action, B, F, Schedule
from plait.plan.schedule.zero_bubble import dualpipev, zb_h1, zbv

# (rank, ranks, micro-batches, chunks) -> the rank's actions
Make = Callable[[int, int, int, int], list[Action]]


@dataclass(frozen=True)
class Generator:
    """How a schedule is made.

    chunks   stages per rank, if nothing else is asked for
    varies   whether there can be another number of them
    trains   whether there are backwards
    splits   whether some of these are in halves
    """

    make: Make
    chunks: int = 1
    varies: bool = True
    trains: bool = True
    splits: bool = False

    def chunks_for(self, name: str, chunks: int) -> int:
        """What was asked for, or the usual for 0. Raises ScheduleError where that cannot be."""
        if chunks not in (0, self.chunks) and not self.varies:
            raise ScheduleError(
                "this schedule's number of stages on every rank is its own",
                given=f"schedule={name} chunks={chunks}",
                expected=f"{self.chunks} {'stage' if self.chunks == 1 else 'stages'} on every rank",
                hint=f"schedule=interleaved chunks={chunks}",
            )
        return chunks or self.chunks


def make_schedule(name: str, ranks: int, micros: int, chunks: int = 0) -> Schedule:
    """A schedule by its name; `chunks` stages per rank, 0 for what is usual.

    Raises ScheduleError for a name that is not in GENERATORS and for numbers that cannot be.
    """
    if name not in GENERATORS:
        raise ScheduleError(
            "there is no such schedule",
            given=f"schedule={name}",
            expected=", ".join(GENERATORS),
            hint=unknown_key_hint(name, GENERATORS),
        )
    for key, value, least in (("ranks", ranks, 1), ("micros", micros, 1), ("chunks", chunks, 0)):
        if value < least:
            raise ScheduleError(
                f"a schedule cannot have {value} {key}",
                given=f"{key}={value}",
                expected=f"a whole number, {least} or more",
            )
    generator = GENERATORS[name]
    chunks = generator.chunks_for(name, chunks)
    return Schedule.of(name, (generator.make(rank, ranks, micros, chunks) for rank in range(ranks)))


def inference(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Forwards only: each stage all micro-batches, then the rank's next stage."""
    return [F(chunk * ranks + rank, micro) for chunk in range(chunks) for micro in range(micros)]


def breadth_first(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """All forwards, then all backwards, stage by stage (Lamy-Poirier 2211.05953); of one chunk it is GPipe.

    What a stage gathers can serve all micro-batches, which are all in flight.
    """
    stages = [chunk * ranks + rank for chunk in reversed(range(chunks))]
    backwards = [B(stage, micro) for stage in stages for micro in range(micros)]
    return inference(rank, ranks, micros, chunks) + backwards


def one_f_one_b(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Fills the pipe, alternates, drains (PipeDream-flush, Narayanan et al. 2006.09503)."""
    if chunks > 1:
        return interleaved(rank, ranks, micros, chunks)
    return _alternate(
        [F(rank, micro) for micro in range(micros)],
        [B(rank, micro) for micro in range(micros)],
        warmup=ranks - rank - 1,
    )


def interleaved(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """1F1B over several chunks, whose fill and drain are shorter (Narayanan et al. 2104.04473, section 2.2).

    Micro-batches go through all chunks in groups of at least as many as there are ranks. See [Note: groups]
    """
    if chunks == 1:
        return one_f_one_b(rank, ranks, micros, chunks)
    groups = deal(micros, ranks)
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    return _alternate(
        [F(stage, micro) for group in groups for stage in stages for micro in group],
        [B(stage, micro) for group in groups for stage in reversed(stages) for micro in group],
        warmup=2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]),
    )


def deal(micros: int, least: int) -> list[range]:
    """Micro-batches in groups of at least so many (if there are), the larger ones first."""
    num = max(1, micros // least)
    each, more = divmod(micros, num)
    starts = [group * each + min(group, more) for group in range(num + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    turns = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for turn in turns for action in turn]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(breadth_first),
    "1f1b": Generator(one_f_one_b),
    "interleaved": Generator(interleaved, chunks=2),
    "bfs": Generator(breadth_first, chunks=2),
    "zb-h1": Generator(zb_h1, varies=False, splits=True),
    "zbv": Generator(zbv, chunks=2, varies=False, splits=True),
    "dualpipev": Generator(dualpipev, chunks=2, varies=False, splits=True),
    "inference": Generator(inference, trains=False),
}
