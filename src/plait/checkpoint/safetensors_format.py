"""The header of a safetensors file: the length of a JSON text and the text; the tensors' bytes follow.

[Note: header validation]
No value of a header is used before it is consistent with the others and with the file. Its length is bounded;
a tensor's number of bytes matches its shape and dtype; tensors fill the file without gap or overlap, as the
format requires. Memory is allocated for the model's own tensors, never by a header's numbers alone.

Also dtypes and shapes of tensors in files.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.errors import CheckpointError
from plait.fileio import open_regular, parse_json, unique_keys

_MAX_DIMS, _MAX_ELEMENTS = 64, 2**60

# safetensors' names of torch dtypes.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_valid_shape(shape: Sequence[object]) -> bool:
    """Return whether a tensor can have this shape."""
    sizes = [max(1, size) for size in shape if type(size) is int and size >= 0]
    return len(sizes) == len(shape) <= _MAX_DIMS and math.prod(sizes) < _MAX_ELEMENTS


_ALIGNMENT = 64  # of a file's first tensor
HEADER_LIMIT_BYTES = 100_000_000  # as in the safetensors library
_METADATA = "__metadata__"


class TensorEntry(NamedTuple):
    """A tensor in a file: bytes [start, stop), counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def from_start(cls, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> "TensorEntry":
        """The entry of a tensor that starts at byte `start`."""
        return cls(DTYPE_NAMES[dtype], shape, start, start + math.prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class Header:
    """A file's header. `num_bytes`: of the header, up to the first tensor's first byte."""

    entries: Mapping[str, TensorEntry]
    num_bytes: int
    crc32: int
    file_bytes: int


def encode_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode the header; the tensors follow it, in their order."""
    values: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        offsets = [entry.start, entry.stop]
        values[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """Read the header of a file of any program. See [Note: header validation]. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = file.read(8)
            num_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or num_bytes > min(HEADER_LIMIT_BYTES, size - 8):
                raise _not_safetensors(path, f"a header of {num_bytes} bytes in a file of {size}")
            text = file.read(num_bytes)
    except OSError as error:
        raise _not_safetensors(path, error.strerror or str(error)) from error
    if len(text) < num_bytes:
        raise _not_safetensors(path, f"it ends at byte {8 + len(text)}")
    try:
        values = parse_json(text, object_pairs_hook=unique_keys)
        entries = {name: _entry(name, value) for name, value in values.items() if name != _METADATA}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _not_safetensors(path, f"its header: {str(error)[:200]}") from error
    ranges = sorted((entry.start, entry.stop) for entry in entries.values())
    edges = [(0, 0), *ranges, (size - 8 - num_bytes,) * 2]
    if any(one[1] != other[0] for one, other in pairwise(edges)):
        raise _not_safetensors(path, "its tensors do not fill it, or overlap")
    return Header(entries, 8 + num_bytes, zlib.crc32(length + text), size)


def _entry(name: str, value: Any) -> TensorEntry:
    """Parse an entry. Raises ValueError, TypeError or KeyError if it does not describe a tensor."""
    dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} is of dtype {dtype!r:.40}")
    if not is_valid_shape(shape) or not all(type(byte) is int for byte in (start, stop)):
        raise ValueError(f"{name} has an invalid shape")
    if not 0 <= start <= stop or stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} does not have the number of bytes of its shape")
    return TensorEntry(dtype, shape, start, stop)


def _not_safetensors(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "not a complete safetensors file",
        given=f"{path}: {reason}",
        expected="a header, and the bytes of all tensors that it lists",
        hint=f"copy {path.name} again, from where it was copied",
    )
