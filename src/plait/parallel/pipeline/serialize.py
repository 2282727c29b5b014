"""Split a stage's output into tensors to be sent and a description of its structure.

    packed, tensors = pack(output)
    output = unpack(packed, tensors)

A stage's output is a tensor, or nested tuples, lists, dicts and transformers' ModelOutputs of tensors, None,
numbers and strings. A tensor that appears twice is one tensor on both sides. The description is JSON. It
holds class names, which the receiver looks up in modules that it has imported already: it imports nothing.
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

from plait.errors import ModelError
from plait.models import is_model_output_class


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor to be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False  # a gradient of its shape and dtype is sent back

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        grad = " with gradient" if self.needs_grad else ""
        return f"{list(self.shape)} {_dtype_name(self.dtype)}{grad}"


@dataclass(frozen=True)
class PackedOutput:
    """Structure of an output, and the specs of its tensors; independent of the tensors' values."""

    structure: str  # JSON: see _Packer
    specs: tuple[TensorSpec, ...]

    def to_json(self) -> str:
        specs = [[list(spec.shape), _dtype_name(spec.dtype), spec.needs_grad] for spec in self.specs]
        return json.dumps({"structure": self.structure, "tensors": specs})

    @classmethod
    def from_json(cls, text: str) -> "PackedOutput":
        fields = json.loads(text)
        specs = (
            TensorSpec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in fields["tensors"]
        )
        return cls(fields["structure"], tuple(specs))

    @cached_property
    def grad_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the gradients that are sent back."""
        return tuple(TensorSpec(spec.shape, spec.dtype) for spec in self.specs if spec.needs_grad)

    def tensors_with_grad(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the output's tensors that require a gradient."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]

    def __str__(self) -> str:
        return ", ".join(map(str, self.specs)) or "no tensors"


def pack(output: Any, *, source: str = "a stage") -> tuple[PackedOutput, list[Tensor]]:
    """Split an output into its description and its tensors.

    Raises ModelError for an output that cannot be sent; `source` names in it what returned the output.
    """
    packer = _Packer(source)
    structure = json.dumps(packer.node(output, "output"))
    return PackedOutput(structure, tuple(map(TensorSpec.from_tensor, packer.tensors))), packer.tensors


def unpack(packed: PackedOutput, tensors: Sequence[Tensor]) -> Any:
    """Rebuild an output; `tensors`: one for each of `packed.specs`, in their order."""
    assert len(tensors) == len(packed.specs), f"{len(tensors)} tensors for {len(packed.specs)} specs"
    return _unpack_node(json.loads(packed.structure), tensors)


class _Packer:
    """Builder of a tree of [kind, content]: a value, a tensor's index, children, or [key, child] pairs; a
    ModelOutput also has its class."""

    def __init__(self, source: str) -> None:
        self.tensors: list[Tensor] = []
        self._source = source
        self._indices: dict[int, int] = {}  # by id(tensor); the output keeps all tensors alive

    def node(self, value: Any, path: str) -> list[Any]:
        if value is None or type(value) in (bool, int, float, str):
            return ["value", value]
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return ["tensor", self._index(value)]
        if type(value) in (tuple, list):
            kind = type(value).__name__
            return [kind, [self.node(child, f"{path}[{index}]") for index, child in enumerate(value)]]
        if type(value) is dict and all(type(key) in (str, int) for key in value):
            return ["dict", self._items(value, path)]
        if _find_class(*_class_name(value)) is type(value):
            return ["model-output", self._items(value, path), *_class_name(value)]
        raise ModelError(
            f"{self._source} returns something that cannot be sent to the next stage",
            given=f"{path} is {_describe(value)}",
            expected="tensors, tuples, lists, dicts (keys: strings, integers), transformers' ModelOutputs, "
            "None, numbers and strings",
            hint="blocks that return tensors only, or stage boundaries where they do",
        )

    def _items(self, value: dict[Any, Any], path: str) -> list[Any]:
        return [[key, self.node(child, f"{path}[{key!r}]")] for key, child in value.items()]

    def _index(self, tensor: Tensor) -> int:
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return index


def _unpack_node(node: list[Any], tensors: Sequence[Tensor]) -> Any:
    kind, content = node[0], node[1]
    match kind:
        case "value":
            return content
        case "tensor":
            return tensors[content]
        case "tuple" | "list":
            children = [_unpack_node(child, tensors) for child in content]
            return tuple(children) if kind == "tuple" else children
    items = {key: _unpack_node(child, tensors) for key, child in content}
    if kind == "dict":
        return items
    output_class = _find_class(*node[2:])
    if output_class is None:
        raise ModelError(
            "a stage receives an output of a class that its process has not imported",
            given=".".join(node[2:]),
            expected="a class of transformers, or of a module that all ranks import",
            hint="the same imports on all ranks",
        )
    return output_class(**items)


def _class_name(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _find_class(module: str, name: str) -> type[Any] | None:
    """Return the ModelOutput of that name at the top level of an imported module, if there is one."""
    value = getattr(sys.modules.get(module), name, None)
    return value if is_model_output_class(value) else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor):
        return f"a tensor with layout {value.layout}"
    if isinstance(value, dict):
        return f"a {kind} with keys {list(value)[:4]}"
    return f"a {kind}"
