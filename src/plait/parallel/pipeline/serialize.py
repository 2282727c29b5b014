"""What a stage returns, taken apart into tensors that travel and a description of where they belong.

    parcel, tensors = pack(output)
    output = unpack(parcel, tensors)

A stage's output is a tensor, or tuples, lists, dicts and transformers' ModelOutputs of them, with None,
numbers and strings between. A tensor that appears twice is one tensor on both sides. The description is JSON;
of classes it has names, which are looked up among what the receiver has imported already: nothing is loaded.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from plait.errors import ModelError


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False  # a gradient of its shape and dtype comes back

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        grad = " with gradient" if self.needs_grad else ""
        return f"{list(self.shape)} {_name_of(self.dtype)}{grad}"


@dataclass(frozen=True)
class PackedOutput:
    """How an output is made of tensors. Two are equal if their outputs differ in the tensors' values only."""

    structure: str  # JSON: see _Packer
    specs: tuple[TensorSpec, ...]

    def to_json(self) -> str:
        specs = [[list(spec.shape), _name_of(spec.dtype), spec.needs_grad] for spec in self.specs]
        return json.dumps({"structure": self.structure, "tensors": specs})

    @classmethod
    def from_json(cls, text: str) -> "PackedOutput":
        found = json.loads(text)
        specs = (
            TensorSpec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in found["tensors"]
        )
        return cls(found["structure"], tuple(specs))

    @cached_property
    def grad_specs(self) -> tuple[TensorSpec, ...]:
        """What the gradients that come back look like."""
        return tuple(TensorSpec(spec.shape, spec.dtype) for spec in self.specs if spec.needs_grad)

    def tensors_with_grad(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of its tensors those that need a gradient."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]

    def __str__(self) -> str:
        return ", ".join(map(str, self.specs)) or "no tensors"


def pack(output: Any, *, of: str = "a stage") -> tuple[PackedOutput, list[Tensor]]:
    """Takes an output apart. `of`: whose, for the ModelError about what cannot travel."""
    packer = _Packer(of)
    structure = json.dumps(packer.node(output, "output"))
    return PackedOutput(structure, tuple(map(TensorSpec.of, packer.tensors))), packer.tensors


def unpack(parcel: PackedOutput, tensors: Sequence[Tensor]) -> Any:
    """Puts an output together again; `tensors`: one for each of the parcel's specs, in their order."""
    assert len(tensors) == len(parcel.specs), f"{len(tensors)} tensors for {len(parcel.specs)} places"
    return _unpacked(json.loads(parcel.structure), tensors)


class _Packer:
    """Nodes are [kind, content]: a value, a tensor's number, children, [key, child] pairs; for a ModelOutput
    also its class."""

    def __init__(self, of: str) -> None:
        self.tensors: list[Tensor] = []
        self._of = of
        self._numbers: dict[int, int] = {}  # by id: all of them live as long as the output

    def node(self, value: Any, path: str) -> list[Any]:
        if value is None or type(value) in (bool, int, float, str):
            return ["value", value]
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return ["tensor", self._number(value)]
        if type(value) in (tuple, list):
            kind = type(value).__name__
            return [kind, [self.node(child, f"{path}[{place}]") for place, child in enumerate(value)]]
        if type(value) is dict and all(type(key) in (str, int) for key in value):
            return ["dict", self._items(value, path)]
        if isinstance(value, ModelOutput) and _class_of(*_address(value)) is type(value):
            return ["model-output", self._items(value, path), *_address(value)]
        raise ModelError(
            f"{self._of} returns something that cannot be sent to the next stage",
            given=f"{path} is {_described(value)}",
            expected="tensors, tuples, lists, dicts (keys: strings, integers), transformers' ModelOutputs, "
            "None, numbers and strings",
            hint="blocks that return tensors only, or stages cut where they do",
        )

    def _items(self, value: dict[Any, Any], path: str) -> list[Any]:
        return [[key, self.node(child, f"{path}[{key!r}]")] for key, child in value.items()]

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


def _unpacked(node: list[Any], tensors: Sequence[Tensor]) -> Any:
    kind, content = node[0], node[1]
    match kind:
        case "value":
            return content
        case "tensor":
            return tensors[content]
        case "tuple" | "list":
            children = [_unpacked(child, tensors) for child in content]
            return tuple(children) if kind == "tuple" else children
    items = {key: _unpacked(child, tensors) for key, child in content}
    if kind == "dict":
        return items
    found = _class_of(*node[2:])
    if found is None:
        raise ModelError(
            "a stage receives an output of a class that its program has not imported",
            given=".".join(node[2:]),
            hint="the same imports on all ranks",
        )
    return found(**items)


def _address(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _class_of(module: str, name: str) -> type[Any] | None:
    """The ModelOutput of that name, if it is at the top of a module that is imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, ModelOutput) else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor):
        return f"a tensor with layout {value.layout}"
    if isinstance(value, dict):
        return f"a {kind} with keys {list(value)[:4]}"
    return f"a {kind}"
