"""torch.compile of a model's blocks.

A block's `forward` is compiled, not its call: hooks, which unshard and reshard parameters, stay outside the
graph. Blocks of one kind share the code that was compiled for the first of them.

[Note: compile and recompute]
`full` and `every=k`: the checkpoint is outside, and runs the compiled forward again in backward; it saves the
block's inputs, as without compile. `selective`: the compiler is outside, because only it sees the matrix
products inside its graph; torch's partitioner saves those that the policy names, and fuses the recomputation
of the rest into backward.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait.errors import PlanError
from plait.parallel.activation_checkpoint import RecomputedForward

# Warnings of torch about its own code while it compiles: with warnings as errors nothing would compile.
_TORCH_WARNINGS = (
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
)


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Compile the forward of each block, after `recompute_blocks`. See [Note: compile and recompute].

    Compilation itself happens at a block's first forward and backward, and again for new shapes. Raises
    PlanError if no compiler works for `device`.
    """
    for message, category in _TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    check_compiler(device.type)
    for block in blocks:
        forward = block.forward
        if isinstance(forward, RecomputedForward) and not forward.selective:
            forward.forward = CompiledForward(forward.forward)
        else:
            block.forward = CompiledForward(forward)


class CompiledForward:
    """A block's forward, compiled. A deep copy is the uncompiled forward, for copies of the model on meta."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.eager = forward
        self._compiled = torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)


@functools.cache
def check_compiler(device: str) -> None:
    """Compile a trivial function, once per process. Raises PlanError if that fails."""
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8, device=device))
    except Exception as error:  # of any kind: nothing can be compiled here
        raise PlanError(
            "compile=true needs a working C++ compiler, and on a GPU also Triton",
            given=str(error).strip().splitlines()[0],
            expected="g++ or clang++ in PATH, or named by CXX",
            hint="compile=false",
        ) from error
