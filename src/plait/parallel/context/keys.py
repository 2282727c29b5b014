"""Keys and values of other ranks' tokens, and the sums of their gradients.

# B batch  K kv heads  S tokens of the row (padded)  n at hand on this rank  D, V head sizes

[Note: order of messages]
Every rank makes the same calls in the same order: keys of a group of heads, part by part, and, in backward,
after each part the gradients of it. A ring has at most one transfer of keys and one of gradients under way,
whose tensors live until `wait`. A rank posts a part's transfer before it computes with the part before, and
waits for it after that; no message depends on the result of a product that another rank still computes, apart
from the gradients themselves. Keys go from neighbour to neighbour. Gradients of keys go to the keys' owner at
once, who adds them in float32 or wider: a sum that travelled with the keys would be rounded at each hop.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Group, Work, all_gather, start_scattered_sum, start_shift
from plait.plan.context import TokenOrder

LABEL = "attention"
Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


class Keys(Protocol):
    """Keys and values that a rank's queries may see, in parts."""

    @property
    def sources(self) -> tuple[int | None, ...]:
        """The rank in `TokenOrder.of_heads` whose tokens each part has; None: those of the row."""

    @property
    def ranks_in_part(self) -> int:
        """Number of ranks whose tokens a part has."""

    def parts(self, k: Tensor, v: Tensor) -> Iterator[Pair]:
        """Yield the parts, of (B, K, n, D) and (B, K, n, V) of this rank."""

    def summed(self, gradients: Iterator[Pair], dtype: torch.dtype) -> Pair:
        """Sum the ranks' gradients of this rank's keys; `gradients`: of each part, computed as they are
        asked for. They are sent in `dtype`."""


@dataclass(frozen=True)
class GatheredKeys:
    """One part: all tokens, in the row's order."""

    group: Group
    order: TokenOrder

    @property
    def sources(self) -> tuple[int | None, ...]:
        return (None,)

    @property
    def ranks_in_part(self) -> int:
        return self.group.size

    def parts(self, k: Tensor, v: Tensor) -> Iterator[Pair]:
        """See `Keys`."""
        own = torch.cat([k, v], -1)
        ranks = own.new_empty(self.group.size * own.numel())
        all_gather(ranks, own.flatten(), self.group, label=LABEL)
        runs = ranks.view(self.group.size, *own.shape).movedim(0, 2)  # (B, K, P, n, D + V)
        runs = runs.unflatten(3, (self.order.num_runs, self.order.run_length)).flatten(2, 3)
        row = torch.cat([runs[:, :, number] for number in self.order.in_row], 2)
        yield row[..., : k.shape[-1]], row[..., k.shape[-1] :]

    def summed(self, gradients: Iterator[Pair], dtype: torch.dtype) -> Pair:
        """See `Keys`."""
        ((dk, dv),) = gradients
        row, size = torch.cat([dk, dv], -1), self.group.size
        runs = row.split(self.order.run_length, 2)
        full = torch.cat([runs[number].to(dtype) for number in self.order.by_rank], 2)
        full = full.unflatten(2, (size, -1)).movedim(2, 0).flatten()
        own = row.new_empty(full.numel() // size)
        work = start_scattered_sum(full, self.group, label=LABEL, wide=True)
        for _ in work.into(own):
            pass
        work.release()
        own = own.view(*row.shape[:2], -1, row.shape[-1])
        return own[..., : dk.shape[-1]], own[..., dk.shape[-1] :]


@dataclass(frozen=True)
class RingKeys:
    """The keys of one rank after the other, this one's first: those of a neighbour arrive while a part is in
    use (Liu et al. 2310.01889). `inner`: neighbours that exchange heads, so the next rank of the ring is so
    many places away. If it is the group's size, the only part has all tokens."""

    group: Group
    inner: int = 1

    @property
    def sources(self) -> tuple[int | None, ...]:
        at, size = self.group.rank // self.inner, self.group.size // self.inner
        return tuple((at - step) % size for step in range(size))

    @property
    def ranks_in_part(self) -> int:
        return 1

    def parts(self, k: Tensor, v: Tensor) -> Iterator[Pair]:
        """See `Keys`."""
        steps = len(self.sources)
        if steps == 1:
            yield k, v
            return
        current = torch.cat([k, v], -1)
        for step in range(steps):
            following, work = current, Work()
            if step + 1 < steps:
                following = torch.empty_like(current)
                work = start_shift(following, current, self.group, self.inner, label=LABEL)
            yield current[..., : k.shape[-1]], current[..., k.shape[-1] :]
            work.wait()
            current = following

    def summed(self, gradients: Iterator[Pair], dtype: torch.dtype) -> Pair:
        """See `Keys`."""
        dk, dv = next(gradients)
        if len(self.sources) == 1:
            return dk, dv
        own = torch.cat([dk, dv], -1)
        under_way: list[tuple[Work, Tensor, Tensor]] = []

        def receive() -> None:
            work, received, _ = under_way.pop()
            work.wait()
            own.add_(received)

        for step, pair in enumerate(gradients, start=1):
            if under_way:
                receive()
            sent = torch.cat(pair, -1).to(dtype)
            received = torch.empty_like(sent)
            work = start_shift(received, sent, self.group, -step * self.inner, label=LABEL)
            under_way.append((work, received, sent))
        receive()
        return own[..., : dk.shape[-1]], own[..., dk.shape[-1] :]
