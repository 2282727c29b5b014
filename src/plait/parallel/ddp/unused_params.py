"""static_graph=True: the first backward tells how often each parameter's hook runs in every later one.

A parameter's gradient is complete with the last of its hooks: with reentrant checkpoints around one layer
several times, or parameters used outside of forward, it has more than one.

Which parameters a backward uses, on this rank and on any.

[Note: who is unused]
A rank whose backward does not reach a parameter has to say so, or the others wait for its gradient. What
this backward reaches, autograd knows before it starts, and tells for every node; that costs a tenth of a
microsecond for each parameter. Those it does not reach are unused if no later backward of the same forward
can reach them either: the graph is walked from forward's outputs, and only then. torch walks it in every
forward.

[Note: unused here, used elsewhere]
A parameter that no rank has used keeps its gradient as it is, None or not; one that some rank has used gets
the mean, to which the others contributed zeros (or what they have had before). One number for each
parameter tells them apart, summed over the ranks behind the last bucket; only a rank that has not used a
parameter waits for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import Group, start_all_reduce
from plait.comm.transport import Work

# Of a node of the graph, in the hook of another one: whether the backward that is running will run it.
_will_run = torch._C._will_engine_execute_node


class UsedMap:
    """One int32 for each parameter: this rank has used it; after the sum, how many ranks have."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._here = [False] * count
        self._device = device
        self._sum: Tensor | None = None
        self.tensor = torch.zeros(count, dtype=torch.int32, device=device)  # the last one that was summed
        self._pending = Work()
        self._counts: list[int] | None = None  # of ranks, when they are known

    def mark(self, index: int) -> None:
        """This rank has used it."""
        self._here[index] = True

    def start(self, group: Group) -> None:
        """Sums over the ranks, behind the last bucket."""
        # From pinned memory: the host does not wait until the GPU is through with backward.
        here = torch.tensor(self._here, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._sum = self.tensor = here.to(self._device, non_blocking=True)
        self._pending = start_all_reduce(self._sum, group, label="which parameters are used")

    def land(self) -> None:
        """The sum is through, whether anybody has asked for it or not."""
        self._pending.wait()

    def is_unused(self, index: int) -> bool:
        """By any rank; by this one, if nothing was summed. See [Note: unused here, used elsewhere]."""
        if self._here[index] or self._sum is None:
            return not self._here[index]
        if self._counts is None:
            self._pending.wait()
            self._counts = self._sum.tolist()
        return self._counts[index] == 0

    def reset(self) -> None:
        """A backward is over: nothing is used yet in the next."""
        self._here = [False] * len(self._here)
        self._sum = self._counts = None
        self._pending = Work()


def unused_in_backward(nodes: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Indices of those parameters' `nodes` that no backward from `outputs` reaches, nor the running one.

    To be called in a hook of autograd's. `outputs`: nodes. See [Note: who is unused].
    """
    candidates = [index for index, node in enumerate(nodes) if not _will_run(node)]
    if not candidates or not outputs:
        return []
    seen = set(outputs)
    stack = list(seen)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return [index for index in candidates if nodes[index] not in seen]


class StaticGraph:
    """Counts hooks."""

    def __init__(self, count: int) -> None:
        self._counts = [0] * count
        self._left = [0] * count
        self.is_known = False

    def count(self, index: int) -> None:
        """A hook of the first backward (or of one in `no_sync` before it)."""
        self._counts[index] += 1

    def learn(self) -> list[int]:
        """The first backward is over. Returns the parameters that have no part in it."""
        self.is_known = True
        return [index for index, number in enumerate(self._counts) if number == 0]

    def begin(self) -> None:
        self._left = list(self._counts)

    def has_changed(self, index: int) -> bool:
        """A hook runs: whether it is one more than in the first backward."""
        return self._left[index] == 0

    def is_last_of(self, index: int) -> bool:
        """A hook runs: whether the gradient is complete."""
        self._left[index] -= 1
        return self._left[index] == 0
