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

Schedules that split backwards: the input's gradient at once, the weights' when the rank would wait.

[Note: the V]

`zbv` and `dualpipev` fold the pipeline: rank r has stage r and stage 2 ranks - 1 - r, its chunks 0 and 1. So
the last stage is on the first rank, beside the first stage. All ranks then hold the same, and a micro-batch's
way down and up again meets its own backward on every rank. Both are written as phases: a word says what is
played once, with its chunk (`F0`, `B1`, `W0`; `W` for the oldest weights' half that is left, `D` for a whole
backward), a number how often. Each word takes the next micro-batch of its kind and chunk.

The phases need 2 ranks - 1 micro-batches. For fewer they are made for that many, and the actions of those
that do not exist are left out: an order that was right for all is right for some.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from plait.errors import ScheduleError, unknown_key_hint
from plait.plan.schedule.action import Action, B, F, Schedule, W


def zb_h1(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """1F1B whose backwards reach the first rank sooner, and weights fill the drain.

    Qi et al. 2401.10241, section 2. Rank r is r weights' halves behind its backwards: every rank holds what
    1F1B's first does, and no more. The bubble is a third of 1F1B's if F, B and W take the same time.
    """
    assert chunks == 1, chunks
    fill = min(ranks - rank, micros)
    actions = [F(rank, micro) for micro in range(fill)]
    for micro in range(micros):
        actions.append(B(rank, micro))
        if micro >= rank:
            actions.append(W(rank, micro - rank))
        if fill + micro < micros:
            actions.append(F(rank, fill + micro))
    return actions + [W(rank, micro) for micro in range(max(0, micros - rank), micros)]


def zbv(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """No rank waits between its first action and its last, in 1F1B's memory, if F, B and W are as long.

    ZB-V of Qi et al. 2401.10241, section 6. For fewer than 2 ranks - 1 micro-batches there is some waiting.
    """
    assert chunks == 2, chunks
    many = max(micros, 2 * ranks - 1)
    phases = (
        (2 * (ranks - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (ranks - rank, "F1 B1 W1"),
        (many - 2 * ranks + rank + 1, "F0 B0 W0 F1 B1 W1"),
        (ranks - rank - 1, "B0 W0 F1 B1 W1"),
        (rank, "B0 B1"),
        (ranks - rank, "B0 W"),
        (2 * rank, "W"),
    )
    return _expand(phases, rank, ranks, micros)


def dualpipev(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """DualPipe cut in half: forwards of one chunk beside backwards of the other.

    DeepSeek-V3, 2412.19437, section 3.2.1, and Sea AI's cut of it. Where DualPipe computes a forward and a
    backward as one, to hide their messages, here one follows the other.
    """
    assert chunks == 2, chunks
    many = max(micros, 2 * ranks - 1)
    late = ranks - rank - 1
    phases = (
        (2 * late, "F0"),
        (rank + 1, "F0 F1"),
        (late, "B1 W1 F1"),
        (many - 2 * ranks + rank + 1, "F0 D1 F1 D0"),
        (late, "D1 F1 D0"),
        ((rank + 1) // 2, "D1 D0"),
        ((rank + 1) % 2, "D1 B0"),
        ((rank + 1) // 2, "B1 B0"),
        (late, "W B0"),
        (rank + 1, "W"),
    )
    return _expand(phases, rank, ranks, micros)


def _expand(phases: Iterable[tuple[int, str]], rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of phases, without those of micro-batches that do not exist. See [Note: the V]"""
    stages = (rank, 2 * ranks - 1 - rank)
    next_micro: dict[str, int] = {}
    left: deque[Action] = deque()  # weights' halves, oldest first
    actions: list[Action] = []
    for times, words in phases:
        for word in words.split() * times:
            if word[0] == "W":
                weights = next(w for w in left if word == "W" or w.stage == stages[int(word[1])])
                left.remove(weights)
                actions.append(weights)
                continue
            stage = stages[int(word[1])]
            key = word.replace("D", "B")
            micro = next_micro[key] = next_micro.get(key, -1) + 1
            actions.append((F if word[0] == "F" else B)(stage, micro))
            if word[0] == "B":
                left.append(W(stage, micro))
    assert not left, f"phases leave {len(left)} weights' halves"
    return [action for action in actions if action.micro < micros]


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
    return Schedule.from_actions(name, (generator.make(rank, ranks, micros, chunks) for rank in range(ranks)))


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
    groups = group_micros(micros, ranks)
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    return _alternate(
        [F(stage, micro) for group in groups for stage in stages for micro in group],
        [B(stage, micro) for group in groups for stage in reversed(stages) for micro in group],
        warmup=2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]),
    )


def group_micros(micros: int, least: int) -> list[range]:
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
