"""Schedules by name. Each is a function of a rank and the pipeline's sizes.

Stages are assigned to ranks in a loop: stage s is on rank s % ranks, and the c-th stage (chunk) of a rank is
c * ranks + rank.

[Note: group sizes in interleaved schedules]
In a loop, a micro-batch returns to its rank for the next chunk after the time of `ranks` forwards: with
smaller groups the rank would wait, chunk by chunk. A smaller last group would be slower than 1F1B for some
numbers, and deadlock for others. So if micro-batches are not a multiple of the ranks, there are fewer and
larger groups. The price is memory: with groups of G, a rank holds min(2(ranks - 1 - rank) + (chunks - 1) G +
1, chunks x micros) activations. The larger groups come first, because what is in flight from the start has to
last through all of them.

Zero-bubble schedules split backwards: the input gradient at once, the weight gradients when the rank would
wait.

[Note: V-shaped placement]
`zbv` and `dualpipev` fold the pipeline: rank r has stages r and 2 ranks - 1 - r, its chunks 0 and 1. So
the last stage is on the first rank, together with the first stage. All ranks then hold the same amount, and
on every rank a micro-batch's second forward is close to its first backward. Both are written as phases: a
sequence of words, repeated a number of times. A word is an action and its chunk (`F0`, `B1`, `W0`; `W` for
the oldest pending weight gradient, `D` for an unsplit backward). Each word takes the next micro-batch of its
kind and chunk.

The phases need 2 ranks - 1 micro-batches. For fewer they are generated for that many, and actions of missing
micro-batches are dropped: an order that is valid for all is valid for a subset.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from plait.errors import PlanError, ScheduleError, unknown_key_hint
from plait.plan.schedule.action import MAX_ACTIONS, Action, B, F, Schedule, W, too_large


def zb_h1(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """ZB-H1: 1F1B in which backwards reach the first rank sooner and weight gradients fill the drain.

    Qi et al. 2401.10241, section 2. Rank r runs its weight gradients r micro-batches after its backwards:
    every rank holds as much as 1F1B's first rank, no more. The bubble is a third of 1F1B's if F, B and W take
    the same time.
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
    """ZB-V: no idle time between a rank's first and last action, in 1F1B's memory, if F, B and W take the
    same time.

    Qi et al. 2401.10241, section 6. With fewer than 2 ranks - 1 micro-batches there is some idle time.
    """
    assert chunks == 2, chunks
    num = max(micros, 2 * ranks - 1)
    phases = (
        (2 * (ranks - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (ranks - rank, "F1 B1 W1"),
        (num - 2 * ranks + rank + 1, "F0 B0 W0 F1 B1 W1"),
        (ranks - rank - 1, "B0 W0 F1 B1 W1"),
        (rank, "B0 B1"),
        (ranks - rank, "B0 W"),
        (2 * rank, "W"),
    )
    return _expand(phases, rank, ranks, micros)


def dualpipev(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """DualPipeV: half of DualPipe, with forwards of one chunk alternating with backwards of the other.

    DeepSeek-V3, 2412.19437, section 3.2.1, and Sea AI's halved version. DualPipe runs a forward and a
    backward together, to overlap their communication; here they run one after the other.
    """
    assert chunks == 2, chunks
    num = max(micros, 2 * ranks - 1)
    late = ranks - rank - 1
    phases = (
        (2 * late, "F0"),
        (rank + 1, "F0 F1"),
        (late, "B1 W1 F1"),
        (num - 2 * ranks + rank + 1, "F0 D1 F1 D0"),
        (late, "D1 F1 D0"),
        ((rank + 1) // 2, "D1 D0"),
        ((rank + 1) % 2, "D1 B0"),
        ((rank + 1) // 2, "B1 B0"),
        (late, "W B0"),
        (rank + 1, "W"),
    )
    return _expand(phases, rank, ranks, micros)


def _expand(phases: Iterable[tuple[int, str]], rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of phases, without those of missing micro-batches. See [Note: V-shaped placement]."""
    stages = (rank, 2 * ranks - 1 - rank)
    next_micro: dict[str, int] = {}
    pending: deque[Action] = deque()  # pending weight gradients, oldest first
    actions: list[Action] = []
    for times, words in phases:
        for word in words.split() * times:
            if word[0] == "W":
                weights = next(w for w in pending if word == "W" or w.stage == stages[int(word[1])])
                pending.remove(weights)
                actions.append(weights)
                continue
            stage = stages[int(word[1])]
            key = word.replace("D", "B")
            micro = next_micro[key] = next_micro.get(key, -1) + 1
            actions.append((F if word[0] == "F" else B)(stage, micro))
            if word[0] == "B":
                pending.append(W(stage, micro))
    assert not pending, f"phases leave {len(pending)} weight gradients"
    return [action for action in actions if action.micro < micros]


# (rank, ranks, micro-batches, chunks) -> the rank's actions
Make = Callable[[int, int, int, int], list[Action]]


@dataclass(frozen=True)
class Generator:
    """How a schedule is generated.

    chunks   default number of stages per rank
    varies   whether another number is possible
    trains   whether there are backwards
    splits   whether some backwards are split into B and W
    """

    make: Make
    chunks: int = 1
    varies: bool = True
    trains: bool = True
    splits: bool = False

    def chunks_for(self, name: str, chunks: int) -> int:
        """The requested number of stages per rank, or the default for 0. Raises ScheduleError if it is not
        possible."""
        if chunks not in (0, self.chunks) and not self.varies:
            raise ScheduleError(
                "this schedule has a fixed number of stages per rank",
                given=f"schedule={name} chunks={chunks}",
                expected=f"{self.chunks} {'stage' if self.chunks == 1 else 'stages'} per rank",
                hint=f"schedule=interleaved chunks={chunks}",
            )
        return chunks or self.chunks


def make_schedule(name: str, ranks: int, micros: int, chunks: int = 0) -> Schedule:
    """Generate a schedule by name; `chunks` stages per rank, 0 for the default.

    Raises ScheduleError for a name that is not in GENERATORS and for impossible numbers.
    """
    if name not in GENERATORS:
        raise ScheduleError(
            "unknown schedule",
            given=f"schedule={name}",
            expected=", ".join(GENERATORS),
            hint=unknown_key_hint(name, GENERATORS),
        )
    for key, value, least in (("ranks", ranks, 1), ("micros", micros, 1), ("chunks", chunks, 0)):
        if value < least:
            raise ScheduleError(
                f"a schedule cannot have {value} {key}",
                given=f"{key}={value}",
                expected=f"an integer, {least} or more",
                hint=f"{key}={max(least, 1)}",
            )
    generator = GENERATORS[name]
    chunks = generator.chunks_for(name, chunks)
    is_v_shaped = generator.chunks == 2 and not generator.varies
    generated = max(micros, 2 * ranks - 1) if is_v_shaped else micros  # see [Note: V-shaped placement]
    if ranks * chunks * generated > MAX_ACTIONS:
        raise too_large(name, f"{ranks} ranks, {micros} micro-batches, chunks={chunks}")
    return Schedule.from_actions(name, (generator.make(rank, ranks, micros, chunks) for rank in range(ranks)))


def inference(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Forwards only: all micro-batches of a stage, then of the rank's next stage."""
    return [F(chunk * ranks + rank, micro) for chunk in range(chunks) for micro in range(micros)]


def breadth_first(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """All forwards, then all backwards, stage by stage (Lamy-Poirier 2211.05953); GPipe for one chunk.

    One all-gather of a stage's parameters can serve all micro-batches, which are all in flight.
    """
    stages = [chunk * ranks + rank for chunk in reversed(range(chunks))]
    backwards = [B(stage, micro) for stage in stages for micro in range(micros)]
    return inference(rank, ranks, micros, chunks) + backwards


def one_f_one_b(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Fill the pipeline, alternate, drain (PipeDream-flush, Narayanan et al. 2006.09503)."""
    if chunks > 1:
        return interleaved(rank, ranks, micros, chunks)
    return _alternate(
        [F(rank, micro) for micro in range(micros)],
        [B(rank, micro) for micro in range(micros)],
        warmup=ranks - rank - 1,
    )


def interleaved(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """1F1B over several chunks, with shorter fill and drain (Narayanan et al. 2104.04473, section 2.2).

    Micro-batches pass through all chunks in groups of at least `ranks`. See [Note: group sizes in interleaved
    schedules].
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
    """Split micro-batches into groups of at least `least` (if there are that many), the larger ones first."""
    num = max(1, micros // least)
    each, more = divmod(micros, num)
    starts = [group * each + min(group, more) for group in range(num + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """The warm-up forwards, then a forward and a backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for turn in pairs for action in turn]
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


def compile_conflict(schedule: str) -> PlanError:
    """The error for compile=true with a schedule that splits backwards."""
    return PlanError(
        "a compiled block's backward cannot be split",
        given=f"compile=true {schedule}, which has separate weight-gradient actions (W)",
        expected="a schedule with unsplit backwards",
        hint="compile=false, or schedule=1f1b",
    )
