"""The plan's `capacity`: an expert takes a fixed number of rows from each rank, so messages have one size.

# T tokens  k experts of each  S = T k choices, by token  E experts of the layer  C rows of an expert

[Note: choices within the capacity]
Of the choices of a rank's tokens (under tp, of a column's share of them; under cp, of its own) in one call of
a layer, an expert takes the first C = ceil(capacity S / E), in the order of tokens. The others are dropped:
they add nothing to their token's result, and the weights of its other experts remain as they are (GShard,
2006.16668, section 2.2; Switch Transformer, 2101.03961, section 2.2). Which are dropped follows from the
choices alone, and so is the same in a recomputed block. It depends on how tokens are divided over ranks and
micro-batches: one process is not the same program, but for one that drops in the same groups of tokens.

[Note: sizes of messages]
A message has, for each expert, as many rows as the rank of its group with most tokens needs; those that a
rank has no choices for are zeros, whose results no rank reads, so that gradients of experts and of their
biases are not affected. Ranks can have micro-batches of other shapes, which they do not know of each other,
and a message must not have other sizes where it is received. A rank cannot ask when its own shape is new: the
others' may be old, and they would send rows, and not answer. So all ranks exchange digests of their shapes at
the beginning of each step, evaluation or other pass, whether shapes are new or not. From there, each
micro-batch has the same key on all ranks of the group, the digests of all. A layer's first forward with a key
takes the largest number of tokens over ranks; this is on all ranks in the same forward, as they have had the
same keys. Later ones know it: no message, and no wait. This needs tokens of a layer that follow from shapes:
others are an error. Calls outside of these passes have no key, and exchange numbers each time.

No counts are sent, and so nothing compares the layers that ranks are in. The same exchange compares a digest
of those of the last pass.
"""

import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm import Group, all_gather, all_reduce
from plait.errors import ModelError
from plait.models.experts import Experts
from plait.plan.grid import expert_rows, share
from plait.plan.sharding import TPPlan

_MOST_KEYS = 1000
_HINT = "a plan without capacity"


def capacities_of(
    factor: str, columns: int, layers: Iterable[Experts], plan: TPPlan
) -> "dict[str, Capacity]":
    """Those of layers; none for the plan's key `none`."""
    if factor == "none":
        return {}
    return {each.name: Capacity(factor, columns if each.name in plan.own_experts else 1) for each in layers}


@dataclass(frozen=True)
class Capacity:
    """`factor`: the plan's key; `columns`: ranks over which the tokens of a rank are divided in a layer."""

    factor: str
    columns: int

    def kept(self, experts_Tk: Tensor, number: int) -> Tensor:
        """Return which choices of this rank's tokens are within the capacity of their experts: (T, k)."""
        shares = [share(len(experts_Tk), rank, self.columns) for rank in range(self.columns)]
        parts = [experts_Tk[part] for part in shares]
        return torch.cat([self._of_share(part, number).view(part.shape) for part in parts])

    def _of_share(self, experts_Tk: Tensor, number: int) -> Tensor:
        limit = expert_rows(self.factor, experts_Tk.numel(), number)
        slots_S = slots(*torch.sort(experts_Tk.flatten(), stable=True), number, limit, limit)
        return slots_S < number * limit


def slots(sorted_S: Tensor, order_S: Tensor, number: int, limit: int, size: int) -> Tensor:
    """Return the row of each choice, in their own order, in messages of `size` rows for each expert, of which
    `limit` are this rank's: (S,). number x size for a choice that has none. The arguments: of the sort."""
    place_S = torch.arange(len(sorted_S), device=sorted_S.device)
    place_S = place_S - torch.searchsorted(sorted_S, sorted_S)  # among the choices of its expert
    is_kept_S = (place_S < limit) & (sorted_S >= 0) & (sorted_S < number)
    rows_S = torch.where(is_kept_S, sorted_S * size + place_S, number * size)
    return torch.empty_like(rows_S).scatter_(0, order_S, rows_S)


@dataclass
class MessageSizes:
    """Numbers of tokens of the ranks of ep. See [Note: sizes of messages]."""

    group: Group
    device: torch.device
    digest: int = 0  # of the layers that were called since the last exchange
    known: dict[tuple[int, ...], dict[str, tuple[int, int]]] = field(default_factory=dict)

    def exchanged(self, shapes: Sequence[Hashable]) -> "list[MicroSizes]":
        """Tell the other ranks the shapes of the next micro-batches. Collective. Raises ModelError, on all
        ranks, if they were in different layers since the last call."""
        own = [self.digest, *(zlib.crc32(repr(shape).encode()) for shape in shapes)]
        of_ranks = torch.empty(self.group.size * len(own), dtype=torch.int64, device=self.device)
        given = of_ranks.new_empty(len(own))
        for place, number in enumerate(own):  # a copy of a list would block on CUDA
            given[place : place + 1].fill_(number)
        all_gather(of_ranks, given, self.group, label="shapes of micro-batches")
        digests, *keys = zip(*of_ranks.view(-1, len(own)).tolist(), strict=True)  # on GPUs, the host waits
        self.digest = 0
        if len({*digests}) > 1:
            raise ModelError(
                "the ranks of ep were not in the same layers: the last step has mixed their tokens",
                given=f"digests of the layers with experts, by rank: {digests}",
                expected="the same layers in the same order on every rank",
                hint=f"{_HINT}, which compares them in each layer",
            )
        if len(self.known) > _MOST_KEYS:
            self.known.clear()  # on all ranks, which have as many
        return [MicroSizes(self, self.known.setdefault(key, {})) for key in keys]


@dataclass(frozen=True)
class MicroSizes:
    """Those of a micro-batch. `known`: by layer, this rank's number of tokens, and the largest."""

    of: MessageSizes
    known: dict[str, tuple[int, int]]

    def largest(self, layer: str, num_tokens: int, group: Group, device: torch.device) -> int:
        """Return the largest number of tokens that a rank of the group has in a layer. Raises ModelError."""
        self.of.digest = zlib.crc32(layer.encode(), self.of.digest)
        if layer not in self.known:
            self.known[layer] = num_tokens, _largest(num_tokens, group, device)
        before, largest = self.known[layer]
        if num_tokens != before:
            raise ModelError(
                "capacity needs layers whose number of tokens follows from the shapes of a batch",
                given=f"{layer}: {num_tokens} tokens, and {before} for another batch of the same shapes",
                expected="all tokens of a batch in each layer with experts",
                hint=_HINT,
            )
        return largest


_active: ContextVar[MicroSizes | None] = ContextVar("sizes of messages", default=None)


@contextmanager
def sizes_of(micro: MicroSizes | None) -> Iterator[None]:
    """Forwards inside the context are of this micro-batch."""
    token = _active.set(micro)
    try:
        yield
    finally:
        _active.reset(token)


def active_sizes() -> MicroSizes | None:
    return _active.get(None)


def largest_tokens(layer: str, num_tokens: int, group: Group, device: torch.device) -> int:
    """Return the largest number of tokens that a rank of the group has in this call of a layer. Collective
    where it is not known; on meta, this rank's."""
    if device.type == "meta":
        return num_tokens
    if (micro := active_sizes()) is None:
        return _largest(num_tokens, group, device)
    return micro.largest(layer, num_tokens, group, device)


def _largest(num_tokens: int, group: Group, device: torch.device) -> int:
    number = torch.tensor([num_tokens], dtype=torch.float64, device=device)
    all_reduce(number, group, "max", label="tokens of a layer")
    return int(number.item())
