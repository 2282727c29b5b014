"""torch.compile of a model's blocks.

What is compiled is a block's `forward`, not its call: hooks, which gather and free parameters, stay
outside of the graph. Blocks of one kind share what was compiled for the first of them.

[Note: compile and recompute]
`full` and `every=k`: the checkpoint is outside, and runs the compiled forward again in backward; what is
kept is the block's inputs, as without compile. `selective`: the compiler is outside, because only it sees
the products inside its graph; torch's partitioner keeps those that the policy names, and fuses the rest
into backward.
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

# Said by torch about itself while it compiles; who treats warnings as errors could not compile at all.
_TORCHS_OWN = (
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
)


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Compiles the forward of each block, after `recompute_blocks`. See [Note: compile and recompute].

    Compilation itself happens at a block's first forward and backward, and again for new shapes. Raises
    PlanError when there is no compiler that works for `device`.
    """
    for message, category in _TORCHS_OWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    check_compiler(device.type)
    for block in blocks:
        forward = block.forward
        if isinstance(forward, RecomputedForward) and not forward.selective:
            forward.forward = CompiledForward(forward.forward)
        else:
            block.forward = CompiledForward(forward)


class CompiledForward:
    """A block's forward, compiled. Its copy is the forward as it was written: a twin on meta runs that."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.plain = forward
        self._compiled = torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.plain, memo)


@functools.cache
def check_compiler(device: str) -> None:
    """Compiles a line, once per process. Raises PlanError when that fails."""
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8, device=device))
    except Exception as error:  # whatever it is, nothing can be compiled here
        raise PlanError(
            "compile=true needs a C++ compiler, and on a GPU also Triton, that work here",
            given=str(error).strip().splitlines()[0],
            expected="g++ or clang++ in PATH, or named by CXX",
            hint="compile=false",
        ) from error
