"""Who may wait for whom: when reductions have to start so that no ranks wait in a circle.

[Note: nobody waits in a circle]
At stage 3 a rank's backward walks a list of uses; to go to use q it starts the gathers up to q + prefetch
and waits for that of q. Units that are complete are reduced in an order of their own; when a reduction
starts, the one TRAVELLING places before it has to land. Both waits end when all ranks have started.
Rank A waits for unit i to land, but rank B has not started that reduction: a parameter of i gives B no
gradient, so B would start it when backward is over. B has gone on and waits for a gather that A, who
stands still, has not started.

So a reduction has a deadline: a rank that goes to use q first starts those with a deadline up to q,
complete or not. A unit is complete after its last use at the earliest. Let M(j) be the latest last use
among units 0 to j of the reductions' order. Then the deadline of unit i is M(i + TRAVELLING) + prefetch + 1,
and units without an i + TRAVELLING have none.

Why that is enough: suppose that all ranks wait. Let A be least far, at p. The gathers up to p + prefetch have
been started by all, so A waits for no gather, but for some i to land: it has started i + TRAVELLING.
If that was complete, so were all before it, and M(i + TRAVELLING) <= p; if it was due, its deadline had
passed, which is later than that. Of all who wait for landings let i be the smallest such unit, and B a
rank that has not started it. B waits for no landing, as it would be that of an earlier unit. So it waits for
a gather at some q that is less than the deadline of i: q <= M(i + TRAVELLING) + prefetch <= p' + prefetch for
every rank at p' that waits for i or for a later unit, which all others do or they wait for gathers further
on. So all have started that gather. Contradiction.
"""

from collections.abc import Sequence

TRAVELLING = 2  # reductions under way at a time, where whole gradients are freed after them


def deadlines(last_uses: Sequence[int], prefetch: int) -> list[int | None]:
    """Of each unit in the order of reductions: the use before which its reduction has to start.

    `last_uses`: of each unit, its last place in backward's walk; -1 for one that is not in it.
    """
    found: list[int | None] = []
    for index in range(len(last_uses)):
        behind = index + TRAVELLING
        latest = max(last_uses[: behind + 1]) if behind < len(last_uses) else None
        found.append(None if latest is None else latest + prefetch + 1)
    return found
