"""Context parallelism as arithmetic: which tokens each rank has, which keys its queries see, what it sends.

[Note: orders of tokens]
Under a causal mask a query sees the keys before it, so the last of P equal parts of a row takes 2P - 1 times
as long as the first. With `num_runs = 2` a rank has runs r and 2P - 1 - r of 2P (zig-zag), which together
have the same work on every rank. Where each rank has all tokens of some heads instead (Ulysses), it has one
run. With both, the ranks that exchange heads (`inner` neighbours) divide the runs of one rank of the ring.
Two runs do not balance the documents of a packed row. Such a row is divided into C equal parts, and a rank
has two runs of each part; C is doubled until work is even, or runs would be too short. Outside of attention
the order does not matter: positions are numbered before a row is divided.

[Note: blocks of a mask]
A query sees the keys of its own document, or chunk of it, and of these the ones within a distance; padding
is no key. So the queries of a run are divided at the borders of documents, and the keys of each run into
blocks that all of its queries see (`FULL`), the triangle next to it (`CAUSAL`), and the edges of a window,
which need a mask of distances. Blocks that no query sees are not made. Windows shorter than a tile are
computed with one mask for each tile of queries: kernels pay for each call.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from plait.errors import PlanError
from plait.plan.sharding import split_heads

METHODS = ("auto", "allgather", "ulysses", "ring")  # values of `cp_method`, and RxU
CP_METHOD = re.compile(rf"{'|'.join(METHODS)}|([1-9][0-9]{{0,5}})x([1-9][0-9]{{0,5}})")
Interval = tuple[int, int]  # start and stop
Segment = tuple[Interval, Interval]  # queries, and the keys that they may see
TILE = 256  # queries of a block with a mask
SHORTEST = 256  # tokens of a run that is made to balance documents: kernels pay for each call
EVEN = 1.05  # most work of a rank, of the mean


def heads_degree(method: str, num_ranks: int) -> int:
    """Neighbours among the ranks of `cp` that exchange tokens for heads; 1: none do."""
    if method == "ulysses":
        return num_ranks
    return int(method.partition("x")[2]) if method[0].isdigit() else 1


class Visible(Enum):
    """The keys of a block that its queries see."""

    FULL = "all"
    CAUSAL = "those up to their own position"
    MASKED = "those within the distances"


@dataclass(frozen=True)
class Block:
    """Queries and keys by position in the row. Blocks of the same queries follow each other."""

    queries: Interval
    keys: Interval
    visible: Visible


@dataclass(frozen=True)
class TokenOrder:
    """Tokens of a row over ranks: each has `num_runs` runs of equal length. The row is padded to fill them.
    `inner`: neighbours that exchange heads."""

    num_tokens: int
    num_ranks: int
    num_runs: int
    inner: int = 1

    @classmethod
    def of_method(cls, method: str, num_tokens: int, num_ranks: int) -> "TokenOrder":
        """See [Note: orders of tokens]."""
        inner = heads_degree(method, num_ranks)
        return cls(num_tokens, num_ranks, 1 if inner == num_ranks else 2, inner)

    @property
    def of_heads(self) -> "TokenOrder":
        """Once tokens are exchanged for heads: over groups of neighbours, all of which have one's tokens."""
        return TokenOrder(self.padded, self.num_ranks // self.inner, self.num_runs)

    @cached_property
    def run_length(self) -> int:
        """Tokens of a run."""
        return -(-self.num_tokens // (self.num_ranks * self.num_runs))

    @property
    def padded(self) -> int:
        return self.run_length * self.num_ranks * self.num_runs

    @property
    def num_filled(self) -> int:
        """Tokens that fill up the last runs."""
        return self.padded - self.num_tokens

    @property
    def per_rank(self) -> int:
        return self.run_length * self.num_runs

    def starts(self, rank: int) -> tuple[int, ...]:
        """The positions at which the runs of a rank start: see [Note: orders of tokens]."""
        (outer, at), ring = divmod(rank, self.inner), self.num_ranks // self.inner
        numbers = (
            n
            for part in range(self.num_runs)
            for n in (2 * ring * part + outer, 2 * ring * (part + 1) - 1 - outer)
        )
        return tuple(
            (number * self.inner + at) * self.run_length
            for number in itertools.islice(numbers, self.num_runs)
        )

    def balanced(self, rows: Sequence[Sequence[Interval]]) -> "TokenOrder":
        """An order in which these documents are nearly equal work for all ranks, if there is one with as many
        tokens on each: see [Note: orders of tokens]."""
        found = [self]
        while self.num_runs > 1 and found[-1].unevenness(rows) > EVEN:
            finer = replace(self, num_runs=2 * found[-1].num_runs)
            if finer.padded != self.padded or finer.run_length < SHORTEST:
                break
            found.append(finer)
        return min(found, key=lambda order: order.unevenness(rows))

    def unevenness(self, rows: Sequence[Sequence[Interval]]) -> float:
        """The most pairs of a query and a key before it in its document that a rank has, of their mean."""
        order = self.of_heads
        pairs = [0] * (order.num_ranks * order.num_runs)
        for start, stop in itertools.chain.from_iterable(rows):
            for run in range(start // order.run_length, -(-stop // order.run_length)):
                first = max(0, run * order.run_length - start)
                last = min(stop, (run + 1) * order.run_length) - start
                pairs[run] += (last * (last + 1) - first * (first + 1)) // 2
        of_ranks = [
            sum(pairs[at // order.run_length] for at in order.starts(rank)) for rank in range(order.num_ranks)
        ]
        return order.num_ranks * max(of_ranks) / sum(of_ranks)

    @cached_property
    def by_rank(self) -> tuple[int, ...]:
        """The runs of all ranks, in rank order, by their numbers in the row."""
        return tuple(
            start // self.run_length for rank in range(self.num_ranks) for start in self.starts(rank)
        )

    @cached_property
    def in_row(self) -> tuple[int, ...]:
        """For each run of the row, its index in `by_rank`."""
        return tuple(sorted(range(len(self.by_rank)), key=self.by_rank.__getitem__))


def divided(segments: Sequence[Segment], chunk: int | None) -> list[Segment]:
    """Segments, or their chunks, which are counted from the first key."""
    if chunk is None:
        return list(segments)
    return [
        ((at, min(at + chunk, queries[1])), (at, min(at + chunk, keys[1])))
        for queries, keys in segments
        for at in range(keys[0], keys[1], chunk)
    ]


def blocks_of(
    queries: Interval, segments: Sequence[Segment], before: int | None, after: int | None
) -> Iterator[Block]:
    """The blocks of queries; `segments`: as from `divided`; `before`, `after`: as of a `MaskRule`. Queries
    that are in no segment see nothing."""
    for (first_query, last_query), (first, last) in segments:
        start, stop = max(queries[0], first_query), min(queries[1], last_query)
        if start >= stop or first >= last:
            continue
        if before is None and after is None:
            yield Block((start, stop), (first, last), Visible.FULL)
            continue
        no_window = before is None or before >= stop - first  # the first key is near enough for all
        if not no_window or after != 0:
            for at in range(start, stop, TILE):
                yield from _tile((at, min(at + TILE, stop)), (first, last), before, after)
            continue
        inner = max(start, first), min(stop, last)
        if first < inner[0] < inner[1]:
            yield Block(inner, (first, inner[0]), Visible.FULL)
        if inner[0] < inner[1]:
            yield Block(inner, inner, Visible.CAUSAL)
        if max(start, last) < stop:  # padding after the keys
            yield Block((max(start, last), stop), (first, last), Visible.FULL)


def _tile(queries: Interval, keys: Interval, before: int | None, after: int | None) -> Iterator[Block]:
    """The blocks of a tile of queries within their segment's keys."""
    start, stop = queries
    low = keys[0] if before is None else max(keys[0], start - before + 1)
    high = keys[1] if after is None else min(keys[1], stop + after)
    full_low = keys[0] if before is None else max(low, stop - before)
    full_high = keys[1] if after is None else min(high, start + after + 1)
    near = before is None or before >= stop - start
    is_triangle = after == 0 and near and low <= start and high == stop
    if low >= high:
        return
    full_high = start if is_triangle else full_high
    if full_high - full_low < TILE:
        yield Block(queries, (low, high), Visible.MASKED)
        return
    yield Block(queries, (full_low, full_high), Visible.FULL)
    if low < full_low:
        yield Block(queries, (low, full_low), Visible.MASKED)
    if full_high < high:
        yield Block(queries, (full_high, high), Visible.CAUSAL if is_triangle else Visible.MASKED)


def ulysses_kv_heads(heads: int, kv_heads: int, num_ranks: int) -> int | None:
    """Kv heads that Ulysses exchanges, with copies until they divide over the ranks; None: impossible."""
    if num_ranks == 1:
        return kv_heads
    copies = math.lcm(kv_heads, num_ranks)
    return copies if heads % num_ranks == 0 and heads % copies == 0 else None


def heads_error(heads: int, kv_heads: int, num_ranks: int) -> PlanError:
    """The error of heads that do not divide over the neighbours that exchange them."""
    return PlanError(
        "the heads do not divide over the ranks of cp that exchange them",
        given=f"{heads} heads and {kv_heads} kv heads (of a column of tp), {num_ranks} ranks",
        expected="heads that are a multiple of the ranks (and of the kv heads, if these are fewer)",
        hint="cp_method=allgather or cp_method=ring",
    )


def gathered_kv_heads(heads: int, kv_heads: int, num_ranks: int) -> int:
    """Kv heads whose keys and values `allgather` gathers at once: so many that these take no more memory than
    the rank's queries and outputs."""
    most = min(kv_heads, max(1, heads // num_ranks))
    return next(step for step in range(most, 0, -1) if kv_heads % step == 0)


class AttentionMessages(NamedTuple):
    """Communication of an attention over the ranks of cp: calls in a forward, where a block is recomputed,
    and in backward. For each of a rank's tokens: elements that a call logs, and those that it receives.
    `ranks`, so many places `apart`, take part."""

    op: str
    forward: int
    again: int
    backward: int
    elements: float
    received: float
    ranks: int
    apart: int = 1


def attention_messages(
    method: str, heads: int, kv_heads: int, width: int, num_ranks: int
) -> list[AttentionMessages]:
    """The messages of an attention. `width`: of a key and a value. Raises PlanError if the heads do not
    divide."""
    others = (num_ranks - 1) / num_ranks
    if method == "allgather":
        at_once = gathered_kv_heads(heads, kv_heads, num_ranks)
        num_calls, full = kv_heads // at_once, float(num_ranks * at_once * width)
        sizes = full, others * full, num_ranks
        gathers = AttentionMessages("all-gather", num_calls, 0, num_calls, *sizes)
        return [gathers, AttentionMessages("reduce-scatter", 0, 0, num_calls, *sizes)]
    inner = heads_degree(method, num_ranks)
    outer, copies = num_ranks // inner, ulysses_kv_heads(heads, kv_heads, inner)
    if copies is None:
        raise heads_error(heads, kv_heads, inner)
    found = []
    if inner > 1:
        # Queries, keys and values to heads, and outputs to tokens; the reverse in backward. Of mean size.
        full = (heads + copies) * width / 2
        received = (inner - 1) / inner * full
        op, logged = ("all-to-all", full) if outer == 1 else ("messages", received)
        found.append(AttentionMessages(op, 2, 2, 2, logged, received, inner))
    if outer > 1:  # keys and values; in backward their gradients, too
        keys = float(copies * width)
        calls = outer - 1, 0, 2 * (outer - 1)
        found.append(AttentionMessages("messages", *calls, keys, keys, outer, inner))
    return found


_OF_PAIRS = ("all-to-all", "messages")  # operations with a message for each pair of ranks


class Sent(NamedTuple):
    """Elements of attentions over the ranks of cp, in a step, for each of a rank's tokens: those that the
    group's ranks on a host receive from other hosts, and those that a rank receives."""

    between_hosts: float
    received: float


def sent_elements(
    method: str,
    heads: int,
    kv_heads: int,
    width: int,
    num_ranks: int,
    on_host: int,
    recomputed: float = 0.0,
) -> Sent | None:
    """The elements of an attention with `on_host` neighbours on each host, in a block of which the share
    `recomputed` runs again; None: the heads do not divide. A gather or a reduction passes a host's border
    once; an exchange has a message for each pair of ranks."""
    if ulysses_kv_heads(heads, kv_heads, heads_degree(method, num_ranks)) is None:
        return None
    between = received = 0.0
    for each in attention_messages(method, heads, kv_heads, width, num_ranks):
        elements = (each.forward + recomputed * each.again + each.backward) * each.received
        received += elements
        local = min(each.ranks, max(1, on_host // each.apart))
        if local < each.ranks:
            pairs = local * (each.ranks - local) / (each.ranks - 1) if each.op in _OF_PAIRS else 1.0
            between += on_host / local * pairs * elements
    return Sent(between, received)


def heads_of_columns(heads: int, kv_heads: int, columns: int) -> list[tuple[int, int]]:
    """Heads and kv heads of an attention on each column of `tp`."""
    if heads < columns or heads % kv_heads:
        return [(heads, kv_heads)]  # gathered, or refused by the tensor plan
    split = split_heads(heads, kv_heads, columns)
    pairs = zip(split.queries, split.keys, strict=True)
    return [(q_stop - q, k_stop - k) for (q, q_stop), (k, k_stop) in pairs]


def first_heads(attentions: Iterable[tuple[int, int]], columns: int, column: int) -> dict[int, int]:
    """Return, for each number of heads that a column of `tp` has in one of these attentions (heads, kv
    heads), the model's index of the first of them. A number that means other heads in another attention
    is left out. Columns that have all heads compute the same."""
    found: dict[int, set[int]] = {}
    for heads, kv_heads in attentions:
        found.setdefault(heads, set()).add(0)
        if heads >= columns and heads % kv_heads == 0:
            first, stop = split_heads(heads, kv_heads, columns).queries[column]
            found.setdefault(stop - first, set()).add(first)
    return {size: first for size, (first, *others) in found.items() if not others}


def recomputed_share(recompute: str) -> float:
    """The share of blocks whose forward runs again in backward."""
    policy, _, every = recompute.partition("=")
    return 0.0 if policy == "none" else 1 / int(every or 1)


@dataclass(frozen=True)
class MethodChoice:
    """The way in which attention reaches the tokens of other ranks in a plan. `sent`: of all attentions, for
    each method that was compared; empty if the plan names one."""

    method: str
    sent: Mapping[str, Sent]
    across_hosts: bool = False

    @classmethod
    def of(
        cls,
        method: str,
        attentions: Sequence[tuple[int, int, int]],
        num_ranks: int,
        on_host: int | None = None,
        recomputed: float = 0.0,
    ) -> "MethodChoice":
        """The choice for attentions of (heads, kv heads, width) on each rank: for `auto` the method that
        sends least between hosts, and then in all. `on_host`: neighbours on each host; None: all.
        `recomputed`: share of the blocks. Raises PlanError if the heads do not divide."""
        if method != "auto":
            for attention in attentions:
                attention_messages(method, *attention, num_ranks)
            return cls(method, {})
        on_host = on_host or num_ranks
        both = (f"{num_ranks // on_host}x{on_host}",) if 1 < on_host < num_ranks else ()
        sent = {}
        for each in ("allgather", "ulysses", *both):
            found = [
                sent_elements(each, *attention, num_ranks, on_host, recomputed) for attention in attentions
            ]
            known = [elements for elements in found if elements is not None]
            if len(known) == len(found):
                sent[each] = Sent(*map(sum, zip(*known, strict=True))) if known else Sent(0.0, 0.0)
        rounded = {each: [float(f"{total:.9g}") for total in totals] for each, totals in sent.items()}
        return cls(min(rounded, key=rounded.__getitem__), sent, on_host < num_ranks)
