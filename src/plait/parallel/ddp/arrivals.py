"""Which gradients of a backward have come, and the hooks that tell.

[Note: what runs for every parameter]
A model of many small parameters spends its communication here: 1,500 hooks at 5 us each are 7 ms, and a
whole step of so small a model takes 50. So a hook on its usual way (a backward that is expected and has
begun, a gradient that has not come before) touches only what it needs, calls nothing, and leaves all else
to the bucket, which takes gradients by the dozen. Everything unusual goes by `Reducer`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


class Waiting:
    """Of a bucket: gradients that have come and are not copied yet, and how many are still to come."""

    def __init__(self, count: int, together_bytes: int) -> None:
        self.places: list[int] = []
        self.nbytes = 0
        self.missing = count
        self.together_bytes = together_bytes  # copied in one go
        self._count = count

    def begin(self) -> None:
        self.clear()
        self.missing = self._count

    def clear(self) -> None:
        self.places.clear()
        self.nbytes = 0


@dataclass(slots=True)
class Slot:
    """Where a parameter's gradient goes."""

    bucket: Any
    place: int
    nbytes: int
    waiting: Waiting


@dataclass
class Arrivals:
    """Of one backward after the other, by parameter."""

    count: int
    slots: list[Slot] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # in which they came
    is_usual: bool = False  # see [Note: what runs for every parameter]
    lock: Any = field(default_factory=threading.RLock)  # hooks run in a thread per device

    def __post_init__(self) -> None:
        self.ready = bytearray(self.count)

    def begin(self) -> None:
        """Nothing has come."""
        self.is_usual = False
        self.ready[:] = bytes(self.count)
        self.order.clear()

    @property
    def missing(self) -> list[int]:
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]


def hook_of(
    arrivals: Arrivals, index: int, fill: Callable[[int], None], otherwise: Callable[[int], None]
) -> Callable[..., None]:
    """For autograd's node of parameter `index`. `fill`: when its bucket has enough to copy. `otherwise`:
    instead of all this, where something is unusual."""
    ready, slots, order, lock = arrivals.ready, arrivals.slots, arrivals.order, arrivals.lock

    def hook(_: object, __: object) -> None:
        if not arrivals.is_usual or ready[index]:
            otherwise(index)
            return
        slot = slots[index]
        waiting = slot.waiting
        with lock:
            ready[index] = 1
            order.append(index)
            waiting.places.append(slot.place)
            waiting.nbytes += slot.nbytes
            waiting.missing -= 1
            if waiting.missing and waiting.nbytes < waiting.together_bytes:
                return
        fill(index)

    return hook


def node_of(parameter: nn.Parameter) -> Any:
    """Autograd's node that puts a gradient into `.grad`; it lives as long as somebody holds it."""
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]
