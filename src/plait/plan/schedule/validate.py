"""Proves that a schedule can run, and says what it needs: by running it without time.

[Note: why happens-before is all that can deadlock]

The executor computes each rank's actions in their order. What a stage hands to another rank goes through a
channel of its pair of ranks and its kind, activations or gradients, first in, first out. A send never holds
up its rank. A receive is posted when its action is next, at the latest, after those of all earlier messages
of its channel, each into a buffer of its own; a message travels only then. So a message arrives as soon as
its sender has computed it and its receiver asks for it: what the receiver asks for by then never waits for a
buffer, if it has as many as `ScheduleNeeds.buffers` says. What is left to wait for is that the sender computes it,
which is the order that `run_untimed` follows.

Which action waits for which, and an order in which they can all run.

The letter for a schedule that cannot be: with its grid, and the cell where it goes wrong marked.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from plait.errors import ScheduleError
from plait.plan.schedule.action import Action, B, F, Kind, Schedule, W

_COLUMNS = 5  # shown on either side of the marked cell
_ROWS = 4


def cell_error(
    schedule: Schedule,
    rank: int,
    position: int,
    fact: str,
    *,
    given: str = "",
    expected: str | None = None,
    hint: str | None = None,
) -> ScheduleError:
    """An error that marks one cell. `given` says more about it than where it is."""
    actions = schedule.ranks[rank]
    what = f"{actions[position]} " if position < len(actions) else ""
    where = f"{what}at position {position} of rank {rank}, counted from 0"
    grid = marked_grid(schedule, rank, position)
    return ScheduleError(
        fact,
        given="\n".join((f"{where}: {given}" if given else where, *(f"    {line}" for line in grid))),
        expected=expected,
        hint=hint,
    )


def marked_grid(schedule: Schedule, rank: int, position: int) -> list[str]:
    """A line for every rank around a cell, a column for every position around it; the cell as `>F1.2<`."""
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
    """What must have ended before an action begins, beside its rank's earlier ones. Its own stage's first."""
    kind, stage, micro = action
    if kind is Kind.F:
        return (F(stage - 1, micro),) if stage else ()
    if kind is Kind.W:
        return (B(stage, micro),)
    own = F(stage, micro)
    return (own, B(stage + 1, micro)) if stage < num_stages - 1 else (own,)


@dataclass(frozen=True)
class UntimedRun:
    """A run of a schedule without time.

    order   (rank, action) of all that can run, each after what it needs
    stuck   where that is not all: a rank's position in its list, and what the action there waits for in vain
    """

    order: tuple[tuple[int, Action], ...]
    stuck: dict[int, tuple[int, Action]]


def run_untimed(schedule: Schedule) -> UntimedRun:
    """Every rank computes in its list's order, and waits where it has to: in time linear in the actions."""
    num_stages = schedule.num_stages
    position = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    awake = list(reversed(range(schedule.num_ranks)))
    while awake:
        rank = awake.pop()
        actions = schedule.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((need for need in dependencies(action, num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append((rank, action))
            position[rank] += 1
            awake += waiting.pop(action, ())
    stuck = {rank: (position[rank], need) for need, ranks in waiting.items() for rank in ranks}
    return UntimedRun(tuple(order), stuck)


def live_activations(
    schedule: Schedule, actions: Iterable[Action], sizes: Sequence[float]
) -> Iterator[float]:
    """What the saved activations of some actions, in their order, amount to during each of them.

    sizes    of one micro-batch's activations, by stage

    They are there from a forward's start until what uses them last has ended: the backward, or its weights'
    half. Forwards that no backward follows keep nothing after themselves.
    """
    now, last = 0.0, Kind.B if schedule.trains else Kind.F
    for kind, stage, micro in actions:
        if kind is Kind.F:
            now += sizes[stage]
        yield now
        if kind is Kind.W or (kind is last and (stage, micro) not in schedule.split):
            now -= sizes[stage]


@dataclass(frozen=True)
class ScheduleNeeds:
    """What a schedule that can run needs.

    in_flight         by rank: the most (stage, micro-batch) whose activations it holds at once, which it does
                      from the forward's start until the whole backward, or its weights' half, has ended
    stage_in_flight   the same, by stage: micro-batches
    buffers           by rank: the most messages received, or waited for, that no action has used yet. More
                      than one or two where a channel's order is not that of their use
    """

    in_flight: tuple[int, ...]
    stage_in_flight: tuple[int, ...]
    buffers: tuple[int, ...]


def check(schedule: Schedule, *, bounds: Sequence[int] | None = None) -> ScheduleNeeds:
    """Raises ScheduleError for a schedule that cannot run, or holds more than `bounds` says, by rank.

    Every stage is on one rank; every stage computes every micro-batch's forward once, and where the schedule
    trains its backward once and the weights' half at most once; no action waits for itself.
    """
    _check_ranks(schedule, bounds)
    _check_stage_ranks(schedule)
    _check_once(schedule)
    _check_complete(schedule)
    run = run_untimed(schedule)
    if run.stuck:
        raise _deadlock(schedule, run)
    ones = [1] * schedule.num_stages
    amounts = [list(live_activations(schedule, actions, ones)) for actions in schedule.ranks]
    for rank, bound in enumerate(bounds or ()):
        over = next((at for at, amount in enumerate(amounts[rank]) if amount > bound), None)
        if over is not None:
            raise cell_error(
                schedule,
                rank,
                over,
                f"rank {rank} holds the activations of more than it may",
                given=f"{int(amounts[rank][over])} forwards whose backward has not ended",
                expected=f"at most {bound}",
            )
    return ScheduleNeeds(
        tuple(int(max(amount)) for amount in amounts),
        _stage_in_flight(schedule),
        _buffers(schedule),
    )


def _check_ranks(schedule: Schedule, bounds: Sequence[int] | None) -> None:
    if not schedule.ranks:
        raise ScheduleError("the schedule has no ranks", given="nothing", expected="rank 0: F0.0 ...")
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise cell_error(
                schedule, rank, 0, f"rank {rank} has nothing to do", expected="a stage on every rank"
            )
    if bounds is not None and len(bounds) != schedule.num_ranks:
        raise ScheduleError(
            "bounds are not as many as ranks",
            given=str(list(bounds)),
            expected=f"{schedule.num_ranks} numbers",
        )


def _check_stage_ranks(schedule: Schedule) -> None:
    """Every stage is on one rank: on the one that has most of it, if there are several."""
    counts = Counter((action.stage, rank) for rank, action in schedule)
    home: dict[int, int] = {}
    for (stage, rank), count in counts.items():
        if stage not in home or count > counts[stage, home[stage]]:
            home[stage] = rank
    if len(counts) == len(home):
        return
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if home[action.stage] != rank:
                raise cell_error(
                    schedule,
                    rank,
                    position,
                    f"stage {action.stage} is on two ranks",
                    expected=f"all of its actions on one rank, as on rank {home[action.stage]}",
                )


def _check_once(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        first: dict[Action, int] = {}
        for position, action in enumerate(actions):
            if first.setdefault(action, position) != position:
                raise cell_error(
                    schedule,
                    rank,
                    position,
                    f"{action} is there twice",
                    expected=f"it once; the first is at position {first[action]}",
                )


def _check_complete(schedule: Schedule) -> None:
    """Every forward and, if the schedule trains, every backward is there. `W` are as the schedule likes."""
    there = {action for _, action in schedule}
    for kind in (Kind.F, Kind.B) if schedule.trains else (Kind.F,):
        num = sum(action.kind is kind for action in there)
        if num == schedule.num_stages * schedule.num_micros:
            continue
        pairs = ((s, m) for s in range(schedule.num_stages) for m in range(schedule.num_micros))
        lost = next(lost for pair in pairs if (lost := Action(kind, *pair)) not in there)
        rank, position = _closest_cell(schedule, lost)
        raise cell_error(
            schedule,
            rank,
            position,
            f"{lost} is missing",
            expected=f"stages 0 to {schedule.num_stages - 1} each with micro-batches 0 to "
            f"{schedule.num_micros - 1}",
        )


def _closest_cell(schedule: Schedule, lost: Action) -> tuple[int, int]:
    """The cell (rank, position) that most shows that an action is missing: what needs it, or is its like."""
    kind, stage, micro = lost
    after = F(stage + 1, micro) if kind is Kind.F else B(stage - 1, micro)
    told = (B(stage, micro), after, W(stage, micro), F(stage, micro))
    cells = [(rank, at) for rank, row in enumerate(schedule.ranks) for at in range(len(row))]

    def distance(cell: tuple[int, int]) -> tuple[int, bool, bool]:
        action = schedule.ranks[cell[0]][cell[1]]
        close = told.index(action) if action in told else len(told)
        return close, action.stage != stage, action.micro != micro

    return min(cells, key=distance)


def _deadlock(schedule: Schedule, run: UntimedRun) -> ScheduleError:
    """Follows who waits for whom until it comes back to a rank."""
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
        return cell_error(
            schedule,
            cycle[0],
            position,
            f"{schedule.ranks[cycle[0]][position]} comes before what it needs",
            expected=f"{need} first, which its rank computes later",
        )
    at = {rank: schedule.ranks[rank][run.stuck[rank][0]] for rank in cycle}
    waits = [
        f"at {at[rank]} waits for {run.stuck[rank][1]} of rank {to}"
        for rank, to in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    return cell_error(
        schedule,
        cycle[0],
        position,
        "the ranks wait for each other, and none goes on",
        given=f"rank {cycle[0]} " + ", which ".join(waits),
        expected="an order in which every action comes after what it needs",
    )


def _stage_in_flight(schedule: Schedule) -> tuple[int, ...]:
    stages: list[list[Action]] = [[] for _ in range(schedule.num_stages)]
    for _, action in schedule:
        stages[action.stage].append(action)
    ones = [1] * schedule.num_stages
    return tuple(int(max(live_activations(schedule, actions, ones))) for actions in stages)


def _buffers(schedule: Schedule) -> tuple[int, ...]:
    """By rank: the most messages posted that no action has used, if receives are posted as late as can be."""
    # A message is named by the action that uses it. Channels are (from, to, kind), in the senders' order.
    sent: Counter[tuple[int, int, Kind]] = Counter()
    place: dict[Action, tuple[tuple[int, int, Kind], int]] = {}
    for rank, action in schedule:
        kind, stage, micro = action
        if kind is Kind.W:
            continue
        user = Action(kind, stage + 1 if kind is Kind.F else stage - 1, micro)
        to = schedule.rank_of.get(user.stage, rank)
        if to != rank:
            place[user] = ((rank, to, kind), sent[rank, to, kind])
            sent[rank, to, kind] += 1
    most = [0] * schedule.num_ranks
    now = [0] * schedule.num_ranks
    posted = dict.fromkeys(sent, 0)
    for rank, action in schedule:
        if action in place:
            channel, index = place[action]
            more = max(0, index + 1 - posted[channel])
            posted[channel] += more
            now[rank] += more
            most[rank] = max(most[rank], now[rank])
            now[rank] -= 1
    return tuple(most)
