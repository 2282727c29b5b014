"""Validate a schedule and compute what it needs, by running it without timing.

[Note: deadlock by happens-before]
The executor computes each rank's actions in order. What a stage sends to another rank goes through a FIFO
channel per pair of ranks and kind, activations or gradients. A send never blocks its rank. A receive is
posted at the latest when its action is next, after those of all earlier messages of its channel, each into
its own buffer; a message is transferred only then. So a message arrives as soon as its sender has computed it
and its receiver has posted it: with as many buffers as `ScheduleNeeds.buffers`, receives never wait for a
buffer. The only remaining wait is for the sender's computation, which is the order that `run_untimed`
follows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from plait.errors import ScheduleError
from plait.plan.schedule.action import FORWARD, WEIGHT, Action, B, F, Kind, Schedule, W

_COLUMNS = 5  # shown on either side of the marked cell
_ROWS = 4


def _cell_error(
    schedule: Schedule, rank: int, position: int, fact: str, *, given: str = "", expected: str | None = None
) -> ScheduleError:
    """An error that marks one cell of the grid. `given` adds details to the position."""
    actions = schedule.ranks[rank]
    action = f"{actions[position]} " if position < len(actions) else ""
    where = f"{action}at position {position} of rank {rank}, counted from 0"
    grid = _marked_grid(schedule, rank, position)
    return ScheduleError(
        fact,
        given="\n".join((f"{where}: {given}" if given else where, *grid)),
        expected=expected,
        hint="move, add or remove the marked action; plait schedule file:PATH checks the file",
    )


def _marked_grid(schedule: Schedule, rank: int, position: int) -> list[str]:
    """Lines of the ranks around a cell, with the positions around it as columns; the cell as `>F1.2<`."""
    first, stop = max(0, position - _COLUMNS), position + _COLUMNS + 1
    rows = range(max(0, rank - _ROWS), min(schedule.num_ranks, rank + _ROWS + 1))
    cells = [[str(action) for action in schedule.ranks[row][first:stop]] for row in rows]
    if position >= len(schedule.ranks[rank]):
        cells[rank - rows[0]].append("")
    width = max((len(cell) for row in cells for cell in row), default=0) + 2
    label = len(str(rows[-1]))
    lines = []
    for row, texts in zip(rows, cells, strict=True):
        marks = [row == rank and first + i == position for i in range(len(texts))]
        shown = [(f">{t}<" if mark else f" {t} ").ljust(width) for t, mark in zip(texts, marks, strict=True)]
        more = ("... " if first else "", "..." if len(schedule.ranks[row]) > stop else "")
        lines.append(f"rank {row:>{label}}: {more[0]}{''.join(shown)}{more[1]}".rstrip())
    above, below = ["..."] * (rows[0] > 0), ["..."] * (rows[-1] < schedule.num_ranks - 1)
    return [*above, *lines, *below]


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that must have ended before an action starts, besides its rank's earlier ones. Its own
    stage's first."""
    kind, stage, micro = action
    if kind is FORWARD:
        return (F(stage - 1, micro),) if stage else ()
    if kind is WEIGHT:
        return (B(stage, micro),)
    own = F(stage, micro)
    return (own, B(stage + 1, micro)) if stage < num_stages - 1 else (own,)


@dataclass(frozen=True)
class UntimedRun:
    """A run of a schedule without timing.

    order   (rank, action) of all that can run, each after its dependencies
    stuck   for each blocked rank, its position and the action that it waits for
    """

    order: tuple[tuple[int, Action], ...]
    stuck: dict[int, tuple[int, Action]]


def run_untimed(schedule: Schedule) -> UntimedRun:
    """Run every rank in order, blocking on dependencies: in time linear in the actions."""
    num_stages = schedule.num_stages
    position = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    awake = list(reversed(range(schedule.num_ranks)))
    while awake:
        rank = awake.pop()
        for action in islice(schedule.ranks[rank], position[rank], None):
            for need in dependencies(action, num_stages):
                if need not in done:
                    break
            else:
                done.add(action)
                order.append((rank, action))
                position[rank] += 1
                awake += waiting.pop(action, ())
                continue
            waiting.setdefault(need, []).append(rank)
            break
    stuck = {rank: (position[rank], need) for need, ranks in waiting.items() for rank in ranks}
    return UntimedRun(tuple(order), stuck)


def peak_activation_bytes(
    schedule: Schedule, rank: int, kept: Mapping[int, tuple[int, int] | None]
) -> int | None:
    """Peak bytes over a rank's actions. `kept`: for each of its stages, what one micro-batch keeps from its
    forward to its backward, and from there to the weight-gradient part; None if unknown. Forwards without a
    backward keep nothing."""
    peak = now = 0
    for kind, stage, micro in schedule.ranks[rank]:
        of_stage = kept[stage]
        if of_stage is None:
            return None
        saved, deferred = of_stage
        if kind is Kind.F:
            now = saved + (now if schedule.trains else 0)
        elif kind is Kind.B:
            now += (deferred if (stage, micro) in schedule.split else 0) - saved
        else:
            now -= deferred
        peak = max(peak, now)
    return peak


@dataclass(frozen=True)
class ScheduleNeeds:
    """Resources that a valid schedule needs, by rank.

    in_flight   peak number of (stage, micro-batch) whose activations are live, from the forward's start to
                the end of the backward, or its weight-gradient part
    buffers     peak number of messages received or posted and not yet used. More than one or two if a
                channel's order differs from the order of use
    """

    in_flight: tuple[int, ...]
    buffers: tuple[int, ...]


def check(schedule: Schedule) -> ScheduleNeeds:
    """Raise ScheduleError for a schedule that cannot run.

    Every stage is on one rank; every stage runs every micro-batch's forward once, and if the schedule trains
    its backward once and the weight-gradient part at most once; no action waits for itself.
    """
    if not schedule.ranks:
        raise ScheduleError(
            "the schedule has no ranks",
            given="no lines",
            expected="rank 0: F0.0 ...",
            hint="plait schedule 1f1b --pp 4 --micro 8 --csv FILE writes an example",
        )
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            fact = f"rank {rank} has no actions"
            raise _cell_error(schedule, rank, 0, fact, expected="a stage on every rank")
    _check_stage_ranks(schedule)
    _check_once(schedule)
    _check_complete(schedule)
    run = run_untimed(schedule)
    if run.stuck:
        raise _deadlock(schedule, run)
    ones = dict.fromkeys(range(schedule.num_stages), (1, 1))
    peaks = (peak_activation_bytes(schedule, rank, ones) for rank in range(schedule.num_ranks))
    return ScheduleNeeds(tuple(peak or 0 for peak in peaks), _buffers(schedule))


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, position, action)."""
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            yield rank, position, action


def _check_stage_ranks(schedule: Schedule) -> None:
    """Check that every stage is on one rank; mark the rank with fewer of its actions otherwise."""
    counts = Counter((action.stage, rank) for rank, action in schedule)
    home: dict[int, int] = {}
    for (stage, rank), count in counts.items():
        if stage not in home or count > counts[stage, home[stage]]:
            home[stage] = rank
    for rank, position, action in _cells(schedule) if len(counts) > len(home) else ():
        if home[action.stage] != rank:
            fact = f"stage {action.stage} is on two ranks"
            expected = f"all of its actions on one rank, such as rank {home[action.stage]}"
            raise _cell_error(schedule, rank, position, fact, expected=expected)


def _check_once(schedule: Schedule) -> None:
    first: dict[Action, int] = {}  # on one rank, as all actions of its stage
    for rank, position, action in _cells(schedule):
        if first.setdefault(action, position) != position:
            expected = f"once; the first is at position {first[action]}"
            raise _cell_error(schedule, rank, position, f"{action} appears twice", expected=expected)


def _check_complete(schedule: Schedule) -> None:
    """Check that every forward and, if the schedule trains, every backward exists. `W` is optional."""
    present = {action for _, action in schedule}
    stages, micros = schedule.num_stages, schedule.num_micros
    for kind in (Kind.F, Kind.B) if schedule.trains else (Kind.F,):
        if sum(action.kind is kind for action in present) == stages * micros:
            continue
        pairs = ((stage, micro) for stage in range(stages) for micro in range(micros))  # may be billions
        missing = next(action for pair in pairs if (action := Action(kind, *pair)) not in present)
        expected = f"stages 0 to {stages - 1} each with micro-batches 0 to {micros - 1}"
        cell = _closest_cell(schedule, missing)
        raise _cell_error(schedule, *cell, f"{missing} is missing", expected=expected)


def _closest_cell(schedule: Schedule, missing: Action) -> tuple[int, int]:
    """The cell (rank, position) to mark for a missing action: an action that depends on it or is most like
    it."""
    kind, stage, micro = missing
    after = F(stage + 1, micro) if kind is Kind.F else B(stage - 1, micro)
    related = (B(stage, micro), after, W(stage, micro), F(stage, micro))

    def distance(cell: tuple[int, int, Action]) -> tuple[int, bool, bool]:
        action = cell[2]
        close = related.index(action) if action in related else len(related)
        return close, action.stage != stage, action.micro != micro

    rank, position, _ = min(_cells(schedule), key=distance)
    return rank, position


def _deadlock(schedule: Schedule, run: UntimedRun) -> ScheduleError:
    """Follow the waits from rank to rank to a cycle."""
    rank = min(run.stuck)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = schedule.rank_of[run.stuck[rank][1].stage]
    cycle = path[path.index(rank) :]
    start = cycle.index(min(cycle))
    cycle = cycle[start:] + cycle[:start]
    position, need = run.stuck[cycle[0]]
    if len(cycle) == 1:
        return _cell_error(
            schedule,
            cycle[0],
            position,
            f"{schedule.ranks[cycle[0]][position]} comes before an action it depends on",
            expected=f"{need} first; its rank computes it later",
        )
    at = {rank: schedule.ranks[rank][run.stuck[rank][0]] for rank in cycle}
    waits = [
        f"at {at[rank]} waits for {run.stuck[rank][1]} of rank {to}"
        for rank, to in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    return _cell_error(
        schedule,
        cycle[0],
        position,
        "the ranks wait for each other: deadlock",
        given=f"rank {cycle[0]} " + ", which ".join(waits),
        expected="an order in which every action comes after its dependencies",
    )


def _buffers(schedule: Schedule) -> tuple[int, ...]:
    """By rank: peak number of posted messages not yet used, if receives are posted as late as possible."""
    # A message is named by the action that uses it. Channels are (from, to, kind), in sending order.
    sent: Counter[tuple[int, int, Kind]] = Counter()
    slot: dict[Action, tuple[tuple[int, int, Kind], int]] = {}
    for rank, action in schedule:
        kind, stage, micro = action
        if kind is Kind.W:
            continue
        user = Action(kind, stage + 1 if kind is Kind.F else stage - 1, micro)
        to = schedule.rank_of.get(user.stage, rank)
        if to != rank:
            slot[user] = ((rank, to, kind), sent[rank, to, kind])
            sent[rank, to, kind] += 1
    peak = [0] * schedule.num_ranks
    now = [0] * schedule.num_ranks
    posted = dict.fromkeys(sent, 0)
    for rank, action in schedule:
        if action in slot:
            channel, index = slot[action]
            more = max(0, index + 1 - posted[channel])
            posted[channel] += more
            now[rank] += more
            peak[rank] = max(peak[rank], now[rank])
            now[rank] -= 1
    return tuple(peak)
