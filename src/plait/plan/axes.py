"""The axes of the grid, a row for each, and the roles that code asks for.

[Note: roles]
Code that needs the ranks which sum a gradient, or hold the same states, asks for them by role and names no
axis. Gradients of a unit are summed over the axes along which its kind does not differ; `zero` shards its
states over those of them with `shards_states`. Axes along which parameters of all kinds differ lead to ranks
with other parts of the model, for the same tokens.

[Note: ranks of ep]
`ep` takes its ranks from the inside, so that as many as possible are on one host: out of `cp` the greatest
number that divides both; for the rest, out of the shard groups likewise, and then out of the replicas. Each
is an axis inside the one that it comes from, and divides the same. Any `ep` that divides dp x cp leaves
integers.

[Note: islands]
Under local steps the replicas are islands: each sums gradients by itself, and they exchange weights instead.
The roles of a step leave out REPLICAS then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import gcd, lcm
from typing import Protocol

Axes = tuple[str, ...]  # names, outermost first


class Degrees(Protocol):
    """Degrees from which those of the axes follow. Implemented by `Plan`."""

    @property
    def pp(self) -> int: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def data_ranks(self) -> int: ...
    @property
    def data_shards(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


class Divides(Enum):
    """Parts of a training step that an axis divides among its ranks."""

    BLOCKS = "blocks"
    SAMPLES = "samples"
    SEQUENCE = "sequence"
    HIDDEN = "hidden"  # the residual dim
    FEATURES = "features"  # heads and ffn widths


class UnitKind(Enum):
    """Units whose parameters differ along the same axes."""

    DENSE = "dense"
    EXPERT = "expert"  # of which each rank along EXPERTS has its own
    __hash__ = object.__hash__  # Enum's is slow Python


@dataclass(frozen=True)
class Axis:
    """A row of the table.

    key             key of the plan whose ranks these are
    degree          ranks along it
    differs         kinds of units whose parameters differ along it
    shards_states   `zero` shards states over it
    """

    name: str
    key: str
    divides: Divides
    degree: Callable[[Degrees], int]
    differs: frozenset[UnitKind] = frozenset()
    shards_states: bool = False


_ALL = frozenset(UnitKind)


def _ep_of_cp(plan: Degrees) -> int:
    return gcd(plan.ep, plan.cp)


def _ep_of_dp(plan: Degrees) -> int:
    return plan.ep // _ep_of_cp(plan)


def smallest_dp(plan: Degrees) -> int:
    """Return the smallest `dp` that a plan with these other degrees can have: it divides all others."""
    return lcm(plan.shard or 1, _ep_of_dp(plan))


def replica_dp(plan: Degrees) -> int:
    """Return the ranks of dp that together have one copy of all units' states."""
    return lcm(plan.data_shards, _ep_of_dp(plan))


def _ep_of_shards(plan: Degrees) -> int:
    return gcd(_ep_of_dp(plan), plan.data_shards)


_OF_EXPERTS = frozenset({UnitKind.EXPERT})
_DP, _CP = ("dp", Divides.SAMPLES), ("cp", Divides.SEQUENCE)

# Outermost to innermost: neighbours on the last axis are the closest. See [Note: ranks of ep].
TABLE = (
    Axis("pp", "pp", Divides.BLOCKS, lambda plan: plan.pp, _ALL),
    Axis("replicate", *_DP, lambda plan: plan.data_ranks // replica_dp(plan)),
    Axis("ep_replicate", *_DP, lambda plan: _ep_of_dp(plan) // _ep_of_shards(plan), _OF_EXPERTS),
    Axis("shard", *_DP, lambda plan: plan.data_shards // _ep_of_shards(plan), shards_states=True),
    Axis("ep_shard", *_DP, _ep_of_shards, _OF_EXPERTS, shards_states=True),
    Axis("cp", *_CP, lambda plan: plan.cp // _ep_of_cp(plan), shards_states=True),
    Axis("ep_cp", *_CP, _ep_of_cp, _OF_EXPERTS, shards_states=True),
    Axis("row", "tp", Divides.HIDDEN, lambda plan: plan.rows, _ALL),
    Axis("col", "tp", Divides.FEATURES, lambda plan: plan.cols, _ALL),
)
AXES: Axes = tuple(axis.name for axis in TABLE)


def _along(*divides: Divides) -> Axes:
    return tuple(axis.name for axis in TABLE if axis.divides in divides)


def _only(divides: Divides) -> str:
    axes = _along(divides)
    assert len(axes) == 1, f"axes that divide {divides.value}: {axes}, one is expected"
    return axes[0]


def in_order(axes: Iterable[str]) -> Axes:
    """Return these axes, outermost first."""
    return tuple(name for name in AXES if name in set(axes))


STAGES, HIDDEN, FEATURES = _only(Divides.BLOCKS), _only(Divides.HIDDEN), _only(Divides.FEATURES)
SEQUENCE = _along(Divides.SEQUENCE)  # ranks with other tokens of the same samples
BATCH = _along(Divides.SAMPLES)  # ranks with other samples of a batch
TOKENS = _along(Divides.SAMPLES, Divides.SEQUENCE)  # ranks with other tokens
# Ranks with other parts of the model, for the same tokens; of these, ranks that shard the same layers.
MODEL: Axes = tuple(axis.name for axis in TABLE if axis.name not in TOKENS)
TENSOR: Axes = tuple(name for name in MODEL if name != STAGES)
EXPERTS = tuple(axis.name for axis in TABLE if axis.differs == {UnitKind.EXPERT})  # ranks with other experts
LAYERS = in_order((*TENSOR, *SEQUENCE, *EXPERTS))  # ranks that communicate inside layers
PARTS = in_order((*MODEL, *EXPERTS))  # ranks with other parts of the model
STAGE_PARTS: Axes = tuple(name for name in PARTS if name != STAGES)  # of these, ranks with the same layers
# Ranks with copies of all units' states.
REPLICAS: Axes = tuple(
    axis.name for axis in TABLE if axis.name in TOKENS and not (axis.shards_states or axis.differs)
)


@dataclass(frozen=True)
class Roles:
    """The axes by which the ranks of a step communicate. See the notes at the top."""

    has_islands: bool
    has_shards: bool = True  # zero shards states
    table: tuple[Axis, ...] = TABLE

    @classmethod
    def from_plan(cls, plan: Degrees) -> "Roles":
        return cls(plan.local_steps > 0, plan.zero > 0)

    def gradient_sum(self, kind: UnitKind = UnitKind.DENSE) -> Axes:
        """Axes over which the gradients of a unit are summed."""
        same = (axis.name for axis in self.table if kind not in axis.differs)
        return tuple(name for name in same if not (self.has_islands and name in REPLICAS))

    def states(self, kind: UnitKind = UnitKind.DENSE) -> Axes:
        """Axes over which `zero` shards the states of a unit."""
        if not self.has_shards:
            return ()
        return tuple(axis.name for axis in self.table if kind not in axis.differs and axis.shards_states)

    def replicas(self, kind: UnitKind = UnitKind.DENSE) -> Axes:
        """Axes over which the sums of `states` are summed: ranks with the same states."""
        return tuple(name for name in self.gradient_sum(kind) if name not in self.states(kind))

    @cached_property
    def one_copy(self) -> Axes:
        """Axes of ranks that together hold one copy of the gradient."""
        return in_order((*PARTS, *self.states()))

    @cached_property
    def stage_copy(self) -> Axes:
        """Axes of ranks that together hold one copy of the gradient of their stages."""
        return in_order((*TENSOR, *EXPERTS, *self.states()))

    @cached_property
    def same_stage(self) -> Axes:
        """Axes of ranks with the same stages."""
        return in_order((*self.gradient_sum(), *TENSOR))

    @cached_property
    def step(self) -> Axes:
        """Axes of all ranks that take part in a step."""
        return in_order((*self.gradient_sum(), *MODEL))
