"""Collectives as operators of torch, for graphs that torch.compile traces.

[Note: collectives in compiled graphs]
torch.compile runs a layer's forward and backward without values, to trace them (`is_traced`). The collectives
of plait.comm cannot be traced, so operators take their place in the graph. They return new tensors, because a
traced graph has no changes in place, and they block: what overlaps with a collective is an argument of its
operator. Operators take tensors, numbers and text, so a group is given by its name.

[Note: order of collectives in compiled graphs]
Collectives of one group must start in the same order on every rank, otherwise the job hangs or mixes up data.
torch traces a block in the order of the program, which is the same on every rank. But the compiler decides
per rank, by shapes, what it fuses and in which order kernels run, and shards may be uneven. So:

  - `CollectivesInOrder` makes each operator in a compiled graph depend on the one before it: `after` is the
    other one's result. All later changes of the graph obey this data flow.
  - No operator is recomputed in backward: torch recomputes only operators of a list of its own, and selective
    recompute saves the results of these. So which graph has which operators does not depend on shapes either.
  - Identical operators may be merged, and unused ones removed. Both follow from the program, not from shapes.
"""

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, Node

from plait.comm import Group, all_gather, named_group

NAMESPACE = "plait"


def is_traced(x: Tensor) -> bool:
    """Return whether the calling code is being traced. See [Note: collectives in compiled graphs]."""
    return isinstance(x, FakeTensor | FunctionalTensor)


def all_gather_into(output: Tensor, own: Tensor, group: Group, label: str) -> Tensor:
    """All-gather contiguous tensors into `output`, or into a new tensor of its shape if traced."""
    if is_traced(own):
        full: Tensor = torch.ops.plait.all_gather(own.reshape(-1), group.name, group.size, label)
        return full.view(output.shape)
    all_gather(output.view(-1), own.view(-1), group, label=label)
    return output


def define(
    name: str, arguments: str, returns: str, run: Callable[..., object], shapes: Callable[..., object]
) -> None:
    """Define the operator plait::`name`. `shapes`: the same function without values, for traced tensors.

    Tensors on the meta device are not traced: their collectives are logged.
    """

    def fake(first: Tensor, *rest: Any) -> object:
        return (shapes if is_traced(first) else run)(first, *rest)

    _library.define(f"{name}({arguments}, *, Tensor? after=None) -> {returns}")
    _library.impl(name, _without_after(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _without_after(fake), lib=_library)


def _without_after(function: Callable[..., object]) -> Callable[..., object]:
    def run(*args: Any, **_: Tensor | None) -> object:
        return function(*args)

    return run


def _run_all_gather(own: Tensor, group: str, size: int, label: str) -> Tensor:
    output = own.new_empty(size * own.numel())
    return all_gather_into(output, own.contiguous(), named_group(group), label)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
define(
    "all_gather",
    "Tensor own, str group, int size, str label",
    "Tensor",
    _run_all_gather,
    lambda own, _, size, __: own.new_empty(size * own.numel()),
)


class CollectivesInOrder:
    """A `CustomGraphPass` of Inductor. See [Note: order of collectives in compiled graphs]."""

    def __call__(self, graph: Graph) -> None:
        last: Node | None = None
        for node in list(graph.nodes):
            if not (node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE):
                continue
            if last is not None:
                with graph.inserting_before(node):
                    node.update_kwarg("after", _a_tensor(graph, last))
            last = node

    def uuid(self) -> str:
        """Return what compiled graphs on disk are found by, besides torch's own key."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _a_tensor(graph: Graph, node: Node) -> Node:
    """The node's result, or the first of its results."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return node
    first: Node = graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = value[0]
    return first
