"""Schedules that split backwards: the input's gradient at once, the weights' when the rank would wait.

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
from collections.abc import Iterable

from plait.plan.schedule.action import Action, B, F, W


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
    return _played(phases, rank, ranks, micros)


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
    return _played(phases, rank, ranks, micros)


def _played(phases: Iterable[tuple[int, str]], rank: int, ranks: int, micros: int) -> list[Action]:
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
