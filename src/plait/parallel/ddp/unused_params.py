"""The parameters that a backward uses, on this rank and on any, and hook counts of a static graph.

With static_graph=True the first backward records how often each parameter's hook runs in every later one. A
gradient is complete with the last run: with reentrant checkpoints around one layer several times, or
parameters used outside of forward, there is more than one.

[Note: detection of unused parameters]
A rank whose backward does not reach a parameter must mark it as ready, or the other ranks wait for its
gradient. Before a backward starts, autograd knows which nodes it will run; a query takes a tenth of a
microsecond for each parameter. Parameters that it does not reach are unused if no later backward of the same
forward can reach them either: only then is the graph walked from forward's outputs. torch walks it in every
forward.

[Note: globally unused parameters]
A parameter that no rank has used keeps its `.grad` as it is, None or not; one that some rank has used gets
the mean, to which the others contributed zeros (or their previous gradient). The two cases differ in one
count per parameter, which is summed over the ranks after the last bucket; only a rank that has not used a
parameter waits for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import Group, start_all_reduce
from plait.comm.transport import Work

# Called in a node's hook: True if the running backward will run the given node.
_will_run = torch._C._will_engine_execute_node


class UsedMap:
    """One int32 per parameter: 1 if this rank used it; after the sum, the number of ranks that did."""

    def __init__(self, num_params: int, device: torch.device) -> None:
        self._used_here = [False] * num_params
        self._device = device
        self._summed: Tensor | None = None
        self.tensor = torch.zeros(num_params, dtype=torch.int32, device=device)  # last map that was summed
        self._work = Work()
        self._counts: list[int] | None = None  # number of ranks that used each; None until received

    def mark(self, index: int) -> None:
        """Mark a parameter as used on this rank."""
        self._used_here[index] = True

    def start(self, group: Group) -> None:
        """Start the sum over the ranks, after the last bucket."""
        # From pinned memory, so that the host does not wait for the GPU's backward.
        used_here = torch.tensor(self._used_here, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._summed = self.tensor = used_here.to(self._device, non_blocking=True)
        self._work = start_all_reduce(self._summed, group, label="which parameters are used")

    def wait(self) -> None:
        """Wait for the sum."""
        self._work.wait()

    def is_unused(self, index: int) -> bool:
        """True if no rank used the parameter; without a sum, if this rank did not.

        See [Note: globally unused parameters].
        """
        if self._used_here[index] or self._summed is None:
            return not self._used_here[index]
        if self._counts is None:
            self._work.wait()
            self._counts = self._summed.tolist()
        return self._counts[index] == 0

    def reset(self) -> None:
        """Clear the map for the next backward."""
        self._used_here = [False] * len(self._used_here)
        self._summed = self._counts = None
        self._work = Work()


def unused_in_backward(nodes: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Indices of the `nodes` that neither the running backward nor any other from `outputs` reaches.

    Call it in an autograd hook. `nodes`: the parameters' AccumulateGrad nodes. `outputs`: grad_fn of
    forward's outputs. See [Note: detection of unused parameters].
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
    """Hook runs per parameter."""

    def __init__(self, num_params: int) -> None:
        self._counts = [0] * num_params
        self._remaining = [0] * num_params
        self.is_recorded = False

    def record_hook(self, index: int) -> None:
        """Count a hook run of the first backward (or of one in `no_sync` before it)."""
        self._counts[index] += 1

    def finish_recording(self) -> list[int]:
        """Finish the first backward. Return the indices of parameters that it did not use."""
        self.is_recorded = True
        return [index for index, number in enumerate(self._counts) if number == 0]

    def begin(self) -> None:
        self._remaining = list(self._counts)

    def is_extra_hook(self, index: int) -> bool:
        """True if the hook has already run as often as in the first backward."""
        return self._remaining[index] == 0

    def count_down(self, index: int) -> bool:
        """Count one hook run. Return True if the gradient is now complete."""
        self._remaining[index] -= 1
        return self._remaining[index] == 0
