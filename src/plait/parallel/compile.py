"""torch.compile of a model's blocks.

A block's `forward` is compiled, not its call: hooks, which unshard and reshard parameters, stay outside the
graph. Blocks of one kind share the code that was compiled for the first of them.

[Note: compile and recompute]
`full` and `every=k`: the checkpoint is outside, and runs the compiled forward again in backward; it saves the
block's inputs, as without compile. `selective`: the compiler is outside, because only it sees the matrix
products inside its graph; torch's partitioner saves those that the policy names, and fuses the recomputation
of the rest into backward.

[Note: uncompiled code]
Code that torch.compile cannot trace runs uncompiled between two graphs (a graph break), which the first rank
reports once. With `selective` it would run the entire block uncompiled, so that is an error. Attention over
ranks is such code, and known: its messages and blocks of keys follow from each batch.

[Note: compiled later]
With `compile=auto` blocks run uncompiled until `turn` compiles them, and the plan's other options are applied
to them as to compiled ones. Nothing of torch's compiler is used before. A block that cannot be compiled then
runs uncompiled on this rank, and is reported as a reason not to compile, so that no rank waits for another.
Blocks that are compiled in parts are not reported: their times are measured.
"""

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from plait.errors import PlanError
from plait.models.attention import UNCOMPILED
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.attention_products import AttentionProducts
from plait.parallel.tensor.operators import CollectivesInOrder

# Warnings of torch while it compiles its code or a model's: with warnings as errors nothing would compile.
_TORCH_WARNINGS = (
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    (r".*torch\.autograd\.function\.Function.* should not be instantiated", DeprecationWarning),
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    (r"\s*Dynamo detected a call to a `functools\.lru_cache`-wrapped", UserWarning),
)
_OPTIONS: dict[str, Any] = {  # one object each: torch compares
    "post_grad_custom_pre_pass": CollectivesInOrder(),
    "post_grad_custom_post_pass": AttentionProducts(),
}


def compile_blocks(
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    selective: bool = False,
    warns: bool = True,
    later: bool = False,
) -> None:
    """Compile the forward of each block. See [Note: compile and recompute].

    `selective`: with selective recompute; any other is applied afterwards. `warns`: report code that cannot
    be compiled. Compilation itself happens at a block's first forward and backward, and again for new shapes.
    `later`: see [Note: compiled later]. Raises PlanError if no compiler works for `device`.
    """
    if not later:
        prepare_compiler(device)
    if selective:
        recompute_blocks(blocks, "selective")
    reported = set[str]() if warns and not later else None
    for block in blocks:
        compiled = CompiledForward(type(block).__name__, block.forward, selective, reported, later=later)
        block.compiled_forward = compiled  # type: ignore[assignment]
        block.forward = MethodType(_run_compiled, block)


def turn(blocks: Iterable[nn.Module], *, on: bool) -> None:
    """Run the blocks of `compile_blocks` compiled or uncompiled from now on; after `prepare_compiler`."""
    for block in blocks:
        forward: Any = block.compiled_forward
        forward.turn(on=on)


def problems(blocks: Iterable[nn.Module]) -> set[str]:
    """Reasons for which blocks could not be compiled. See [Note: compiled later]."""
    forwards: list[Any] = [block.compiled_forward for block in blocks]
    return {forward.problem for forward in forwards if forward.problem}


def prepare_compiler(device: torch.device) -> None:
    """Set torch's compiler up for blocks. Raises PlanError if no compiler works for `device`."""
    for message, category in _TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    check_compiler(device.type)
    for graph_pass in _OPTIONS.values():
        torch._inductor.custom_graph_pass.CustomGraphPass.register(type(graph_pass))


def _run_compiled(block: Any, *args: Any, **kwargs: Any) -> Any:
    return block.compiled_forward(*args, **kwargs)


class CompiledForward:
    """A block's forward, compiled. A deep copy is the uncompiled forward, for copies of the model on meta."""

    def __init__(
        self,
        block: str,
        forward: Callable[..., Any],
        fullgraph: bool,
        reported: set[str] | None,
        *,
        later: bool,
    ) -> None:
        """`block`: its class. `fullgraph`: see [Note: uncompiled code]. `reported`: warnings so far, of
        all blocks; None: nothing is reported. `later`, `problem`: see [Note: compiled later]."""
        self.eager = forward
        self.problem = ""
        self._block, self._fullgraph = block, fullgraph
        self._is_optional, self._reported = later, reported
        self._run = forward
        self._compiled: Callable[..., Any] | None = None
        self._when_on = self._run_first
        self.turn(on=not later)

    def turn(self, *, on: bool) -> None:
        if on and self._compiled is None:
            self._compiled = torch.compile(self.eager, fullgraph=self._fullgraph, options=_OPTIONS)
        if not self.problem:
            self._run = self._when_on if on else self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run_first(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None, "it was turned on"
        self._run = self._when_on = self._compiled
        before = Counter(torch._dynamo.utils.counters["graph_break"])
        try:
            output = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = _reason(_innermost(error))
            if self._is_optional:
                self._run, self.problem = self.eager, f"{self._block}: {reason}"
                return self.eager(*args, **kwargs)
            known = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UncapturedHigherOrderOpError)
            if not (self._fullgraph and isinstance(error, known)):
                raise
            raise PlanError(
                f"{self._block} cannot be compiled as one graph, which recompute=selective needs",
                given=f"compile=true recompute=selective, and {reason}",
                expected="a block that torch.compile traces without a graph break",
                hint="recompute=full or recompute=none, which compile the other parts, or compile=false",
            ) from error
        found = Counter(torch._dynamo.utils.counters["graph_break"]) - before
        reasons = dict.fromkeys(reason for reason in map(_reason, found) if reason != UNCOMPILED)
        if self._reported is not None and reasons:
            warning = (
                f"{self._block} is compiled in parts only, because torch.compile cannot trace "
                f"{'; '.join(reasons)}. TORCH_LOGS=graph_breaks shows where"
            )
            if warning not in self._reported:
                self._reported.add(warning)
                warnings.warn(warning, stacklevel=2)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)


def _innermost(error: BaseException) -> str:
    """The first of torch's descriptions, of the code itself; others are of operators around it."""
    while isinstance(error.__cause__, torch._dynamo.exc.TorchDynamoException):
        error = error.__cause__
    return str(error)


def _reason(graph_break: str) -> str:
    """A phrase for one of torch's descriptions of a graph break."""
    if "(reason: " in graph_break:
        return graph_break.partition("(reason: ")[2].partition(")\n")[0]
    title, _, rest = graph_break.strip().partition("\n")
    explanation = rest.partition("Explanation: ")[2].partition("\n")[0]
    return explanation or title


@functools.cache
def check_compiler(device: str) -> None:
    """Compile a trivial function, once per process. Raises PlanError if that fails."""
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8, device=device))
    except Exception as error:  # of any kind: nothing can be compiled here
        raise PlanError(
            "compile=true needs a working C++ compiler, and on a GPU also Triton",
            given=str(error).strip().partition("\n")[0] or type(error).__name__,
            expected="g++ or clang++ in PATH, or named by CXX",
            hint="compile=false",
        ) from error
